// What is known about the chosen model before the first map: its domain, and whether it is explained exactly.

import * as api from "./api.js";
import { chosenModel, showRefusals } from "./form.js";
import { $ } from "./dom.js";

const IDLE = 1500; // milliseconds without an image after which the server may check the model

let timer = null;

export function showModel() {
  $("knows").textContent = chosenModel().knows;
  $("verdict").hidden = true;
  showRefusals({});
  scheduleChecks();
}

// Not while a map is computed: the server does one thing at a time.
export function scheduleChecks(delay = IDLE) {
  clearTimeout(timer);
  timer = setTimeout(check, delay);
}

export function cancelChecks() {
  clearTimeout(timer);
}

async function check() {
  const name = chosenModel().name;
  try {
    const verdict = await api.verdict(name);
    if (name === chosenModel().name) showVerdict(verdict);
    const refusals = await api.refusals(name);
    if (name === chosenModel().name) showRefusals(refusals);
  } catch {
    // optional: a map that cannot be computed reports its own error
  }
}

function showVerdict({ exact, text }) {
  $("verdict").hidden = false;
  $("verdict").classList.toggle("bad", !exact);
  $("verdict").querySelector("summary").textContent = exact ? "Explained exactly" : "Not explained exactly";
  $("verdict").querySelector("p").textContent = text;
}
