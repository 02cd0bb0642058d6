// Two maps as one picture: one beside the other under a divider that moves, or what they differ in.

import { bar, heat, limitOf, swipe } from "./paint.js";
import { digits } from "./dom.js";
import { link } from "./panel.js";

export class Pair {
  // page: what all panels share; panels: the two
  constructor(root, page, panels) {
    Object.assign(this, { root, page, panels });
    this.place = 0.5;
    this.canvas = root.querySelector("canvas.both");
    const slider = root.querySelector("#divider");
    slider.addEventListener("input", () => {
      this.place = slider.value / 100;
      this.draw();
    });
  }

  // way: "beside", "swipe" or "difference"
  draw(way = this.way) {
    this.way = way;
    this.offer();
    const [first, second] = this.panels;
    const figure = this.root.querySelector("figure");
    figure.hidden = way === "beside" || !first.planes || !second.planes;
    if (figure.hidden) return;
    this.canvas.hidden = false;
    this.root.querySelector(".divide").hidden = way !== "swipe";
    this.root.querySelector(".scale").hidden = way !== "difference";
    const caption = this.root.querySelector(".strong");
    caption.textContent = `${name(first)} | ${name(second)}`;
    if (way === "swipe") swipe(this.canvas, first.canvas, second.canvas, this.place);
    else caption.textContent = this.difference(first, second);
  }

  // Maps of one kind are subtracted as they are, others in parts of their brightest colour.
  difference(first, second) {
    const { width, height } = first.size;
    const fits = width === second.size.width && height === second.size.height;
    this.canvas.hidden = !fits;
    if (!fits) return "Maps of different sizes: there is no difference to show";
    const units = first.kind === second.kind ? [1, 1] : [first.shown.limit, second.shown.limit];
    const values = first.shown.values.map((value, at) => value / units[0] - second.shown.values[at] / units[1]);
    const limit = limitOf(values);
    heat(this.canvas, { values, limit }, width, height, this.page.colours.dave_signed, true);
    bar(this.root.querySelector(".scale canvas"), this.page.colours.dave_signed);
    this.root.querySelector(".low").textContent = `−${digits(limit)}`;
    this.root.querySelector(".limit").textContent = digits(limit);
    return `${name(first)} minus ${name(second)}`;
  }

  // One figure of both, once both are done.
  offer() {
    const place = this.root.querySelector(".joint");
    const tokens = this.panels.map((panel) => panel.finished?.token);
    place.replaceChildren();
    if (!tokens.every(Boolean)) return;
    const { view, scales } = this.page.look;
    place.append(link(`/api/results/${tokens.join("/")}/both.png?view=${view}&scales=${scales}`, "Both", "PNG"));
  }
}

function name(panel) {
  return `${panel.target.name}, ${panel.request.options.method}`;
}
