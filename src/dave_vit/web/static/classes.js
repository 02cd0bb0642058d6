// The classes of an image: which one is explained, and which one it is compared with.

import * as api from "./api.js";
import { $, fill, make, percent } from "./dom.js";

export class Classes {
  // onChoice: called when another class is chosen; onAgainst: called when the class to compare with changed
  constructor(onChoice, onAgainst) {
    this.onChoice = onChoice;
    this.onAgainst = onAgainst;
    this.list = [];
    this.target = null; // the index of a class, or the text that was typed
  }

  // Called once the form is built.
  listen() {
    showAgainst();
    $("other-class").addEventListener("input", suggest);
    $("other").addEventListener("submit", (event) => this.submit(event));
    $("against").addEventListener("change", () => {
      this.show();
      this.onAgainst();
    });
  }

  find(index) {
    return this.list.find((prediction) => String(prediction.index) === String(index));
  }

  // saved: target, against and compare-class of the address
  restore({ top5, also }, saved = {}) {
    this.list = [...top5, ...also];
    this.target = (this.find(saved.target) ?? this.list[0]).index;
    this.show(saved["compare-class"] ?? String(this.target));
    if (saved.against !== undefined) $("against").value = saved.against;
    this.show();
  }

  // Typed text becomes a class of the list once the server has resolved it.
  resolve(prediction, isFirst) {
    const isListed = Boolean(this.find(prediction.index));
    const wasTyped = isFirst && typeof this.target === "string";
    if (!isListed) this.list.push(prediction);
    if (wasTyped) this.target = prediction.index;
    if (wasTyped || !isListed) this.show();
  }

  show(second = $("compare-class").value) {
    const others = this.list.filter(({ index }) => index !== this.target);
    showAgainst(others.map(({ name, index }) => ({ text: name, value: String(index) })));
    const restoreFocus = saveFocus($("classes"));
    $("classes").replaceChildren(...this.list.map((prediction) => this.row(prediction)));
    restoreFocus();
    const choices = this.list.map(({ name, index }) => ({ text: name, value: String(index) }));
    fill($("compare-class"), choices, choices.some(({ value }) => value === second) ? second : choices[0]?.value);
  }

  row(prediction) {
    const input = make("input", { type: "radio", name: "class", value: prediction.index });
    input.checked = prediction.index === this.target;
    input.addEventListener("change", () => this.choose(prediction.index));
    const level = make("i", { className: "level" });
    level.style.width = `${100 * prediction.probability}%`;
    const name = make("span", { className: "name", textContent: prediction.name });
    const share = make("span", { className: "share", textContent: percent(prediction.probability) });
    const label = make("label", {}, input, name, share, level);
    return make("div", { className: "class" }, label, this.versusButton(prediction));
  }

  // "Why this and not that", with one click.
  versusButton({ index, name }) {
    const isOn = $("against").value === String(index);
    const button = make("button", { type: "button", className: "versus", textContent: "vs" });
    button.title = button.ariaLabel = `vs: Why ${this.find(this.target)?.name ?? this.target} and not ${name}?`;
    button.ariaPressed = String(isOn);
    button.disabled = index === this.target;
    button.addEventListener("click", () => {
      $("against").value = isOn ? "" : String(index);
      this.show();
      this.onAgainst(!isOn);
    });
    return button;
  }

  choose(target) {
    this.target = target;
    this.show();
    this.onChoice();
  }

  submit(event) {
    event.preventDefault();
    const text = $("other-class").value.trim();
    if (text) this.choose(text);
    $("other-class").value = "";
  }
}

// Returns a function that focuses the element which replaced the focused one.
function saveFocus(list) {
  const focused = document.activeElement;
  const position = [...list.children].findIndex((row) => row.contains(focused));
  return () => position >= 0 && list.children[position]?.querySelector(focused.localName).focus();
}

// What a class may be compared with: its rivals, nothing, or another class.
function showAgainst(others = []) {
  const fixed = [["default", ""], ["its rivals", "rivals"], ["nothing", "none"]];
  const choices = [...fixed.map(([text, value]) => ({ text, value })), ...others];
  fill($("against"), choices, choices.some(({ value }) => value === $("against").value) ? $("against").value : "");
}

async function suggest() {
  try {
    const names = await api.classes($("model").value, $("other-class").value);
    $("class-names").replaceChildren(...names.map((name) => new Option(name)));
  } catch {
    // suggestions are optional
  }
}
