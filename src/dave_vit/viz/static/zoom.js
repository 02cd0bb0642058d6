// Zoom and pan, the same for all maps.

const STEP = 1.5;
const MAX_SCALE = 16;

const bound = (value, low, high) => Math.min(high, Math.max(low, value));

export class Zoom {
  // stages: returns the elements that show a part of their .layer; onScale: called with the factor when it changes
  constructor(stages, onScale = () => {}) {
    Object.assign(this, { stages, onScale });
    this.scale = 1;
    this.centre = { x: 0.5, y: 0.5 }; // of the visible part, as fractions of the whole
    this.fingers = null; // last position of two of them
  }

  // at: the point that stays in place, as fractions of the whole
  by(factor, at = this.centre) {
    const scale = bound(this.scale * factor, 1, MAX_SCALE);
    const rest = this.scale / scale;
    this.centre = { x: at.x + (this.centre.x - at.x) * rest, y: at.y + (this.centre.y - at.y) * rest };
    const isNew = scale !== this.scale;
    this.scale = scale;
    this.apply();
    if (isNew) this.onScale(scale);
  }

  reset() {
    this.by(1 / MAX_SCALE);
  }

  pan(x, y) {
    this.centre = { x: this.centre.x - x / this.scale, y: this.centre.y - y / this.scale };
    this.apply();
  }

  apply() {
    const half = 0.5 / this.scale;
    this.centre = { x: bound(this.centre.x, half, 1 - half), y: bound(this.centre.y, half, 1 - half) };
    const left = 50 - 100 * this.centre.x * this.scale;
    const top = 50 - 100 * this.centre.y * this.scale;
    for (const stage of this.stages()) {
      const layer = stage.querySelector(".layer");
      layer.style.transform = `translate(${left}%, ${top}%) scale(${this.scale})`;
      layer.style.setProperty("--size", 1 / this.scale); // of the mark, which keeps its size
      stage.classList.toggle("zoomed", this.scale > 1);
    }
  }

  // Zooms a stage with Ctrl and the wheel, a double click, two fingers, + - and 0, and pans it by dragging.
  listen(stage) {
    const at = (event) => locate(event, stage.querySelector(".layer"));
    stage.addEventListener("dblclick", (event) => this.by(STEP * STEP, at(event)));
    stage.addEventListener("keydown", (event) => this.key(event));
    stage.addEventListener("pointerdown", (event) => this.scale > 1 && stage.setPointerCapture(event.pointerId));
    stage.addEventListener("pointermove", (event) => this.drag(event, stage));
    const wheel = (event) => {
      if (!event.ctrlKey) return; // the page scrolls
      event.preventDefault();
      this.by(event.deltaY < 0 ? STEP : 1 / STEP, at(event));
    };
    stage.addEventListener("wheel", wheel, { passive: false });
    for (const name of ["touchstart", "touchmove", "touchend", "touchcancel"]) {
      stage.addEventListener(name, (event) => this.pinch(event, stage), { passive: false });
    }
  }

  pinch(event, stage) {
    const before = this.fingers;
    this.fingers = event.touches.length === 2 ? midpoint(event.touches) : null;
    if (!this.fingers) return;
    event.preventDefault(); // or the whole page would be zoomed
    if (!before) return;
    const box = stage.getBoundingClientRect();
    this.by(this.fingers.distance / before.distance, locate(before, stage.querySelector(".layer")));
    this.pan((this.fingers.clientX - before.clientX) / box.width, (this.fingers.clientY - before.clientY) / box.height);
  }

  drag(event, stage) {
    if (this.scale === 1 || !event.buttons || this.fingers) return;
    const box = stage.getBoundingClientRect();
    this.pan(event.movementX / box.width, event.movementY / box.height);
  }

  key({ key }) {
    if (key === "+" || key === "=") this.by(STEP);
    if (key === "-") this.by(1 / STEP);
    if (key === "0") this.reset();
  }
}

export function formatFactor(scale) {
  return `${Number(scale.toFixed(1))}×`;
}

function locate(event, layer) {
  const box = layer.getBoundingClientRect();
  return { x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height };
}

// The point between two fingers, and their distance.
function midpoint([one, two]) {
  return {
    clientX: (one.clientX + two.clientX) / 2,
    clientY: (one.clientY + two.clientY) / 2,
    distance: Math.max(1, Math.hypot(one.clientX - two.clientX, one.clientY - two.clientY)),
  };
}
