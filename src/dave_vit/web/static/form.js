// Model, method and options: builds the form from what the server describes, and reads what is chosen.

import { $, fill, make } from "./dom.js";

let info = null;

// Options of the method, in the order of the form.
const methodOptions = () => info.options.filter((option) => option.of_method);

export const optionNames = () => methodOptions().map(({ name }) => name);

export function buildForm(everything) {
  info = everything;
  for (const option of info.options) $(option.section).append(field(option));
  const names = info.models.map(({ name }) => name);
  fill($("model"), names);
  fill($("compare-model"), names);
  $("compare-model").closest("label").hidden = names.length < 2;
  fill($("compare-method"), info.methods.map(({ name }) => name), "dave");
  applyPreset();
}

function field({ name, label, type, choices, minimum, maximum, default: value }) {
  const input = make(type === "string" ? "select" : "input", { id: name });
  if (type === "string") fill(input, choices.map((choice) => ({ text: choice || "model's own", value: choice })), value ?? undefined);
  else Object.assign(input, { type: "number", min: minimum, max: maximum ?? "", value: value ?? "" });
  if (type === "number") input.step = "any";
  if (type !== "string") input.inputMode = type === "integer" ? "numeric" : "decimal";
  const row = make("label", { className: "field" }, make("span", { textContent: label }), input);
  row.dataset.option = name;
  return row;
}

export function chosenModel(name = $("model").value) {
  return info.models.find((card) => card.name === name);
}

function findMethod(name) {
  return info.methods.find((card) => card.name === name);
}

export function applyPreset() {
  for (const { name, of_preset } of methodOptions()) if (of_preset) $(name).value = defaultOf(name);
}

export function showMethod() {
  const chosen = findMethod($("method").value);
  const compared = $("compare").checked ? findMethod($("compare-method").value).takes : [];
  $("method-note").textContent = `${chosen.summary} ${chosen.paper}.`;
  for (const name of optionNames()) {
    const used = [...chosen.takes, ...compared].includes(name);
    $(name).disabled = !used;
    $(name).closest(".field").classList.toggle("unused", !used);
  }
}

// Only what differs from the preset is sent, so that the command line stays short.
export function readOptions(method) {
  const { takes } = findMethod(method);
  const hasPreset = takes.includes("preset"); // other methods do not know the preset's number of samples
  const sent = (name) => isChanged(name) || name === "seed" || (name === "samples" && !hasPreset);
  const names = optionNames().filter((name) => takes.includes(name) && sent(name));
  return Object.fromEntries(names.map((name) => [name, $(name).value]));
}

function defaultOf(name) {
  return info.options.find((option) => option.name === name).default ?? chosenModel().presets[$("preset").value][name];
}

export function isChanged(name) {
  return $(name).value !== String(defaultOf(name));
}

// Applies model, methods and options of an address; what it does not name gets its default.
export function restoreForm(saved) {
  select("model", saved.model, info.models[0].name);
  select("compare-model", saved["compare-model"], $("model").value);
  select("fit", saved.fit, "");
  select("preset", saved.preset, defaultOf("preset"));
  for (const name of optionNames()) select(name, saved[name], String(defaultOf(name)));
  for (const id of ["method", "compare-method"]) select(id, saved[id], defaultOf("method"));
}

// Sets a field to a value if it can have it: an address may come from another server.
export function select(id, value, fallback) {
  $(id).value = value ?? fallback;
  if ($(id).value !== String(value ?? fallback)) $(id).value = fallback;
}

// reasons: by the method that cannot explain the model
export function showRefusals(reasons) {
  const names = Object.keys(reasons);
  for (const id of ["method", "compare-method"]) {
    for (const option of $(id).options) {
      option.disabled = option.value in reasons;
      option.title = reasons[option.value] ?? "";
    }
  }
  $("refused").hidden = !names.length;
  const count = names.length === 1 ? "1 method" : `${names.length} methods`;
  $("refused").querySelector("summary").textContent = `${count} cannot explain this model`;
  const lines = names.map((name) => make("li", {}, make("b", { textContent: name }), `: ${reasons[name]}`));
  $("refused").querySelector("ul").replaceChildren(...lines);
}
