// The first visit: four steps beside what they are about. It is shown once, and can be skipped.

import { $ } from "./dom.js";

const KEY = "dave-tour"; // in the browser's storage, once it was seen
const STEPS = [
  ["drop", "Choose an image of yours or an example. It stays on the machine that runs this page."],
  ["classes-card", "The classes, most probable first. Choose one to see its evidence; “vs” sets it against another."],
  ["display", "Slide from image to map, zoom, or show evidence for and against. Point at the map to read its values."],
  ["compare", "Put another class, method or model beside it. Every map has its files and its command line below."],
];
let at = 0;

function isSeen() {
  try {
    return Boolean(localStorage.getItem(KEY));
  } catch {
    return true; // without storage it would come back every time
  }
}

export function startTour() {
  if (isSeen()) return;
  $("tour-next").addEventListener("click", () => show(at + 1));
  $("tour-skip").addEventListener("click", () => show(STEPS.length));
  show(0);
}

function show(step) {
  document.querySelectorAll(".tour-target").forEach((element) => element.classList.remove("tour-target"));
  at = step;
  $("tour").hidden = at >= STEPS.length;
  if (at >= STEPS.length) return localStorage.setItem(KEY, "seen");
  const [id, text] = STEPS[at];
  $("tour-text").textContent = `${at + 1} of ${STEPS.length}. ${text}`;
  $("tour-next").textContent = at < STEPS.length - 1 ? "Next" : "Done";
  $(id).closest(".card").classList.add("tour-target");
  if (at === 1 && $("empty").offsetParent) $("examples").querySelector("button").click(); // or there is nothing to show
}
