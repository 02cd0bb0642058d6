// How maps are shown: the settings that need no new map.

import { choose } from "./choices.js";
import { $ } from "./dom.js";

const USUAL = { view: "map", scales: "shared", mix: "50", above: "0", smoothing: "1" };

// view: "map" or "signed"; scales: "shared" or "own"; mix, above: from 0 to 1; smoothing: 1 is as in the figures
export function readLook() {
  $("above-said").textContent = `${$("above").value} %`;
  const [mix, above] = ["mix", "above"].map((name) => $(name).value / 100);
  return { view: $("view").value, scales: $("scales").value, mix, above, smoothing: Number($("smoothing").value) };
}

// What of it belongs into the address.
export function lookSaid() {
  const changed = Object.entries(USUAL).filter(([name, usual]) => $(name).value !== usual);
  return Object.fromEntries(changed.map(([name]) => [name, $(name).value]));
}

export function restoreLook(said) {
  for (const [name, usual] of Object.entries(USUAL)) choose(name, said[name], usual);
}

// moved: while a slider is held; settled: once it is left
export function listenToLook(moved, settled) {
  for (const name of Object.keys(USUAL)) {
    $(name).addEventListener("input", moved);
    $(name).addEventListener("change", settled);
  }
}
