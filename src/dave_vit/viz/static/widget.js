// An explanation in a notebook: its maps, with the controls of the page. Follows dom.js, paint.js and zoom.js in one module.

const LABELS = { map: "evidence for it", signed: "for and against", certainty: "certainty" };
const SCALES = { shared: "one scale for all", own: "each its own scale" };
const CONTROLS = { display: "flex", flexWrap: "wrap", alignItems: "center", gap: "0.4rem 1.2rem", marginBottom: "0.5rem" };

function withLabel(label, control) {
  Object.assign(control.style, { margin: 0, verticalAlign: "middle" });
  return make("label", {}, `${label} `, control);
}

function dropdown(values, onChange) {
  const select = make("select", {}, ...values.map(([value, text]) => new Option(text, value)));
  select.addEventListener("change", onChange);
  return select;
}

// The step is set before the value, which would be rounded to the default step.
function slider(max, value, onInput) {
  const input = make("input", { type: "range", min: 0, max, step: "any", value });
  input.addEventListener("input", onInput);
  return input;
}

// Reads maps and images from the bytes of an explanation.
class Maps {
  constructor(model) {
    this.get = (name) => model.get(name);
    this.names = model.get("names");
    [this.width, this.height] = ["width", "height"].map(this.get);
    this.size = this.width * this.height;
    this.limits = {}; // of all maps, by view
    this.views = Object.keys(LABELS).filter((view) => model.get(view).byteLength > 0);
  }

  values(view, number) {
    const data = this.get(view);
    return new Float32Array(data.buffer, data.byteOffset + 4 * number * this.size, this.size);
  }

  // The image of a map, as drawOverlay takes it.
  image(number) {
    const data = this.get("pictures");
    const at = data.byteOffset + 4 * this.size * Math.floor((number * this.get("images")) / this.names.length);
    return { width: this.width, height: this.height, data: new Uint8ClampedArray(data.buffer, at, 4 * this.size) };
  }

  // Index of the map whose brightest colour is the largest number.
  strongest(view) {
    const limits = (this.limits[view] ??= this.names.map((_, number) => limitOf(this.values(view, number))));
    return limits.indexOf(Math.max(...limits));
  }

  // A map as it is and smoothed, each with the number in its brightest colour; reference: the map that sets it
  planes(view, number, window, reference) {
    const compute = (index) => {
      const values = this.values(view, index);
      return [values, smoothMap(values, this.width, this.height, window, view === "signed")];
    };
    const limits = compute(reference).map(limitOf);
    return compute(number).map((values, kind) => ({ values, limit: limits[kind] }));
  }
}

// The element that holds the map, which zooms as on the page.
function makeStage(canvas, width) {
  const layer = make("div", { className: "layer" }, canvas);
  const element = make("div", { tabIndex: 0 }, layer);
  Object.assign(canvas.style, { width: "100%", display: "block", imageRendering: "pixelated" });
  Object.assign(element.style, { width: `${width}px`, maxWidth: "100%", overflow: "hidden" });
  layer.style.transformOrigin = "0 0";
  return element;
}

function zoomButtons(zoom) {
  const actions = { "−": () => zoom.by(0.5), "1×": () => zoom.reset(), "+": () => zoom.by(2) };
  const buttons = Object.entries(actions).map(([textContent, onclick]) => make("button", { type: "button", textContent, onclick }));
  zoom.onScale = (scale) => (buttons[1].textContent = formatFactor(scale));
  return make("span", { role: "group", ariaLabel: "Zoom" }, ...buttons);
}

function render({ model, el }) {
  const maps = new Maps(model);
  const colours = Object.fromEntries(Object.entries(model.get("colormaps")).map(([name, hexes]) => [name, colorTable(hexes)]));
  const which = dropdown(maps.names.map((name, number) => [number, name]), draw);
  const view = dropdown(maps.views.map((name) => [name, LABELS[name]]), draw);
  const scales = dropdown(Object.entries(SCALES), draw);
  const [mix, above, smoothing] = [slider(1, 0.5, draw), slider(0.95, 0, draw), slider(25, 5, draw)];
  const canvas = make("canvas", { className: "dave-map" });
  const stage = makeStage(canvas, Math.min(448, 2 * maps.width));
  const zoom = new Zoom(() => [stage]);
  const output = make("output", {});
  const bar = make("canvas", { className: "dave-bar", width: 256, height: 1 });
  Object.assign(bar.style, { width: "8rem", height: "0.6rem", margin: "0 0.4rem" });

  function draw() {
    const number = Number(which.value);
    const reference = scales.value === "shared" ? maps.strongest(view.value) : number;
    const [map, soft] = maps.planes(view.value, number, 2 * Math.floor(smoothing.value / 2) + 1, reference);
    const [signed, isCertainty] = [view.value === "signed", view.value === "certainty"];
    const colormap = isCertainty ? colours.dave_uncertainty : signed ? colours.dave_signed : colours.dave;
    const limit = `${map.limit.toPrecision(3)} ${isCertainty ? "standard errors" : model.get("unit")}`.trim();
    output.replaceChildren(`${maps.names[number]}: ${signed ? `−${limit}` : 0}`, bar, limit);
    drawBar(bar, colormap);
    if (isCertainty) return drawHeatmap(canvas, map, maps.width, maps.height, colormap);
    const display = { mix: Number(mix.value), above: Number(above.value), signed };
    drawOverlay(canvas, maps.image(number), map, soft, display, colormap);
  }

  const rows = Object.entries({ Map: which, View: view, "Image to map": mix, "Hide below": above, Smoothing: smoothing });
  if (maps.names.length > 1) rows.push(["Colours", scales]);
  const controls = make("div", { className: "dave-controls" }, ...rows.map((row) => withLabel(...row)), zoomButtons(zoom));
  Object.assign(controls.style, CONTROLS);
  el.append(controls, stage, output);
  zoom.listen(stage);
  draw();
}

export default { render };
