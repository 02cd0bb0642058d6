// One result: sends a request, shows the map while it refines, and links the files.

import { Failure, decodePlane, explain } from "./api.js";
import { digits, make, percent } from "./dom.js";
import { drawBar, drawHeatmap, drawOverlay, limitOf, resample, smoothMap } from "./paint.js";
import { showSources } from "./sources.js";

const FILES = {
  "panels.png": ["Figure", "PNG"],
  "overlay.png": ["Overlay", "PNG"],
  "words.png": ["Word", "PNG"],
  npz: ["Numbers", "NPZ"],
  json: ["Record", "JSON"],
};
const DEBOUNCE = 120; // milliseconds: of choices in quick succession only the last is sent
const HINT = "Point at the map, or use the arrow keys on it, to read its values.";
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Panel {
  // page: what all panels share; see app.js
  constructor(page) {
    this.page = page;
    this.image = null; // as its model sees it
    this.root = document.getElementById("panel").content.firstElementChild.cloneNode(true);
    this.canvas = this.find("canvas.map");
    this.find(".stop").addEventListener("click", () => (this.running ? this.stop() : this.run(this.request)));
    this.find(".retry").addEventListener("click", () => this.run(this.request));
    this.find(".copy").addEventListener("click", () => this.copy());
    for (const canvas of this.root.querySelectorAll(".layer canvas")) {
      canvas.addEventListener("pointermove", (event) => this.hover(event, canvas));
      canvas.addEventListener("pointerdown", (event) => this.hover(event, canvas));
      canvas.addEventListener("pointerleave", () => page.point(null));
    }
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => page.point(null));
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  // request: {blob, options, title}
  async run(request) {
    this.stop();
    const running = (this.running = new AbortController());
    this.request = request;
    this.finished = null;
    this.showTitle(request.title, "");
    this.showError(null);
    this.find(".outputs").hidden = true;
    this.find(".views").classList.add("stale");
    const known = this.page.results.find(request);
    if (known) {
      this.showStep(known);
      this.finishRun();
      return this.page.onDone(this);
    }
    this.find(".stop").textContent = "Stop";
    this.find(".stop").hidden = false;
    this.root.ariaBusy = "true";
    this.showProgress("Starting", null);
    try {
      await new Promise((resolve) => setTimeout(resolve, DEBOUNCE));
      const onBusy = () => this.showProgress("Busy: trying again", null);
      for await (const [name, data] of explain(request.blob, request.options, running.signal, onBusy)) {
        if (name === "queued") this.showQueue(data.ahead);
        if (name === "step") this.showStep(data);
      }
      this.page.onDone(this);
    } catch (error) {
      if (error.name !== "AbortError") this.showError(error);
    } finally {
      if (this.running === running) this.finishRun();
    }
  }

  // Whether this panel shows or computes the map of a request.
  answers({ blob, options }) {
    const same = this.request?.blob === blob && JSON.stringify(this.request.options) === JSON.stringify(options);
    return same && Boolean(this.running || this.finished);
  }

  stop() {
    if (!this.running) return;
    this.running.abort();
    this.finishRun();
    this.showProgress("Stopped", 0);
    this.find(".stop").textContent = "Run";
    this.find(".stop").hidden = false;
  }

  finishRun() {
    this.running = null;
    this.root.ariaBusy = "false";
    this.find(".stop").hidden = true;
  }

  showQueue(ahead) {
    if (ahead > 0) this.showProgress(`Waiting: ${ahead} ahead`, null);
    else if (!this.find("progress").hasAttribute("value")) this.showProgress("Working", null);
  }

  showStep(step) {
    const { samples, total, width, height, target } = step;
    this.size = { width, height };
    this.planes = { map: decodePlane(step.map), signed: decodePlane(step.signed) };
    this.error = step.standard_error && decodePlane(step.standard_error);
    this.certainty = step.certainty && decodePlane(step.certainty);
    this.unit = step.unit;
    this.kind = step.unit || step.method; // maps of one kind can be compared
    this.target = target;
    this.page.onTarget(this, target);
    this.titles = [formatTitle(step), formatSubtitle(step, this.page.otherModel(this))];
    this.showTitle(...this.titles);
    this.showProgress(this.error ? `${samples} of ${total} samples` : "Done", samples / total);
    this.find(".views").hidden = false;
    this.find(".views").classList.remove("stale");
    this.find(".readout").hidden = false;
    this.smooth();
    this.page.draw();
    if (!step.finished) return;
    this.showOutputs(step);
    this.page.results.keep(this.request, step);
  }

  // Smooths the map of the present view for the overlay.
  smooth() {
    if (!this.planes) return;
    const { width, height } = this.size;
    const { view, smoothing } = this.page.display;
    const usual = Math.max(1, 2 * Math.round((Math.min(width, height) / 45 - 1) / 2) + 1); // as in the figures
    const window = smoothing && 2 * Math.floor((usual * smoothing) / 2) + 1;
    const values = smoothMap(this.shown.values, width, height, window, view === "signed");
    this.smoothed = { values, limit: limitOf(values) };
  }

  get shown() {
    return this.planes[this.page.display.view];
  }

  draw() {
    if (!this.planes || !this.image) return;
    const { display, colours } = this.page;
    const { width, height } = this.size;
    if (this.image.width !== width || this.image.height !== height) return;
    const signed = display.view === "signed";
    const colormap = signed ? colours.dave_signed : colours.dave;
    const map = { ...this.shown, limit: this.page.limit(this, "shown") };
    const smoothed = { ...this.smoothed, limit: this.page.limit(this, "smoothed") };
    this.drawMap(map, smoothed, { ...display, signed }, colormap);
    this.canvas.ariaLabel = `Map of ${this.target.name}. Arrow keys read its values, plus and minus zoom.`;
    const [first, second] = this.root.querySelectorAll("figure");
    first.querySelector(".strong").textContent = signed ? "For and against" : "Map";
    this.showScale(first, map, colormap, this.unit, signed);
    const hasCertainty = Boolean(this.certainty);
    for (const part of [".scale", ".layer", ".meaning"]) second.querySelector(part).hidden = !hasCertainty;
    second.querySelector(".none").hidden = hasCertainty;
    if (hasCertainty) {
      drawHeatmap(second.querySelector("canvas.certainty"), this.certainty, width, height, colours.dave_uncertainty);
      second.querySelector("canvas.certainty").ariaLabel = "Certainty of each pixel";
      this.showScale(second, this.certainty, colours.dave_uncertainty, "or more");
    }
    showSources(this.find(".sources"), this.page.sources(this));
    this.point(this.at);
  }

  // Zoomed in, the photograph is shown in its own resolution.
  drawMap(map, smoothed, display, colormap) {
    const photo = this.page.photo(this);
    if (!photo) return drawOverlay(this.canvas, this.image, map, smoothed, display, colormap);
    const { width, height } = this.size;
    const fit = (plane) => ({ ...plane, values: resample(plane.values, width, height, photo.width, photo.height) });
    drawOverlay(this.canvas, photo, fit(map), fit(smoothed), display, colormap);
  }

  showScale(figure, { limit, caption }, colormap, unit, signed = false) {
    drawBar(figure.querySelector(".scale canvas"), colormap);
    figure.querySelector(".low").textContent = signed ? `−${digits(limit)}` : "0";
    figure.querySelector(".limit").textContent = `${digits(limit)} ${unit}`.trim();
    figure.querySelector(".limit").title = `Brightest colour: ${caption}`;
  }

  showOutputs({ finished, notes }) {
    const { files, command } = (this.finished = finished);
    const row = this.find(".downloads");
    row.replaceChildren();
    for (const [ending, address] of Object.entries(files)) row.append(link(address, ...FILES[ending]));
    const { url, name } = this.page.source();
    const image = link(url, "Image", "file");
    image.download = name;
    row.append(image);
    this.find(".command code").replaceChildren(...command.split(" ").flatMap(unbreakable));
    this.find(".notes").textContent = notes.filter((note) => !this.page.notes.includes(note)).map(asSentence).join(" ");
    this.find(".outputs").hidden = false;
  }

  showTitle(title, subtitle) {
    this.find(".title").textContent = title;
    this.find(".subtitle").textContent = subtitle;
  }

  // fraction: null while it is unknown
  showProgress(text, fraction) {
    this.find(".count").textContent = text;
    const progress = this.find("progress");
    if (fraction === null) progress.removeAttribute("value");
    else progress.value = fraction;
  }

  // error: null hides the alert
  showError(error) {
    const alert = this.find(".alert");
    alert.hidden = !error;
    if (!error) return;
    const isQuestion = Boolean(error.candidates?.length && this.titles); // the last map stays until it is answered
    if (isQuestion) this.showTitle(...this.titles);
    this.find(".views").classList.toggle("stale", !isQuestion);
    this.find(".views").hidden = this.find(".readout").hidden = !isQuestion; // they belong to another request
    this.find(".notes").textContent = "";
    if (!(error instanceof Failure)) console.error(error);
    alert.querySelector("span").textContent = error instanceof Failure ? error.message : "The page failed.";
    const buttons = (error.candidates ?? []).map((candidate) => this.candidateButton(candidate));
    alert.querySelector(".candidates").replaceChildren(...buttons);
    alert.querySelector(".retry").hidden = buttons.length > 0; // the same request would fail again
    this.showProgress(buttons.length ? "Choose one" : error.status === 503 ? "Busy" : "Failed", 0);
  }

  candidateButton({ index, name }) {
    const button = make("button", { type: "button", textContent: name });
    button.addEventListener("click", () => this.page.chooseCandidate(this, index));
    return button;
  }

  async copy() {
    const code = this.find(".command code");
    const button = this.find(".copy");
    try {
      await navigator.clipboard.writeText(code.textContent.trim());
      button.textContent = "Copied";
      this.page.announce("Command copied.");
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }

  hover(event, canvas) {
    const box = canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * this.size.width);
    const y = Math.floor(((event.clientY - box.top) / box.height) * this.size.height);
    this.page.point({ x, y });
  }

  key(event) {
    const move = ARROWS[event.key];
    if (!move) return;
    event.preventDefault();
    const { width, height } = this.size;
    const from = this.at || { x: Math.floor(width / 2), y: Math.floor(height / 2) };
    const far = event.shiftKey ? 10 : 1;
    this.page.point({ x: from.x + far * move[0], y: from.y + far * move[1] });
  }

  // Shows the values at a pixel; null hides them.
  point(at) {
    if (!this.size) return;
    const { width, height } = this.size;
    this.at = at && { x: clampIndex(at.x, width), y: clampIndex(at.y, height) };
    for (const mark of this.root.querySelectorAll(".mark")) {
      mark.hidden = !at;
      if (!at) continue;
      mark.style.left = `${(100 * (this.at.x + 0.5)) / width}%`;
      mark.style.top = `${(100 * (this.at.y + 0.5)) / height}%`;
    }
    this.find(".readout").textContent = at ? this.formatValues() : HINT;
  }

  formatValues() {
    const { x, y } = this.at;
    const pixel = y * this.size.width + x;
    const spread = this.error ? ` ± ${digits(this.error.values[pixel])}` : "";
    return `x ${x}, y ${y}: ${digits(this.shown.values[pixel])}${spread} ${this.unit}`.trim();
  }
}

function formatTitle({ target, against }) {
  return against && against !== "rivals" ? `${target.name}, not ${against}` : target.name;
}

function formatSubtitle({ target, against, method, seconds }, model) {
  const rivals = against === "rivals" ? "against its rivals" : "";
  return [method, model, `${percent(target.probability)} likely`, rivals, `${seconds.toFixed(1)} s`].filter(Boolean).join(" · ");
}

function clampIndex(value, size) {
  return Math.min(size - 1, Math.max(0, value));
}

function asSentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

// An argument that is never broken at its hyphens, and the space after it.
function unbreakable(word) {
  return [make("span", { textContent: word }), " "];
}

export function link(address, label, kind) {
  const small = make("small", { textContent: kind });
  return make("a", { href: address, download: "", className: "button" }, label, " ", small);
}
