// One result: it runs a request, shows the map while it refines, and hands out the files.

import { Failure, explain, levels, plane } from "./api.js";
import { bar, blend, heat } from "./paint.js";

const FILES = {
  "panels.png": ["Figure", "PNG"],
  "overlay.png": ["Overlay", "PNG"],
  npz: ["Numbers", "NPZ"],
  json: ["Record", "JSON"],
};
const PAUSE = 120; // milliseconds: of choices in quick succession only the last is asked for
const HINT = "Point at the map, or use the arrow keys on it, to read its values.";
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export function digits(value) {
  const size = Math.abs(value);
  return size === 0 ? "0" : size < 0.001 || size >= 10000 ? value.toExponential(2) : value.toPrecision(3);
}

export class Panel {
  // page: what all panels share; see app.js
  constructor(page) {
    this.page = page;
    this.root = document.getElementById("panel").content.firstElementChild.cloneNode(true);
    this.canvas = this.find("canvas.map");
    this.find(".stop").addEventListener("click", () => (this.going ? this.stop() : this.run(this.request)));
    this.find(".retry").addEventListener("click", () => this.run(this.request));
    this.find(".copy").addEventListener("click", () => this.copy());
    for (const canvas of [this.canvas, this.find("canvas.error")]) {
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
      for await (const [name, data] of explain(request.blob, request.options, going.signal)) {
        if (name === "queued") this.wait(data.ahead);
        if (name === "step") this.step(data);
      }
      this.announceEnd();
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
    } finally {
      if (this.going === going) this.rest();
    }
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
    const { samples, total, width, height, target, finished } = step;
    this.size = { width, height };
    this.map = plane(step.map);
    this.soft = levels(step.overlay);
    this.error = step.standard_error && plane(step.standard_error);
    this.target = target;
    this.page.found(this, target);
    const share = (100 * target.probability).toFixed(1);
    this.title(target.name, `${step.method} · ${share} % likely · ${step.seconds.toFixed(1)} s`);
    this.count(this.error ? `${samples} of ${total} samples` : "Done", samples / total);
    this.find(".views").hidden = false;
    this.find(".views").classList.remove("stale");
    this.find(".readout").hidden = false;
    this.draw();
    if (finished) this.finish(finished);
  }

  draw() {
    if (!this.map || !this.page.image) return;
    const { image, mix, colours } = this.page;
    const { width, height } = this.size;
    if (image.width !== width || image.height !== height) return;
    blend(this.canvas, image, this.map, this.soft, mix, colours.dave);
    this.canvas.ariaLabel = `Map of ${this.target.name}. Arrow keys read its values.`;
    const [first, second] = this.root.querySelectorAll("figure");
    this.scale(first, this.map, colours.dave);
    const known = Boolean(this.error);
    second.querySelector(".none").hidden = known;
    second.querySelector(".scale").hidden = !known;
    second.querySelector("canvas.error").hidden = !known;
    if (known) {
      heat(second.querySelector("canvas.error"), this.error, width, height, colours.dave_uncertainty);
      second.querySelector("canvas.error").ariaLabel = "Standard error of each pixel";
      this.scale(second, this.error, colours.dave_uncertainty);
    }
    this.point(this.at);
  }

  scale(figure, { limit, caption }, colours) {
    bar(figure.querySelector(".scale canvas"), colours);
    figure.querySelector(".limit").textContent = digits(limit);
    figure.querySelector(".limit").title = `The brightest colour: ${caption}`;
  }

  finish({ files, command }) {
    const row = this.find(".downloads");
    row.replaceChildren();
    for (const [ending, [label, kind]] of Object.entries(FILES)) row.append(link(files[ending], label, kind));
    const { url, name } = this.page.source();
    const own = link(url, "Image", "file");
    own.download = name;
    row.append(own);
    this.find(".command code").replaceChildren(...command.split(" ").flatMap(unbroken));
    this.find(".taken").hidden = false;
  }

  announceEnd() {
    if (this.target) this.page.announce(`Map of ${this.target.name} is done.`);
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
    if (!(error instanceof Failure)) console.error(error);
    alert.querySelector("span").textContent = error instanceof Failure ? error.message : "The page failed.";
    this.count(error.status === 503 ? "Busy" : "Failed", 0);
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
      mark.hidden = !at || mark.previousElementSibling.hidden;
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
    return `x ${x}, y ${y}: ${digits(this.map.values[pixel])}${spread}`;
  }
}

function within(value, size) {
  return Math.min(size - 1, Math.max(0, value));
}

// A word that is never broken at its hyphens, and the space after it.
function unbroken(word) {
  return [Object.assign(document.createElement("span"), { textContent: word }), " "];
}

function link(address, label, kind) {
  const made = document.createElement("a");
  made.href = address;
  made.download = "";
  made.className = "button";
  const small = document.createElement("small");
  small.textContent = kind;
  made.append(label, " ", small);
  return made;
}
