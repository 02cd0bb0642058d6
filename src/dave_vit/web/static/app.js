// The page: an image, what is asked about it, and which panels show the answer.

import * as address from "./address.js";
import * as api from "./api.js";
import * as store from "./store.js";
import { later, showModel, soon } from "./about.js";
import { OPTIONS, choose, model, offer, restore, showMethod, usePreset } from "./choices.js";
import { answered, choices, requestOf } from "./asked.js";
import { Classes } from "./classes.js";
import { $, bringIntoSight } from "./dom.js";
import { exampleName, recall, showExamples, takeImages } from "./images.js";
import { listenToLook, lookSaid, readLook, restoreLook } from "./look.js";
import { Pair } from "./pair.js";
import { Panel } from "./panel.js";
import { table } from "./paint.js";
import { Session } from "./session.js";
import { Words } from "./words.js";
import { Zoom } from "./zoom.js";

const NARROW = "(max-width: 62rem)"; // one column, as in style.css
const CLICK = 300; // milliseconds: what leaving a field changes must not move what is being clicked

const page = {
  colours: {},
  look: {},
  notes: [],
  announce: (text) => ($("status").textContent = text),
  point: (at) => panels.forEach((panel) => panel.point(at)),
  source: () => ({ url: state.url, name: state.name }),
  found: (panel, guess) => sameModel(panel) && !model().writes && classes.found(guess, panel === panels[0]),
  told: (panel) => (sameModel(panel) ? "" : panel.request.options.model),
  draw,
  done,
  limit,
  meant,
};
const panels = [new Panel(page), new Panel(page)];
const pair = new Pair($("pair"), page, panels);
const session = new Session($("session"));
const zoom = new Zoom(() => document.querySelectorAll(".stage"));
const classes = new Classes(asked, opposed);
const words = new Words((prompt) => state.blob && look(state.blob, state.name, state.image, { prompt }), asked);
// image: the name under which the address knows it; pictures: the image as models see it, by their names
// seenBy: the model whose classes are shown; turn: counts addresses that were followed
const state = { info: null, blob: null, name: "", url: "", image: "", pictures: {}, looking: null, seenBy: "", turn: 0, replace: true };

function sameModel(panel) {
  return panel.request.options.model === $("model").value;
}

// --- the address

function remember(replace = state.replace) {
  address.write(choices(state, classes, words), replace);
  state.replace = false;
}

// Shows what the address says.
async function follow() {
  const turn = (state.turn += 1);
  const said = { against: "", ...address.read() };
  const before = { image: state.image, model: $("model").value, prompt: words.prompt };
  restore(said);
  $("compare").checked = Boolean(said.compare);
  choose("compare-show", said.compare, "beside");
  restoreLook(said);
  if (before.model !== $("model").value) showChosen();
  useLook();
  showCompare();
  state.replace = true; // this entry is there already
  if (!said.image) return leave();
  const asked = said.prompt ?? "";
  const seen = !state.looking && state.seenBy === $("model").value; // or its classes may be another model's
  const same = seen && said.image === before.image && before.prompt === asked;
  $("prompt").value = asked;
  if (same) return again(said);
  const kept = await recall(said.image, state.info.models);
  if (turn !== state.turn) return; // somebody goes on, back or forth
  if (kept) await look(kept.blob, kept.name, said.image, said);
  else complain("The image of this address is not in this browser: addresses hold all choices, but no images. Choose it again.");
}

function again(said) {
  if (model().writes) words.use(said);
  else classes.use({ top5: classes.list, also: [] }, said);
  runAll();
}

// Back to the page without an image.
function leave() {
  Object.assign(state, { blob: null, image: "", name: "" });
  panels.forEach((panel) => panel.stop());
  for (const id of ["image-note", "look", "classes-card", "words-card"]) $(id).hidden = true;
  $("empty").hidden = false;
  document.body.classList.remove("explained");
  show();
}

// --- the image

async function open(blob, name, image) {
  complain("");
  if (blob.size > state.info.limits.bytes) {
    complain(`${name} has ${(blob.size / 1e6).toFixed(1)} MB; at most ${state.info.limits.bytes / 1e6} MB are taken.`);
    return;
  }
  await look(blob, name, image ?? store.newName());
}

// What cannot be read leaves everything as it was. said: what the address says of the classes
async function look(blob, name, image, said = {}) {
  state.looking?.abort();
  later();
  const looking = (state.looking = new AbortController());
  page.announce("Looking at the image.");
  try {
    const seen = await (model().writes ? read : classify)(blob, name, said, looking.signal);
    const picture = seen.picture && (await api.pixels(seen.picture));
    if (looking.signal.aborted) return;
    if (blob !== state.blob) {
      URL.revokeObjectURL(state.url);
      state.url = URL.createObjectURL(blob);
      if (!image.startsWith("example-")) store.keep(image, blob, name);
    }
    Object.assign(state, { blob, name, image, seenBy: $("model").value, pictures: { [$("model").value]: picture } });
    page.notes = seen.notes;
    showSeen(seen, said);
    runAll();
  } catch (error) {
    if (error.name !== "AbortError") complain(error.message);
  } finally {
    if (state.looking === looking) state.looking = null;
  }
}

function classify(blob, name, said, signal) {
  const also = [said.target, said.against, said["compare-class"]].filter((one) => /^\d+$/.test(one ?? ""));
  return api.look(blob, { model: $("model").value, name, also }, signal, complain);
}

// A model that takes a prompt writes nothing before it has one.
async function read(blob, name, said, signal) {
  if (!model().prompts || words.prompt) return words.ask(blob, name, signal, complain);
  words.list = [];
  return { notes: [] };
}

function showSeen(seen, said) {
  complain("");
  $("image-note").hidden = false;
  $("image-note").textContent = [state.name, ...seen.notes].join(" · ");
  $("empty").hidden = true;
  $("look").hidden = false;
  $("classes-card").hidden = model().writes;
  $("words-card").hidden = !model().writes;
  document.body.classList.add("explained");
  if (matchMedia(NARROW).matches) $("results").scrollIntoView();
  if (model().writes) return words.use(said);
  classes.use(seen, said);
  page.announce(`The model sees: ${seen.top5.map((guess) => guess.name).join(", ")}.`);
}

function complain(text) {
  $("image-alert").hidden = !text;
  $("image-alert").textContent = text;
}

// --- running

async function run(number) {
  const request = state.blob && requestOf(number, state, classes, words);
  if (!request) return;
  const panel = panels[number];
  try {
    panel.image = await pictureFor(request.options.model);
    await panel.run(request);
  } catch (error) {
    complain(error.message);
  }
}

async function pictureFor(name) {
  state.pictures[name] ??= await api.pixels((await api.look(state.blob, { model: name, name: state.name })).picture);
  return state.pictures[name];
}

function runAll() {
  show();
  run(0);
  if ($("compare").checked) run(1);
  remember();
}

// Another class, word or method of the first panel was chosen.
function asked() {
  show();
  run(0);
  changedByHand();
}

// chosen: whether a class was just set against another, which only a signed map shows fully
function opposed(chosen) {
  if (chosen === true) {
    $("view").value = "signed";
    useLook();
  }
  runAll();
  changedByHand();
}

// One of the classes that an ambiguous name fits.
function meant(panel, index) {
  if (panel === panels[0]) return classes.choose(index);
  panel.run({ ...panel.request, options: { ...panel.request.options, target: index } });
}

function changedByHand() {
  remember();
  setTimeout(() => state.blob && bringIntoSight(panels[0].canvas, $("panels")), CLICK);
}

// A map is done.
function done(panel) {
  if (!panel.finished) return;
  page.announce(`Map of ${panel.target.name} is done.`);
  pair.draw();
  soon(0);
  if (panel !== panels[0]) return;
  document.title = `${panel.find(".title").textContent} · DAVE`;
  const { model: of, method } = panel.request.options;
  session.add(location.hash, panel.canvas, `${panel.find(".title").textContent}, ${method}, ${of}, ${state.name}`);
}

// --- showing

function show() {
  const nothing = !state.blob || (model().writes && words.target === null);
  const count = nothing ? 0 : $("compare").checked ? 2 : 1;
  $("pair").hidden = count < 2;
  if ($("panels").childElementCount === count) return; // what is moved loses focus and clicks
  $("panels").replaceChildren(...panels.slice(0, count).map((panel) => panel.root));
  $("panels").classList.toggle("two", count === 2);
  zoom.apply();
}

function showCompare() {
  $("compare-options").hidden = !$("compare").checked;
  $("scales-field").hidden = !$("compare").checked;
  if (!$("compare").checked) panels[1].stop();
  showMethod();
  show();
}

function draw() {
  panels.forEach((panel) => panel.draw());
  if ($("compare").checked) pair.draw($("compare-show").value);
}

// The number in the brightest colour. kind: "shown" or "soft"
function limit(panel, kind) {
  const shared = $("compare").checked && page.look.scales === "shared";
  const like = shared ? panels.filter((other) => other.planes && other.kind === panel.kind) : [panel];
  return Math.max(...like.map((other) => other[kind].limit));
}

function useLook() {
  page.look = readLook();
  panels.forEach((panel) => panel.soften());
  draw();
}

// --- wiring

async function openExample(path) {
  try {
    await open(await api.example(path), `${exampleName(path)}.png`, exampleName(path));
  } catch (error) {
    complain(error.message);
  }
}

// What belongs to the chosen model.
function showChosen() {
  showModel();
  showExamples(openExample);
}

function listen() {
  takeImages(open);
  addEventListener("hashchange", follow);
  listenToLook(useLook, () => remember(true));
  $("model").addEventListener("change", () => {
    $("compare-model").value = $("model").value;
    usePreset();
    showChosen();
    if (state.blob) look(state.blob, state.name, state.image);
    else remember();
  });
  $("preset").addEventListener("change", usePreset);
  $("method").addEventListener("change", () => {
    showMethod();
    asked();
  });
  for (const name of OPTIONS) {
    $(name).addEventListener("change", () => {
      if (!$(name).reportValidity() || answered(panels, state, classes, words)) return;
      runAll();
      changedByHand();
    });
  }
  $("compare").addEventListener("change", () => {
    showCompare();
    draw();
    if ($("compare").checked) run(1);
    remember();
  });
  for (const name of ["compare-class", "compare-method", "compare-model"]) {
    $(name).addEventListener("change", () => {
      showMethod();
      run(1);
      changedByHand();
    });
  }
  $("compare-show").addEventListener("change", () => {
    draw();
    remember();
  });
  $("zoom-in").addEventListener("click", () => zoom.by(2));
  $("zoom-out").addEventListener("click", () => zoom.by(0.5));
  $("zoom-reset").addEventListener("click", () => zoom.reset());
  for (const root of [...panels.map((panel) => panel.root), $("pair")]) root.querySelectorAll(".stage").forEach((stage) => zoom.listen(stage));
}

async function start() {
  try {
    state.info = await api.info();
  } catch (error) {
    complain(error.message);
    return;
  }
  for (const [name, hexes] of Object.entries(state.info.colormaps)) page.colours[name] = table(hexes);
  offer(state.info);
  showMethod();
  showChosen();
  useLook();
  listen();
  if (location.hash) await follow();
  else state.replace = false;
}

start();
