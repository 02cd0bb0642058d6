// Model, method and options: what there is to choose from, and what is chosen.

import { $, fill, make } from "./dom.js";

export const OPTIONS = ["samples", "preset", "noise", "noise_level", "reducer", "seed"];
const OF_PRESET = ["samples", "noise", "noise_level", "reducer"];

let info = null;
let refused = {}; // reasons of methods that cannot explain the model

export function offer(everything) {
  info = everything;
  const names = info.models.map((card) => card.name);
  fill($("model"), names);
  fill($("compare-model"), names);
  $("compare-model").closest("label").hidden = names.length < 2;
  for (const id of ["method", "compare-method"]) fill($(id), info.methods.map((card) => card.name), "dave");
  fill($("preset"), Object.keys(model().presets), "default");
  fill($("noise"), info.noises);
  fill($("reducer"), info.reducers);
  $("samples").max = info.limits.samples;
  $("seed").value = info.seed;
  usePreset();
}

export function model(name = $("model").value) {
  return info.models.find((card) => card.name === name);
}

function method(name) {
  return info.methods.find((card) => card.name === name);
}

export function usePreset() {
  const preset = model().presets[$("preset").value];
  for (const name of OF_PRESET) $(name).value = preset[name];
}

export function showMethod() {
  const chosen = method($("method").value);
  const also = $("compare").checked ? method($("compare-method").value).takes : [];
  $("method-note").textContent = `${chosen.summary} ${chosen.paper}.`;
  for (const field of document.querySelectorAll("[data-option]")) {
    const used = [...chosen.takes, ...also].includes(field.dataset.option);
    field.classList.toggle("unused", !used);
    field.querySelector("input, select").disabled = !used;
  }
}

// Only what differs from the preset is sent, so that the command line stays short.
export function options(name) {
  const taken = method(name).takes;
  const sent = {};
  for (const option of OPTIONS.filter((known) => taken.includes(known))) {
    const own = taken.includes("preset"); // other methods know nothing of the preset's number
    if (changed(option) || option === "seed" || (option === "samples" && !own)) sent[option] = $(option).value;
  }
  return sent;
}

export function changed(option) {
  const usual = option === "preset" ? "default" : option === "seed" ? info.seed : model().presets[$("preset").value][option];
  return $(option).value !== String(usual);
}

// What the address says of model, methods and options; the rest is as it is at first.
export function restore(said) {
  choose("model", said.model, info.models[0].name);
  choose("compare-model", said["compare-model"], $("model").value);
  choose("preset", said.preset, "default");
  usePreset();
  $("seed").value = info.seed;
  for (const name of OPTIONS) if (said[name] !== undefined) choose(name, said[name], $(name).value);
  for (const id of ["method", "compare-method"]) choose(id, said[id], "dave");
}

// Sets what can be set: an address may come from another server.
export function choose(id, value, otherwise) {
  $(id).value = value ?? otherwise;
  if ($(id).value !== String(value ?? otherwise)) $(id).value = otherwise;
}

export function showRefused(reasons) {
  refused = reasons;
  const names = Object.keys(refused);
  for (const id of ["method", "compare-method"]) {
    for (const option of $(id).options) {
      option.disabled = option.value in refused;
      option.title = refused[option.value] ?? "";
    }
  }
  $("refused").hidden = !names.length;
  const count = names.length === 1 ? "1 method" : `${names.length} methods`;
  $("refused").querySelector("summary").textContent = `${count} cannot explain this model`;
  const lines = names.map((name) => make("li", {}, make("b", { textContent: name }), `: ${refused[name]}`));
  $("refused").querySelector("ul").replaceChildren(...lines);
}
