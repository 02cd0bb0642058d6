// How maps are displayed: the settings that need no new map.

import { select } from "./form.js";
import { $ } from "./dom.js";

const DEFAULTS = { view: "map", scales: "shared", mix: "50", above: "0", smoothing: "1" };

// view: "map" or "signed"; scales: "shared" or "own"; mix, above: from 0 to 1; smoothing: 1 is as in the figures
export function readDisplay() {
  $("above-value").textContent = `${$("above").value} %`;
  const [mix, above] = ["mix", "above"].map((name) => $(name).value / 100);
  return { view: $("view").value, scales: $("scales").value, mix, above, smoothing: Number($("smoothing").value) };
}

// Returns the settings that belong into the address.
export function changedDisplay() {
  const names = Object.keys(DEFAULTS).filter((name) => $(name).value !== DEFAULTS[name]);
  return Object.fromEntries(names.map((name) => [name, $(name).value]));
}

export function restoreDisplay(saved) {
  for (const [name, value] of Object.entries(DEFAULTS)) select(name, saved[name], value);
}

// onInput: while a slider moves; onChange: once it is released
export function listenToDisplay(onInput, onChange) {
  for (const name of Object.keys(DEFAULTS)) {
    $(name).addEventListener("input", onInput);
    $(name).addEventListener("change", onChange);
  }
}
