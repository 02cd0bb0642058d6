// The maps made since the page was opened: a thumbnail each, which leads back to its address.

import { make } from "./dom.js";

const SIDE = 72;
const CAPACITY = 16;

export class Session {
  constructor(root) {
    this.root = root;
    this.entries = []; // {address, button}, the newest first
  }

  // canvas: the map as it is drawn
  add(address, canvas, text) {
    const thumbnail = make("canvas", { width: SIDE, height: SIDE });
    thumbnail.getContext("2d").drawImage(canvas, 0, 0, SIDE, SIDE);
    const button = make("button", { type: "button", title: text, ariaLabel: `Back to ${text}` }, thumbnail);
    button.addEventListener("click", () => (location.hash = address));
    const others = this.entries.filter((entry) => entry.address !== address);
    this.entries = [{ address, button }, ...others].slice(0, CAPACITY);
    this.root.querySelector(".thumbs").replaceChildren(...this.entries.map((entry) => entry.button));
    this.root.hidden = this.entries.length < 2;
  }
}
