// What is known of the chosen model before the first map: what it was made for, and whether it is explained exactly.

import * as api from "./api.js";
import { model, showRefused } from "./choices.js";
import { $ } from "./dom.js";

const QUIET = 1500; // milliseconds without an image, after which the server may look into the model

let timer = null;

export function showModel() {
  $("knows").textContent = model().knows;
  $("verdict").hidden = true;
  showRefused({});
  soon();
}

// Not while somebody waits for a map: the server does one thing after the other.
export function soon(after = QUIET) {
  clearTimeout(timer);
  timer = setTimeout(check, after);
}

export function later() {
  clearTimeout(timer);
}

async function check() {
  const name = model().name;
  try {
    const found = await api.verdict(name);
    if (name === model().name) showVerdict(found);
    const reasons = await api.refusals(name);
    if (name === model().name) showRefused(reasons);
  } catch {
    // a help, no need; a map that cannot be made says so itself
  }
}

function showVerdict({ exact, text }) {
  $("verdict").hidden = false;
  $("verdict").classList.toggle("bad", !exact);
  $("verdict").querySelector("summary").textContent = exact ? "Explained exactly" : "Not explained exactly";
  $("verdict").querySelector("p").textContent = text;
}
