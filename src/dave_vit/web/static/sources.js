// Where a word comes from: parts of its score as bars, a sentence or a shade.

import { make } from "./dom.js";

const NAMES = { image: "Image", prompt: "Prompt", answer: "Words before", constants: "Constants" };
const MIDDLE = 384; // sum of the three bytes of a colour that is neither light nor dark

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
const grounding = ({ grounded }) => (grounded ? "" : "Not grounded in the image: its part does not exceed zero by two standard errors.");

export function describeSources(sources) {
  const parts = Object.entries(NAMES).map(([key, name]) => `${name} ${signed(sources[key].value)}`);
  return [`${signed(sources.score)} = ${parts.join(", ")}.`, grounding(sources)].join(" ").trim();
}

// share: from -1 to 1; colours: three bytes each, from negative to positive
export function shadeOf(share, colours) {
  const at = 3 * Math.round(255 * (0.5 + Math.min(1, Math.max(-1, share)) / 2));
  const bytes = colours.slice(at, at + 3);
  const isLight = bytes[0] + bytes[1] + bytes[2] > MIDDLE;
  return { backgroundColor: `rgb(${bytes.join(" ")})`, color: isLight ? "#222" : "#fff" };
}

// Fills `root` with a bar for each part of a word's score; sources: null hides it.
export function showSources(root, sources) {
  root.hidden = !sources;
  if (!sources) return;
  const largest = Math.max(...Object.keys(NAMES).map((key) => Math.abs(sources[key].value))) || 1;
  const rows = Object.entries(NAMES).map(([key, name]) => sourceRow(name, sources[key], largest));
  const title = make("p", {}, make("span", { className: "strong", textContent: "Sources" }), ` of its score against its rivals, ${signed(sources.score)}`);
  root.replaceChildren(title, ...rows, make("p", { className: "ungrounded-note", textContent: grounding(sources) }));
}

function sourceRow(name, { value, standard_error }, largest) {
  const bar = make("i", { className: value < 0 ? "against" : "" });
  bar.style.width = `${(50 * Math.abs(value)) / largest}%`;
  const number = make("span", { className: "value", textContent: `${signed(value)} ± ${standard_error.toFixed(2)}` });
  return make("div", { className: "source" }, make("span", { textContent: name }), make("span", { className: "track" }, bar), number);
}
