// How images come in: chosen, dropped, pasted, or an example.

import * as api from "./api.js";
import { findImage } from "./image_store.js";
import { chosenModel } from "./form.js";
import { $, make } from "./dom.js";

// open: called with a file and its name
export function listenToImages(open) {
  $("file").addEventListener("change", () => openChosen($("file"), open));
  for (const name of ["dragover", "dragleave", "drop"]) addEventListener(name, showDrag);
  addEventListener("drop", (event) => openTransferred(event.dataTransfer, event, open));
  addEventListener("paste", (event) => openTransferred(event.clipboardData, event, open));
}

function openChosen(input, open) {
  if (input.files?.length) open(input.files[0], input.files[0].name);
  input.value = ""; // the same file can be chosen again
}

function openTransferred(transfer, event, open) {
  const file = [...(transfer?.files ?? [])][0];
  if (!file) return;
  event.preventDefault();
  open(file, file.name || "pasted.png");
}

function showDrag(event) {
  event.preventDefault();
  $("drop").classList.toggle("over", event.type === "dragover");
}

// open: called with the address of an example
export function showExamples(open) {
  const buttons = chosenModel().examples.map((path) => {
    const picture = Object.assign(new Image(64, 64), { src: path, alt: "" });
    const name = exampleName(path).replace("-", ": ").replaceAll("-", " "); // "example: french fries"
    const button = make("button", { type: "button", title: name, ariaLabel: name }, picture);
    button.addEventListener("click", () => open(path));
    return button;
  });
  $("examples").replaceChildren(...buttons);
}

// Returns the name of an example in the address of the page.
export function exampleName(path) {
  return path.replace(/^.*\/([^/]+)\.\w+$/, "example-$1");
}

// Returns {blob, name} of an image by its name in the address, if it is an example or in this browser's database.
export async function loadImage(image, models) {
  const path = models.flatMap((card) => card.examples).find((one) => exampleName(one) === image);
  if (!path) return findImage(image);
  return { blob: await api.example(path), name: `${image}.png` };
}
