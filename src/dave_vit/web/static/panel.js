// One result: it runs a request, shows the map while it refines, and hands out the files.

import { Failure, explain, plane } from "./api.js";
import { digits, make, percent } from "./dom.js";
import { bar, blend, heat, limitOf, smooth } from "./paint.js";

const FILES = {
  "panels.png": ["Figure", "PNG"],
  "overlay.png": ["Overlay", "PNG"],
  "words.png": ["Word", "PNG"],
  npz: ["Numbers", "NPZ"],
  json: ["Record", "JSON"],
};
const PAUSE = 120; // milliseconds: of choices in quick succession only the last is asked for
const HINT = "Point at the map, or use the arrow keys on it, to read its values.";
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Panel {
  // page: what all panels share; see app.js
  constructor(page) {
    this.page = page;
    this.image = null; // as its model sees it
    this.root = document.getElementById("panel").content.firstElementChild.cloneNode(true);
    this.canvas = this.find("canvas.map");
    this.find(".stop").addEventListener("click", () => (this.going ? this.stop() : this.run(this.request)));
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
    const going = (this.going = new AbortController());
    this.request = request;
    this.finished = null;
    this.title(request.title, "");
    this.fail(null);
    this.find(".taken").hidden = true;
    this.find(".views").classList.add("stale");
    this.find(".stop").textContent = "Stop";
    this.find(".stop").hidden = false;
    this.root.ariaBusy = "true";
    this.count("Starting", null);
    try {
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
      const busy = () => this.count("Busy: asking again", null);
      for await (const [name, data] of explain(request.blob, request.options, going.signal, busy)) {
        if (name === "queued") this.wait(data.ahead);
        if (name === "step") this.step(data);
      }
      this.page.done(this);
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
    } finally {
      if (this.going === going) this.rest();
    }
  }

  // Whether the map of a request is here, or on its way.
  answers({ blob, options }) {
    const same = this.request?.blob === blob && JSON.stringify(this.request.options) === JSON.stringify(options);
    return same && Boolean(this.going || this.finished);
  }

  stop() {
    if (!this.going) return;
    this.going.abort();
    this.rest();
    this.count("Stopped", 0);
    this.find(".stop").textContent = "Run";
    this.find(".stop").hidden = false;
  }

  rest() {
    this.going = null;
    this.root.ariaBusy = "false";
    this.find(".stop").hidden = true;
  }

  wait(ahead) {
    if (ahead > 0) this.count(`Waiting: ${ahead} before`, null);
    else if (!this.find("progress").hasAttribute("value")) this.count("Working", null);
  }

  step(step) {
    const { samples, total, width, height, target } = step;
    this.size = { width, height };
    this.planes = { map: plane(step.map), signed: plane(step.signed) };
    this.error = step.standard_error && plane(step.standard_error);
    this.sureness = step.sureness && plane(step.sureness);
    this.kind = step.unit || step.method; // maps of one kind can be compared
    this.target = target;
    this.page.found(this, target);
    this.title(titled(step), told(step, this.page.told(this)));
    this.count(this.error ? `${samples} of ${total} samples` : "Done", samples / total);
    this.find(".views").hidden = false;
    this.find(".views").classList.remove("stale");
    this.find(".readout").hidden = false;
    this.soften();
    this.page.draw();
    if (step.finished) this.finish(step);
  }

  // For the present view: the map itself, and smoothed for lying over the image.
  soften() {
    if (!this.planes) return;
    const { width, height } = this.size;
    const { view, smoothing } = this.page.look;
    const shown = this.planes[view];
    const usual = Math.max(1, 2 * Math.round((Math.min(width, height) / 45 - 1) / 2) + 1); // as the figures have it
    const kept = view === "signed" ? shown.values : shown.values.map((value) => Math.max(0, value));
    const values = smooth(kept, width, height, smoothing && 2 * Math.floor((usual * smoothing) / 2) + 1);
    this.soft = { values, limit: limitOf(values) };
  }

  get shown() {
    return this.planes[this.page.look.view];
  }

  draw() {
    if (!this.planes || !this.image) return;
    const { look, colours } = this.page;
    const { width, height } = this.size;
    if (this.image.width !== width || this.image.height !== height) return;
    const signed = look.view === "signed";
    const tones = signed ? colours.dave_signed : colours.dave;
    const map = { ...this.shown, limit: this.page.limit(this, "shown") };
    const soft = { ...this.soft, limit: this.page.limit(this, "soft") };
    blend(this.canvas, this.image, map, soft, { ...look, signed }, tones);
    this.canvas.ariaLabel = `Map of ${this.target.name}. Arrow keys read its values, plus and minus zoom.`;
    const [first, second] = this.root.querySelectorAll("figure");
    first.querySelector(".strong").textContent = signed ? "For and against" : "Map";
    this.scale(first, map, tones, signed);
    const known = Boolean(this.sureness);
    for (const part of [".scale", ".layer", ".meaning"]) second.querySelector(part).hidden = !known;
    second.querySelector(".none").hidden = known;
    if (known) {
      heat(second.querySelector("canvas.sure"), this.sureness, width, height, colours.dave_uncertainty);
      second.querySelector("canvas.sure").ariaLabel = "Sureness of each pixel";
      this.scale(second, this.sureness, colours.dave_uncertainty);
    }
    this.point(this.at);
  }

  scale(figure, { limit, caption }, colours, signed = false) {
    bar(figure.querySelector(".scale canvas"), colours);
    figure.querySelector(".low").textContent = signed ? `−${digits(limit)}` : "0";
    figure.querySelector(".limit").textContent = digits(limit);
    figure.querySelector(".limit").title = `The brightest colour: ${caption}`;
  }

  finish({ finished, notes }) {
    const { files, command } = (this.finished = finished);
    const row = this.find(".downloads");
    row.replaceChildren();
    for (const [ending, address] of Object.entries(files)) row.append(link(address, ...FILES[ending]));
    const { url, name } = this.page.source();
    const own = link(url, "Image", "file");
    own.download = name;
    row.append(own);
    this.find(".command code").replaceChildren(...command.split(" ").flatMap(unbroken));
    this.find(".notes").textContent = notes.filter((note) => !this.page.notes.includes(note)).map(asSentence).join(" ");
    this.find(".taken").hidden = false;
  }

  title(text, below) {
    this.find(".title").textContent = text;
    this.find(".subtitle").textContent = below;
  }

  count(text, part) {
    this.find(".count").textContent = text;
    const progress = this.find("progress");
    if (part === null) progress.removeAttribute("value");
    else progress.value = part;
  }

  fail(error) {
    const alert = this.find(".alert");
    alert.hidden = !error;
    if (!error) return;
    this.find(".views").hidden = this.find(".readout").hidden = true; // they are another request's
    this.find(".notes").textContent = "";
    if (!(error instanceof Failure)) console.error(error);
    alert.querySelector("span").textContent = error instanceof Failure ? error.message : "The page failed.";
    const offered = (error.candidates ?? []).map((one) => this.candidate(one));
    alert.querySelector(".candidates").replaceChildren(...offered);
    alert.querySelector(".retry").hidden = offered.length > 0; // the same again would fail again
    this.count(error.status === 503 ? "Busy" : "Failed", 0);
  }

  candidate({ index, name }) {
    const button = make("button", { type: "button", textContent: name });
    button.addEventListener("click", () => this.page.meant(this, index));
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
    this.at = at && { x: within(at.x, width), y: within(at.y, height) };
    for (const mark of this.root.querySelectorAll(".mark")) {
      mark.hidden = !at;
      if (!at) continue;
      mark.style.left = `${(100 * (this.at.x + 0.5)) / width}%`;
      mark.style.top = `${(100 * (this.at.y + 0.5)) / height}%`;
    }
    this.find(".readout").textContent = at ? this.reading() : HINT;
  }

  reading() {
    const { x, y } = this.at;
    const pixel = y * this.size.width + x;
    const spread = this.error ? ` ± ${digits(this.error.values[pixel])}` : "";
    return `x ${x}, y ${y}: ${digits(this.shown.values[pixel])}${spread}`;
  }
}

function titled({ target, against }) {
  return against && against !== "rivals" ? `${target.name}, not ${against}` : target.name;
}

function told({ target, against, method, seconds }, model) {
  const rivals = against === "rivals" ? "against its rivals" : "";
  return [method, model, `${percent(target.probability)} likely`, rivals, `${seconds.toFixed(1)} s`].filter(Boolean).join(" · ");
}

function within(value, size) {
  return Math.min(size - 1, Math.max(0, value));
}

function asSentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

// A word that is never broken at its hyphens, and the space after it.
function unbroken(word) {
  return [make("span", { textContent: word }), " "];
}

export function link(address, label, kind) {
  const small = make("small", { textContent: kind });
  return make("a", { href: address, download: "", className: "button" }, label, " ", small);
}
