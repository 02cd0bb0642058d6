// Zoom and pan, the same for all maps.

const STEP = 1.5;
const MOST = 16;

const within = (value, low, high) => Math.min(high, Math.max(low, value));

export class Zoom {
  // stages: gives the elements that show a part of their .layer
  constructor(stages) {
    this.stages = stages;
    this.scale = 1;
    this.centre = { x: 0.5, y: 0.5 }; // of what is seen, in parts of the whole
    this.fingers = null; // where two of them were last
  }

  // by: a factor; at: the place that stays where it is, in parts of the whole
  by(factor, at = this.centre) {
    const scale = within(this.scale * factor, 1, MOST);
    const rest = this.scale / scale;
    this.centre = { x: at.x + (this.centre.x - at.x) * rest, y: at.y + (this.centre.y - at.y) * rest };
    this.scale = scale;
    this.apply();
  }

  reset() {
    this.by(1 / MOST);
  }

  pan(x, y) {
    this.centre = { x: this.centre.x - x / this.scale, y: this.centre.y - y / this.scale };
    this.apply();
  }

  apply() {
    const seen = 0.5 / this.scale;
    this.centre = { x: within(this.centre.x, seen, 1 - seen), y: within(this.centre.y, seen, 1 - seen) };
    const left = 50 - 100 * this.centre.x * this.scale;
    const top = 50 - 100 * this.centre.y * this.scale;
    for (const stage of this.stages()) {
      const layer = stage.querySelector(".layer");
      layer.style.transform = `translate(${left}%, ${top}%) scale(${this.scale})`;
      layer.style.setProperty("--size", 1 / this.scale); // of the mark, which stays as it is
      stage.classList.toggle("zoomed", this.scale > 1);
    }
  }

  // Lets a stage be zoomed with the wheel and Ctrl, a double click, two fingers, + - and 0, and dragged.
  listen(stage) {
    const at = (event) => place(event, stage.querySelector(".layer"));
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
    this.fingers = event.touches.length === 2 ? pair(event.touches) : null;
    if (!this.fingers) return;
    event.preventDefault(); // or the whole page would be zoomed
    if (!before) return;
    const box = stage.getBoundingClientRect();
    this.by(this.fingers.apart / before.apart, place(before, stage.querySelector(".layer")));
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

function place(event, layer) {
  const box = layer.getBoundingClientRect();
  return { x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height };
}

// The point between two fingers, and how far they are apart.
function pair([one, two]) {
  return {
    clientX: (one.clientX + two.clientX) / 2,
    clientY: (one.clientY + two.clientY) / 2,
    apart: Math.max(1, Math.hypot(one.clientX - two.clientX, one.clientY - two.clientY)),
  };
}
