// Two maps as one picture: with a movable divider between them, or their difference.

import { drawBar, drawHeatmap, drawSwipe, limitOf } from "./paint.js";
import { digits } from "./dom.js";
import { link } from "./panel.js";

export class Pair {
  // page: what all panels share; panels: the two
  constructor(root, page, panels) {
    Object.assign(this, { root, page, panels });
    this.divider = 0.5; // from 0 to 1
    this.canvas = root.querySelector("canvas.both");
    const slider = root.querySelector("#divider");
    slider.addEventListener("input", () => {
      this.divider = slider.value / 100;
      this.draw();
    });
  }

  // mode: "beside", "swipe" or "difference"
  draw(mode = this.mode) {
    this.mode = mode;
    this.showDownload();
    const [first, second] = this.panels;
    const figure = this.root.querySelector("figure");
    figure.hidden = mode === "beside" || !first.planes || !second.planes;
    if (figure.hidden) return;
    this.canvas.hidden = false;
    this.root.querySelector(".divide").hidden = mode !== "swipe";
    this.root.querySelector(".scale").hidden = mode !== "difference";
    const caption = this.root.querySelector(".strong");
    caption.textContent = `${label(first)} | ${label(second)}`;
    if (mode === "swipe") drawSwipe(this.canvas, first.canvas, second.canvas, this.divider);
    else caption.textContent = this.drawDifference(first, second);
  }

  // Whether both maps have one unit, so that their numbers can be compared.
  get isComparable() {
    const [first, second] = this.panels.map((panel) => panel.kind);
    return first === second || !first || !second;
  }

  // Returns the caption.
  drawDifference(first, second) {
    const { width, height } = first.size;
    const sameSize = width === second.size.width && height === second.size.height;
    this.canvas.hidden = this.root.querySelector(".scale").hidden = !sameSize || !this.isComparable;
    if (!sameSize) return "Maps of different sizes have no difference.";
    if (!this.isComparable) return "Maps of methods with different units have no difference.";
    const values = first.shown.values.map((value, at) => value - second.shown.values[at]);
    const limit = limitOf(values);
    drawHeatmap(this.canvas, { values, limit }, width, height, this.page.colours.dave_signed, true);
    drawBar(this.root.querySelector(".scale canvas"), this.page.colours.dave_signed);
    this.root.querySelector(".low").textContent = `−${digits(limit)}`;
    this.root.querySelector(".limit").textContent = `${digits(limit)} ${first.unit}`.trim();
    return `${label(first)} minus ${label(second)}`;
  }

  // Offers one figure of both maps, once both are done.
  showDownload() {
    const place = this.root.querySelector(".joint");
    const tokens = this.panels.map((panel) => panel.finished?.token);
    place.replaceChildren();
    if (!tokens.every(Boolean)) return;
    const { view, scales } = this.page.display;
    place.append(link(`/api/results/${tokens.join("/")}/both.png?view=${view}&scales=${scales}`, "Both", "PNG"));
  }
}

function label(panel) {
  return `${panel.target.name}, ${panel.request.options.method}`;
}
