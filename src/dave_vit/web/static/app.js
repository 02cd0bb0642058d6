// The page: what is chosen, and which panels show it.

import * as api from "./api.js";
import { Panel } from "./panel.js";
import { table } from "./paint.js";

const $ = (id) => document.getElementById(id);
const NARROW = "(max-width: 62rem)"; // one column, as in style.css
const OPTIONS = ["samples", "preset", "noise", "noise_level", "reducer", "seed"];

const page = {
  colours: {},
  mix: 0.5,
  image: null,
  announce: (text) => ($("status").textContent = text),
  point: (at) => panels.forEach((panel) => panel.point(at)),
  source: () => ({ url: state.url, name: state.name }),
  found,
};
const panels = [new Panel(page), new Panel(page)];
// target: the index of a class, or what was typed
const state = { info: null, blob: null, name: "", url: "", classes: [], target: null, looking: null };

// --- choices

function fill(select, values, chosen) {
  select.replaceChildren(...values.map((value) => new Option(value.text ?? value, value.value ?? value)));
  if (chosen !== undefined) select.value = chosen;
}

function model() {
  return state.info.models.find((card) => card.name === $("model").value);
}

function method(name) {
  return state.info.methods.find((card) => card.name === name);
}

function usePreset() {
  const preset = model().presets[$("preset").value];
  for (const name of ["samples", "noise", "noise_level", "reducer"]) $(name).value = preset[name];
}

function showMethod() {
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
function options(name) {
  const preset = model().presets[$("preset").value];
  const sent = {};
  for (const option of OPTIONS.filter((known) => method(name).takes.includes(known))) {
    const value = $(option).value;
    const usual = option === "preset" ? "default" : preset[option];
    const own = method(name).takes.includes("preset"); // other methods know nothing of the preset's number
    if (value !== String(usual) || (option === "samples" && !own)) sent[option] = value;
  }
  return sent;
}

// --- the image

async function open(blob, name) {
  complain("");
  if (blob.size > state.info.limits.bytes) {
    complain(`${name} has ${(blob.size / 1e6).toFixed(1)} MB; at most ${state.info.limits.bytes / 1e6} MB are taken.`);
    return;
  }
  await look(blob, name);
}

// What cannot be read leaves everything as it was.
async function look(blob, name) {
  state.looking?.abort();
  const looking = (state.looking = new AbortController());
  page.announce("Looking at the image.");
  try {
    const seen = await api.look(blob, { model: $("model").value, name }, looking.signal);
    const image = await api.pixels(seen.picture);
    if (looking.signal.aborted) return;
    if (blob !== state.blob) {
      URL.revokeObjectURL(state.url);
      state.url = URL.createObjectURL(blob);
    }
    Object.assign(state, { blob, name, classes: seen.top5, target: seen.top5[0].index });
    page.image = image;
    showSeen(seen);
    runAll();
  } catch (error) {
    if (error.name !== "AbortError") complain(error.message);
  }
}

function showSeen(seen) {
  complain("");
  $("image-note").hidden = false;
  $("image-note").textContent = [state.name, ...seen.notes].join(" · ");
  $("empty").hidden = true;
  $("mix-row").hidden = false;
  $("classes-card").hidden = false;
  if (matchMedia(NARROW).matches) $("classes-card").scrollIntoView();
  showClasses((seen.top5[1] ?? seen.top5[0]).index);
  page.announce(`The model sees: ${seen.top5.map((guess) => guess.name).join(", ")}.`);
}

function complain(text) {
  $("image-alert").hidden = !text;
  $("image-alert").textContent = text;
}

// --- classes

// What was typed becomes one of the classes once the server has found it.
function found(panel, guess) {
  const known = state.classes.some((other) => other.index === guess.index);
  const typed = panel === panels[0] && typeof state.target === "string";
  if (!known) state.classes.push(guess);
  if (typed) state.target = guess.index;
  if (typed || !known) showClasses($("compare-class").value);
}

function showClasses(second) {
  $("classes").replaceChildren(...state.classes.map(classRow));
  showOpponents();
  fill($("compare-class"), state.classes.map((guess) => ({ text: guess.name, value: guess.index })), second);
}

// What a class may be set against: its rivals, nothing, or another class.
function showOpponents() {
  const usual = { text: "as the method has it", value: "" };
  const words = [usual, { text: "its rivals", value: "rivals" }, { text: "nothing", value: "none" }];
  const others = state.classes.map((guess) => ({ text: guess.name, value: String(guess.index) }));
  const kept = [...words, ...others].some(({ value }) => value === $("against").value) ? $("against").value : "";
  fill($("against"), [...words, ...others], kept);
}

function classRow(guess) {
  const row = document.createElement("label");
  const input = Object.assign(document.createElement("input"), { type: "radio", name: "class", value: guess.index });
  input.checked = guess.index === state.target;
  input.addEventListener("change", () => {
    state.target = guess.index;
    run(0);
  });
  const name = Object.assign(document.createElement("span"), { className: "name", textContent: guess.name });
  const share = Object.assign(document.createElement("span"), { className: "share" });
  share.textContent = `${(100 * guess.probability).toFixed(1)} %`;
  const level = Object.assign(document.createElement("i"), { className: "level" });
  level.style.width = `${100 * guess.probability}%`;
  row.append(input, name, share, level);
  return row;
}

async function suggest() {
  try {
    const names = await api.classes($("model").value, $("other-class").value);
    $("class-names").replaceChildren(...names.map((name) => new Option(name)));
  } catch {
    // suggestions are a help, no need
  }
}

// --- running

function run(number) {
  if (!state.blob) return;
  const name = number === 0 ? $("method").value : $("compare-method").value;
  const wanted = number === 0 ? state.target : $("compare-class").value;
  const known = state.classes.find((guess) => String(guess.index) === String(wanted));
  panels[number].run({
    blob: state.blob,
    options: { model: $("model").value, name: state.name, target: wanted, method: name, ...opponent(), ...options(name) },
    title: known ? known.name : wanted,
  });
}

function opponent() {
  return $("against").value ? { against: $("against").value } : {};
}

function runAll() {
  show();
  run(0);
  if ($("compare").checked) run(1);
}

function show() {
  const count = !state.blob ? 0 : $("compare").checked ? 2 : 1;
  if ($("panels").childElementCount === count) return; // what is moved loses focus and clicks
  $("panels").replaceChildren(...panels.slice(0, count).map((panel) => panel.root));
  $("panels").classList.toggle("two", count === 2);
}

// --- wiring

function chosen(input) {
  if (input.files?.length) open(input.files[0], input.files[0].name);
  input.value = ""; // the same file can be chosen again
}

function taken(transfer, event) {
  const file = [...(transfer?.files ?? [])][0];
  if (!file) return;
  event.preventDefault();
  open(file, file.name || "pasted.png");
}

function dragging(event) {
  event.preventDefault();
  $("drop").classList.toggle("over", event.type === "dragover");
}

function addExamples(paths) {
  paths.forEach((path, number) => {
    const button = document.createElement("button");
    button.type = "button";
    button.ariaLabel = `Example ${number + 1}`;
    button.append(Object.assign(new Image(64, 64), { src: path, alt: "" }));
    button.addEventListener("click", async () => {
      try {
        open(await api.example(path), `example-${number + 1}.png`);
      } catch (error) {
        complain(error.message);
      }
    });
    $("examples").append(button);
  });
}

function listen() {
  $("file").addEventListener("change", () => chosen($("file")));
  for (const name of ["dragover", "dragleave", "drop"]) addEventListener(name, dragging);
  addEventListener("drop", (event) => taken(event.dataTransfer, event));
  addEventListener("paste", (event) => taken(event.clipboardData, event));
  $("mix").addEventListener("input", () => {
    page.mix = $("mix").value / 100;
    panels.forEach((panel) => panel.draw());
  });
  $("model").addEventListener("change", () => {
    usePreset();
    if (state.blob) look(state.blob, state.name);
  });
  $("preset").addEventListener("change", usePreset);
  $("against").addEventListener("change", runAll);
  $("method").addEventListener("change", () => {
    showMethod();
    run(0);
  });
  for (const name of OPTIONS) $(name).addEventListener("change", () => $(name).reportValidity() && runAll());
  $("compare").addEventListener("change", () => {
    $("compare-options").hidden = !$("compare").checked;
    panels[1].stop();
    showMethod();
    show();
    if ($("compare").checked) run(1);
  });
  $("compare-class").addEventListener("change", () => run(1));
  $("compare-method").addEventListener("change", () => {
    showMethod();
    run(1);
  });
  $("other-class").addEventListener("input", suggest);
  $("other").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("other-class").value.trim();
    if (!text) return;
    state.target = text;
    showClasses($("compare-class").value);
    run(0);
    $("other-class").value = "";
  });
}

async function start() {
  try {
    state.info = await api.info();
  } catch (error) {
    complain(error.message);
    return;
  }
  const { models, methods, reducers, noises, colormaps, limits, seed, examples } = state.info;
  for (const [name, hexes] of Object.entries(colormaps)) page.colours[name] = table(hexes);
  fill($("model"), models.map((card) => card.name));
  fill($("method"), methods.map((card) => card.name), "dave");
  fill($("compare-method"), methods.map((card) => card.name), "dave");
  fill($("preset"), Object.keys(model().presets), "default");
  fill($("noise"), noises);
  fill($("reducer"), reducers);
  $("samples").max = limits.samples;
  $("seed").value = seed;
  usePreset();
  showOpponents();
  showMethod();
  addExamples(examples);
  listen();
}

start();
