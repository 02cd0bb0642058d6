// An explanation in a notebook: its maps, with the controls of the page. Comes after paint.js and zoom.js in one module.

const LABELS = { map: "what speaks for it", signed: "for and against", sureness: "sureness" };
const SCALES = { shared: "one scale for all", own: "each its own scale" };
const CONTROLS = { display: "flex", flexWrap: "wrap", alignItems: "center", gap: "0.4rem 1.2rem", marginBottom: "0.5rem" };

function built(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function named(label, control) {
  Object.assign(control.style, { margin: 0, verticalAlign: "middle" });
  return built("label", {}, `${label} `, control);
}

function choice(values, changed) {
  const select = built("select", {}, ...values.map(([value, text]) => new Option(text, value)));
  select.addEventListener("change", changed);
  return select;
}

// Its step before its value, which would be rounded to the usual step.
function slider(max, value, changed) {
  const input = built("input", { type: "range", min: 0, max, step: "any", value });
  input.addEventListener("input", changed);
  return input;
}

// What of an explanation is drawn, out of the bytes of all its maps.
class Maps {
  constructor(model) {
    this.get = (name) => model.get(name);
    this.names = model.get("names");
    [this.width, this.height] = ["width", "height"].map(this.get);
    this.size = this.width * this.height;
    this.limits = {}; // of all maps, by the view: they do not change
    this.views = Object.keys(LABELS).filter((view) => model.get(view).byteLength > 0);
  }

  values(view, number) {
    const data = this.get(view);
    return new Float32Array(data.buffer, data.byteOffset + 4 * number * this.size, this.size);
  }

  // The image of a map, as blend takes it.
  image(number) {
    const data = this.get("pictures");
    const at = data.byteOffset + 4 * this.size * Math.floor((number * this.get("images")) / this.names.length);
    return { width: this.width, height: this.height, data: new Uint8ClampedArray(data.buffer, at, 4 * this.size) };
  }

  // The map whose brightest colour is the largest number.
  strongest(view) {
    const limits = (this.limits[view] ??= this.names.map((_, number) => limitOf(this.values(view, number))));
    return limits.indexOf(Math.max(...limits));
  }

  // A map as it is and smoothed, with the number in the brightest colour of each; as: the map that sets them
  planes(view, number, window, as) {
    const made = (one) => {
      const shown = this.values(view, one);
      const kept = view === "signed" ? shown : shown.map((value) => Math.max(0, value));
      return [shown, smooth(kept, this.width, this.height, window)];
    };
    const limits = made(as).map(limitOf);
    return made(number).map((values, kind) => ({ values, limit: limits[kind] }));
  }
}

// Where the map is, which is zoomed as on the page.
function stage(canvas, width) {
  const layer = built("div", { className: "layer" }, canvas);
  const made = built("div", { tabIndex: 0 }, layer);
  Object.assign(canvas.style, { width: "100%", display: "block", imageRendering: "pixelated" });
  Object.assign(made.style, { width: `${width}px`, maxWidth: "100%", overflow: "hidden" });
  layer.style.transformOrigin = "0 0";
  return made;
}

function zoomButtons(zoom) {
  const acts = { "−": () => zoom.by(0.5), "1×": () => zoom.reset(), "+": () => zoom.by(2) };
  const buttons = Object.entries(acts).map(([textContent, onclick]) => built("button", { type: "button", textContent, onclick }));
  return built("span", { role: "group", ariaLabel: "Zoom" }, ...buttons);
}

function render({ model, el }) {
  const maps = new Maps(model);
  const colours = Object.fromEntries(Object.entries(model.get("colormaps")).map(([name, hexes]) => [name, table(hexes)]));
  const which = choice(maps.names.map((name, number) => [number, name]), draw);
  const view = choice(maps.views.map((name) => [name, LABELS[name]]), draw);
  const scales = choice(Object.entries(SCALES), draw);
  const [mix, above, smoothing] = [slider(1, 0.5, draw), slider(0.95, 0, draw), slider(25, 5, draw)];
  const canvas = built("canvas", { className: "dave-map" });
  const shown = stage(canvas, Math.min(448, 2 * maps.width));
  const zoom = new Zoom(() => [shown]);
  const said = built("output", {});

  function draw() {
    const number = Number(which.value);
    const as = scales.value === "shared" ? maps.strongest(view.value) : number;
    const [map, soft] = maps.planes(view.value, number, 2 * Math.floor(smoothing.value / 2) + 1, as);
    said.textContent = `${maps.names[number]}: the brightest colour is ${map.limit.toPrecision(3)}`;
    if (view.value === "sureness") return heat(canvas, map, maps.width, maps.height, colours.dave_uncertainty);
    const signed = view.value === "signed";
    const look = { mix: Number(mix.value), above: Number(above.value), signed };
    blend(canvas, maps.image(number), map, soft, look, signed ? colours.dave_signed : colours.dave);
  }

  const rows = Object.entries({ Map: which, View: view, "Image to map": mix, "Hide below": above, Smoothing: smoothing });
  if (maps.names.length > 1) rows.push(["Colours", scales]);
  const controls = built("div", { className: "dave-controls" }, ...rows.map((row) => named(...row)), zoomButtons(zoom));
  Object.assign(controls.style, CONTROLS);
  el.append(controls, shown, said);
  zoom.listen(shown);
  draw();
}

export default { render };
