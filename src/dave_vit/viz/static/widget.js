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

// Reads a picture: four bytes a pixel.
async function readPixels(bytes) {
  const bitmap = await createImageBitmap(new Blob([bytes]));
  const { width, height } = bitmap;
  const context = make("canvas", { width, height }).getContext("2d");
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, width, height).data;
}

// The maps and images of an explanation; pixels: of the pictures that hold them, by name.
class Maps {
  static async read(model) {
    const names = ["pictures", ...Object.keys(LABELS)].filter((name) => model.get(name).byteLength > 0);
    const pixels = await Promise.all(names.map((name) => readPixels(model.get(name))));
    return new Maps(model, Object.fromEntries(names.map((name, number) => [name, pixels[number]])));
  }

  constructor(model, pixels) {
    [this.names, this.width, this.height, this.limits] = ["names", "width", "height", "limits"].map((name) => model.get(name));
    Object.assign(this, { pixels, tops: model.get("tops"), size: this.width * this.height });
    this.pixels.signed ??= pixels.map; // where both are the same
    this.perImage = this.names.length / model.get("images");
    this.views = Object.keys(LABELS).filter((view) => view in pixels);
  }

  // As in viz/widget.py: a byte of 127 is zero.
  values(view, number) {
    const top = this.tops[view][number];
    return Float32Array.from({ length: this.size }, (_, at) => {
      const root = this.pixels[view][4 * (number * this.size + at)] / 127 - 1;
      return top * root * Math.abs(root);
    });
  }

  // The image of a map, as drawOverlay takes it.
  image(number) {
    const at = 4 * this.size * Math.floor(number / this.perImage);
    return { width: this.width, height: this.height, data: this.pixels.pictures.subarray(at, at + 4 * this.size) };
  }

  // Index of the map whose brightest colour is the largest number.
  strongest(view) {
    return this.limits[view].indexOf(Math.max(...this.limits[view]));
  }

  // A map as it is and smoothed, each with the number in its brightest colour; reference: the map that sets it
  planes(view, number, window, reference) {
    const soft = (index) => smoothMap(this.values(view, index), this.width, this.height, window, view === "signed");
    return [
      { values: this.values(view, number), limit: this.limits[view][reference] },
      { values: soft(number), limit: limitOf(soft(reference)) },
    ];
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

async function render({ model, el }) {
  const maps = await Maps.read(model);
  const colours = Object.fromEntries(Object.entries(model.get("colormaps")).map(([name, hexes]) => [name, colorTable(hexes)]));
  const which = dropdown(maps.names.map((name, number) => [number, name]), draw);
  const view = dropdown(maps.views.map((name) => [name, LABELS[name]]), draw);
  const scales = dropdown(Object.entries(SCALES), draw);
  const [mix, above, smoothing] = [slider(1, 0.5, draw), slider(0.95, 0, draw), slider(25, 5, draw)];
  const canvas = make("canvas", { className: "dave-map" });
  const stage = makeStage(canvas, Math.min(448, 2 * maps.width));
  const zoom = new Zoom(() => [stage]);
  const [chance, output] = [make("div", { className: "dave-chance" }), make("output", {})];
  const bar = make("canvas", { className: "dave-bar", width: 256, height: 1 });
  Object.assign(bar.style, { width: "8rem", height: "0.6rem", margin: "0 0.4rem" });

  function draw() {
    const number = Number(which.value);
    const reference = scales.value === "shared" ? maps.strongest(view.value) : number;
    const [map, soft] = maps.planes(view.value, number, 2 * Math.floor(smoothing.value / 2) + 1, reference);
    const [signed, isCertainty] = [view.value === "signed", view.value === "certainty"];
    const colormap = isCertainty ? colours.dave_uncertainty : signed ? colours.dave_signed : colours.dave;
    const limit = `${map.limit.toPrecision(3)} ${isCertainty ? "standard errors or more" : model.get("unit")}`.trim();
    output.replaceChildren(`${maps.names[number]}: ${signed ? `−${limit}` : 0}`, bar, limit);
    drawBar(bar, colormap);
    const share = model.get("probabilities")[number];
    chance.textContent = share === undefined ? "" : `${maps.names[number]}: ${percent(share)} likely`;
    if (isCertainty) return drawHeatmap(canvas, map, maps.width, maps.height, colormap);
    const display = { mix: Number(mix.value), above: Number(above.value), signed };
    drawOverlay(canvas, maps.image(number), map, soft, display, colormap);
  }

  const rows = Object.entries({ Map: which, View: view, "Image to map": mix, "Hide below": above, Smoothing: smoothing });
  if (maps.names.length > 1) rows.push(["Colours", scales]);
  const controls = make("div", { className: "dave-controls" }, ...rows.map((row) => withLabel(...row)), zoomButtons(zoom));
  Object.assign(controls.style, CONTROLS);
  el.append(controls, chance, stage, output);
  zoom.listen(stage);
  draw();
}

export default { render };
