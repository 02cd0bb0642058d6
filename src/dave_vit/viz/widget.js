// An explanation in a notebook: its maps, with the controls of the page. Comes after paint.js in one module.

const LABELS = { map: "what speaks for it", signed: "for and against", sureness: "sureness" };

function built(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function choice(label, values, changed) {
  const select = built("select", {}, ...values.map(([value, text]) => new Option(text, value)));
  select.addEventListener("change", changed);
  return [built("label", {}, `${label} `, select), select];
}

function slider(label, max, value, changed) {
  const input = built("input", { type: "range", min: 0, max, value, step: "any" });
  input.addEventListener("input", changed);
  return [built("label", {}, `${label} `, input), input];
}

// The numbers of one map out of all: {values, limit}
function plane(data, number, size) {
  const values = new Float32Array(data.buffer, data.byteOffset + 4 * number * size, size);
  return { values, limit: limitOf(values) };
}

function render({ model, el }) {
  const [width, height] = ["width", "height"].map((name) => model.get(name));
  const size = width * height;
  const colours = Object.fromEntries(Object.entries(model.get("colormaps")).map(([name, hexes]) => [name, table(hexes)]));
  const names = model.get("names").map((name, number) => [number, name]);
  const views = Object.entries(LABELS).filter(([name]) => model.get(name).byteLength > 0);
  const [whichRow, which] = choice("Map", names, draw);
  const [viewRow, view] = choice("View", views, draw);
  const [mixRow, mix] = slider("Image to map", 1, 0.5, draw);
  const [aboveRow, above] = slider("Hide below", 0.95, 0, draw);
  const [smoothRow, smoothing] = slider("Smoothing", 25, 5, draw);
  const canvas = built("canvas", { className: "dave-map" });
  const said = built("output", {});

  function draw() {
    const number = Number(which.value);
    const shown = plane(model.get(view.value), number, size);
    const sure = view.value === "sureness";
    said.textContent = `${names[number][1]}: the brightest colour is ${shown.limit.toPrecision(3)}`;
    if (sure) return heat(canvas, shown, width, height, colours.dave_uncertainty);
    const signed = view.value === "signed";
    const kept = signed ? shown.values : shown.values.map((value) => Math.max(0, value));
    const values = smooth(kept, width, height, 2 * Math.floor(smoothing.value / 2) + 1);
    const data = model.get("pictures");
    const at = data.byteOffset + 4 * size * Math.floor((number * model.get("images")) / names.length);
    const image = { width, height, data: new Uint8ClampedArray(data.buffer, at, 4 * size) };
    const look = { mix: Number(mix.value), above: Number(above.value), signed };
    blend(canvas, image, shown, { values, limit: limitOf(values) }, look, signed ? colours.dave_signed : colours.dave);
  }

  const rows = [whichRow, viewRow, mixRow, aboveRow, smoothRow];
  el.append(built("div", { className: "dave-controls" }, ...rows), canvas, said);
  Object.assign(canvas.style, { width: `${Math.min(448, 2 * width)}px`, display: "block", imageRendering: "pixelated" });
  Object.assign(el.firstElementChild.style, { display: "flex", flexWrap: "wrap", gap: "0.4rem 1.2rem", marginBottom: "0.5rem" });
  draw();
}

export default { render };
