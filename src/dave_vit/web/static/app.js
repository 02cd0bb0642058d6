// The page: an image, what is explained about it, and the panels that show the maps.

import { readAddress, writeAddress } from "./address.js";
import * as api from "./api.js";
import { Classes } from "./classes.js";
import { listenToDisplay, readDisplay, restoreDisplay } from "./display.js";
import { $, scrollIfHidden } from "./dom.js";
import { applyPreset, buildForm, chosenModel, optionNames, restoreForm, select, showMethod } from "./form.js";
import { newName, saveImage } from "./image_store.js";
import { exampleName, listenToImages, loadImage, showExamples } from "./images.js";
import { cancelChecks, scheduleChecks, showModel } from "./model_info.js";
import { colorTable } from "./paint.js";
import { Pair } from "./pair.js";
import { Panel } from "./panel.js";
import { buildRequest, isUpToDate, readChoices } from "./request.js";
import { Results } from "./results.js";
import { Session } from "./session.js";
import { Words } from "./words.js";
import { startTour } from "./tour.js";
import { Zoom, formatFactor } from "./zoom.js";

const NARROW = "(max-width: 62rem)"; // one column, as in style.css
const PHOTO = 1024; // pixels of the longer side of what is shown when zoomed in
const CLICK = 300; // milliseconds: what leaving a field changes must not move what is being clicked

// What all panels share.
const page = {
  colours: {},
  display: {},
  notes: [],
  announce: (text) => ($("status").textContent = text),
  point: (at) => panels.forEach((panel) => panel.point(at)),
  source: () => ({ url: state.url, name: state.name }),
  onTarget: (panel, prediction) =>
    usesChosenModel(panel) && !chosenModel().writes && classes.resolve(prediction, panel === panels[0]),
  sources: (panel) => (chosenModel().writes && usesChosenModel(panel) ? words.traced[panel.target.index - 1]?.sources : null),
  photo: (panel) => (zoom.scale > 1 ? state.photos[panel.request.options.model] : null),
  otherModel: (panel) => (usesChosenModel(panel) ? "" : panel.request.options.model),
  draw,
  onDone,
  limit,
  chooseCandidate,
  results: new Results(),
};
const panels = [new Panel(page), new Panel(page)];
const pair = new Pair($("pair"), page, panels);
const session = new Session($("session"));
const zoom = new Zoom(() => document.querySelectorAll(".stage"), onZoom);
const classes = new Classes(runFirst, onAgainst);
const words = new Words(page, {
  onPrompt: (prompt) => state.blob && inspect(state.blob, state.name, state.image, { prompt }),
  onChoice: runFirst,
  onTraced: draw,
});
// image: its name in the address; pictures: the image as models see it, by model; crops: the
// part of the photograph that it is; photos: that part in the photograph's resolution, once zoomed; inspection: aborts the running one
// inspectedBy: the model whose classes are shown; turn: counts addresses that were followed
const state = {
  info: null, blob: null, name: "", url: "", image: "", pictures: {}, crops: {}, photos: {}, inspection: null, inspectedBy: "", turn: 0, replace: true,
};

function usesChosenModel(panel) {
  return panel.request.options.model === $("model").value;
}

// --- the address

function saveChoices(replace = state.replace) {
  writeAddress(readChoices(state, classes, words), replace);
  state.replace = false;
}

// Shows what the address names.
async function followAddress() {
  const turn = (state.turn += 1);
  const saved = { against: "", ...readAddress() };
  const before = { image: state.image, model: $("model").value, fit: $("fit").value, prompt: words.prompt };
  restoreForm(saved);
  $("compare").checked = Boolean(saved.compare);
  select("compare-show", saved.compare, "beside");
  restoreDisplay(saved);
  if (before.model !== $("model").value) showChosenModel();
  applyDisplay();
  showCompare();
  state.replace = true; // the entry of this address exists already
  if (!saved.image) return closeImage();
  const prompt = saved.prompt ?? "";
  const isInspected = !state.inspection && state.inspectedBy === $("model").value; // or the classes may be another model's
  const isSame = isInspected && saved.image === before.image && before.prompt === prompt && before.fit === $("fit").value;
  $("prompt").value = prompt;
  if (isSame) return restoreTarget(saved);
  const loaded = await loadImage(saved.image, state.info.models);
  if (turn !== state.turn) return; // the user went on, back or forth
  if (loaded) await inspect(loaded.blob, loaded.name, saved.image, saved);
  else showAlert("The image of this address is not in this browser: addresses hold all choices, but no images. Choose it again.");
}

function restoreTarget(saved) {
  if (chosenModel().writes) words.restore(saved);
  else classes.restore({ top5: classes.list, also: [] }, saved);
  runAll();
}

// Goes back to the page without an image.
function closeImage() {
  Object.assign(state, { blob: null, image: "", name: "" });
  panels.forEach((panel) => panel.stop());
  for (const id of ["image-note", "display", "classes-card", "words-card"]) $(id).hidden = true;
  $("empty").hidden = false;
  document.body.classList.remove("explained");
  showPanels();
}

// --- the image

async function openImage(blob, name, image) {
  showAlert("");
  const { bytes } = state.info.limits;
  if (blob.size > bytes) {
    showAlert(`${name} has ${(blob.size / 1e6).toFixed(1)} MB; the server takes at most ${bytes / 1e6} MB.`);
    return;
  }
  await inspect(blob, name, image ?? newName());
}

// Classifies an image, or lets the model write about it. An image that cannot be read changes nothing.
// saved: what the address names
async function inspect(blob, name, image, saved = {}) {
  state.inspection?.abort();
  cancelChecks();
  const inspection = (state.inspection = new AbortController());
  page.announce("Classifying the image.");
  try {
    const response = await (chosenModel().writes ? generate : classify)(blob, name, saved, inspection.signal);
    const picture = response.picture && (await api.decodePixels(response.picture));
    if (inspection.signal.aborted) return;
    if (blob !== state.blob) {
      URL.revokeObjectURL(state.url);
      state.url = URL.createObjectURL(blob);
      if (!image.startsWith("example-")) saveImage(image, blob, name);
    }
    const model = $("model").value;
    Object.assign(state, { blob, name, image, inspectedBy: model, pictures: { [model]: picture }, crops: { [model]: response.crop }, photos: {} });
    if (zoom.scale > 1) onZoom(zoom.scale);
    page.notes = response.notes;
    showInspection(response, saved);
    runAll();
  } catch (error) {
    if (error.name !== "AbortError") showAlert(error.message);
  } finally {
    if (state.inspection === inspection) state.inspection = null;
  }
}

function classify(blob, name, saved, signal) {
  const also = [saved.target, saved.against, saved["compare-class"]].filter((index) => /^\d+$/.test(index ?? ""));
  return api.classify(blob, { model: $("model").value, name, fit: $("fit").value, also }, signal, showAlert);
}

// A model that takes a prompt writes nothing before it has one.
async function generate(blob, name, saved, signal) {
  if (!chosenModel().prompts || words.prompt) return words.generate(blob, name, signal, showAlert);
  words.clear();
  return { notes: [] };
}

function showInspection(response, saved) {
  showAlert("");
  $("image-note").hidden = false;
  $("image-note").textContent = [state.name, ...response.notes].join(" · ");
  $("empty").hidden = true;
  $("display").hidden = false;
  $("classes-card").hidden = chosenModel().writes;
  $("words-card").hidden = !chosenModel().writes;
  document.body.classList.add("explained");
  if (matchMedia(NARROW).matches) $("results").scrollIntoView();
  if (chosenModel().writes) return words.restore(saved);
  classes.restore(response, saved);
  page.announce(`The model sees: ${response.top5.map(({ name }) => name).join(", ")}.`);
}

function showAlert(text) {
  $("image-alert").hidden = !text;
  $("image-alert").textContent = text;
}

// --- running

async function run(number) {
  const request = state.blob && buildRequest(number, state, classes, words);
  if (!request) return;
  const panel = panels[number];
  try {
    panel.image = await pictureFor(request.options.model);
    await panel.run(request);
  } catch (error) {
    showAlert(error.message);
  }
}

async function pictureFor(model) {
  if (!state.pictures[model]) {
    const { picture, crop } = await api.classify(state.blob, { model, name: state.name, fit: $("fit").value });
    state.crops[model] = crop;
    state.pictures[model] = await api.decodePixels(picture);
  }
  return state.pictures[model];
}

// Shows the factor, and the photograph in its own resolution.
async function onZoom(scale) {
  $("zoom-reset").textContent = formatFactor(scale);
  const { blob, photos, crops, pictures } = state;
  for (const model of scale > 1 ? Object.keys(crops) : []) {
    const load = () => api.cropPhoto(blob, crops[model] ?? [0, 0, 1, 1], pictures[model], PHOTO);
    photos[model] ??= await load().catch(() => null); // browsers do not read every kind of file
  }
  draw();
}

function runAll() {
  showPanels();
  run(0);
  if ($("compare").checked) run(1);
  saveChoices();
}

// Runs the first panel, for which another class, word or method was chosen.
function runFirst() {
  showPanels();
  run(0);
  onChoice();
}

// chosen: whether a class to compare with was just chosen, which only a signed map shows fully
function onAgainst(chosen) {
  if (chosen === true) {
    $("view").value = "signed";
    applyDisplay();
  }
  runAll();
  onChoice();
}

// One of the classes that an ambiguous name may mean.
function chooseCandidate(panel, index) {
  if (panel === panels[0]) return classes.choose(index);
  panel.run({ ...panel.request, options: { ...panel.request.options, target: index } });
}

function onChoice() {
  saveChoices();
  setTimeout(() => state.blob && scrollIfHidden(panels[0].canvas, $("panels")), CLICK);
}

function onDone(panel) {
  if (!panel.finished) return;
  page.announce(`Map of ${panel.target.name} is done.`);
  pair.draw();
  scheduleChecks(0);
  if (panel !== panels[0]) return;
  const title = panel.find(".title").textContent;
  const { model, method } = panel.request.options;
  document.title = `${title} · DAVE`;
  session.add(location.hash, panel.canvas, `${title}, ${method}, ${model}, ${state.name}`);
}

// --- showing

function showPanels() {
  const isEmpty = !state.blob || (chosenModel().writes && words.target === null);
  const count = isEmpty ? 0 : $("compare").checked ? 2 : 1;
  $("pair").hidden = count < 2;
  if ($("panels").childElementCount === count) return; // elements that move lose focus and clicks
  $("panels").replaceChildren(...panels.slice(0, count).map((panel) => panel.root));
  $("panels").classList.toggle("two", count === 2);
  zoom.apply();
}

function showCompare() {
  $("compare-options").hidden = !$("compare").checked;
  if (!$("compare").checked) panels[1].stop();
  showMethod();
  showPanels();
}

function draw() {
  panels.forEach((panel) => panel.draw());
  $("scales-field").hidden = $("scales").disabled = !$("compare").checked || !pair.isComparable;
  if ($("compare").checked) pair.draw($("compare-show").value);
}

// Returns the number in the brightest colour. kind: "shown" or "smoothed"
function limit(panel, kind) {
  const isShared = $("compare").checked && page.display.scales === "shared"; // maps of different units cannot share one
  const group = isShared ? panels.filter((other) => other.planes && other.kind === panel.kind) : [panel];
  return Math.max(...group.map((other) => other[kind].limit));
}

function applyDisplay() {
  page.display = readDisplay();
  panels.forEach((panel) => panel.smooth());
  draw();
}

// --- wiring

async function openExample(path) {
  try {
    await openImage(await api.example(path), `${exampleName(path)}.png`, exampleName(path));
  } catch (error) {
    showAlert(error.message);
  }
}

function showChosenModel() {
  showModel();
  $("fit-field").hidden = chosenModel().writes;
  showExamples(openExample);
}

function listen() {
  classes.listen();
  listenToImages(openImage);
  addEventListener("hashchange", followAddress);
  listenToDisplay(applyDisplay, () => saveChoices(true));
  $("model").addEventListener("change", () => {
    $("compare-model").value = $("model").value;
    applyPreset();
    showChosenModel();
    if (state.blob) inspect(state.blob, state.name, state.image);
    else saveChoices();
  });
  $("fit").addEventListener("change", () => {
    if (state.blob) inspect(state.blob, state.name, state.image, readChoices(state, classes, words));
    else saveChoices();
  });
  $("preset").addEventListener("change", applyPreset);
  $("method").addEventListener("change", () => {
    showMethod();
    runFirst();
  });
  for (const name of optionNames()) {
    $(name).addEventListener("change", () => {
      if (!$(name).reportValidity() || isUpToDate(panels, state, classes, words)) return;
      runAll();
      onChoice();
    });
  }
  $("compare").addEventListener("change", () => {
    showCompare();
    draw();
    if ($("compare").checked) run(1);
    saveChoices();
  });
  for (const name of ["compare-class", "compare-method", "compare-model"]) {
    $(name).addEventListener("change", () => {
      showMethod();
      run(1);
      onChoice();
    });
  }
  $("compare-show").addEventListener("change", () => {
    draw();
    saveChoices();
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
    showAlert(error.message);
    return;
  }
  for (const [name, hexes] of Object.entries(state.info.colormaps)) page.colours[name] = colorTable(hexes);
  buildForm(state.info);
  listen();
  showMethod();
  showChosenModel();
  applyDisplay();
  if (location.hash) await followAddress();
  else {
    state.replace = false;
    startTour();
  }
}

start();
