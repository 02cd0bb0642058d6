// How images come in: chosen, dropped, pasted, or one of the examples.

import * as api from "./api.js";
import * as store from "./store.js";
import { model } from "./choices.js";
import { $, make } from "./dom.js";

// open: called with a file and its name
export function takeImages(open) {
  $("file").addEventListener("change", () => chosen($("file"), open));
  for (const name of ["dragover", "dragleave", "drop"]) addEventListener(name, dragging);
  addEventListener("drop", (event) => taken(event.dataTransfer, event, open));
  addEventListener("paste", (event) => taken(event.clipboardData, event, open));
}

function chosen(input, open) {
  if (input.files?.length) open(input.files[0], input.files[0].name);
  input.value = ""; // the same file can be chosen again
}

function taken(transfer, event, open) {
  const file = [...(transfer?.files ?? [])][0];
  if (!file) return;
  event.preventDefault();
  open(file, file.name || "pasted.png");
}

function dragging(event) {
  event.preventDefault();
  $("drop").classList.toggle("over", event.type === "dragover");
}

// open: called with the address of an example
export function showExamples(open) {
  const buttons = model().examples.map((path, number) => {
    const picture = Object.assign(new Image(64, 64), { src: path, alt: "" });
    const button = make("button", { type: "button", ariaLabel: `Example ${number + 1}` }, picture);
    button.addEventListener("click", () => open(path));
    return button;
  });
  $("examples").replaceChildren(...buttons);
}

// Under which the address of the page knows an example.
export function exampleName(path) {
  return path.replace(/^.*\/([^/]+)\.\w+$/, "example-$1");
}

// An image by the name under which the address knows it, if it is an example or still in this browser.
export async function recall(image, cards) {
  const path = cards.flatMap((card) => card.examples).find((one) => exampleName(one) === image);
  if (!path) return store.find(image);
  return { blob: await api.example(path), name: `${image}.png` };
}
