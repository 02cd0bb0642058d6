// The classes of an image: which one is explained, and which one it is set against.

import * as api from "./api.js";
import { $, fill, make, percent } from "./dom.js";

export class Classes {
  // chosen: called with the index of another class; opposed: called when the opponent changed
  constructor(chosen, opposed) {
    this.chosen = chosen;
    this.opposed = opposed;
    this.list = [];
    this.target = null; // the index of a class, or what was typed
    showWords();
    $("other-class").addEventListener("input", suggest);
    $("other").addEventListener("submit", (event) => this.typed(event));
    $("against").addEventListener("change", () => {
      this.show();
      opposed();
    });
  }

  named(wanted) {
    return this.list.find((guess) => String(guess.index) === String(wanted));
  }

  // said: what the address says of target, against and compare-class
  use(seen, said = {}) {
    this.list = [...seen.top5, ...seen.also];
    this.target = (this.named(said.target) ?? this.list[0]).index;
    this.show(said["compare-class"] ?? String((this.list[1] ?? this.list[0]).index));
    if (said.against !== undefined) $("against").value = said.against;
    this.show();
  }

  // What was typed becomes one of the classes once the server has found it.
  found(guess, first) {
    const known = this.named(guess.index);
    const typed = first && typeof this.target === "string";
    if (!known) this.list.push(guess);
    if (typed) this.target = guess.index;
    if (typed || !known) this.show();
  }

  show(second = $("compare-class").value) {
    this.showOpponents();
    const focus = focused($("classes"));
    $("classes").replaceChildren(...this.list.map((guess) => this.row(guess)));
    focus();
    const offered = this.list.map((guess) => ({ text: guess.name, value: String(guess.index) }));
    fill($("compare-class"), offered, offered.some(({ value }) => value === second) ? second : offered[0]?.value);
  }

  // What a class may be set against: its rivals, nothing, or another class.
  showOpponents() {
    const others = this.list.filter(({ index }) => index !== this.target);
    showWords(others.map((guess) => ({ text: guess.name, value: String(guess.index) })));
  }

  row(guess) {
    const input = make("input", { type: "radio", name: "class", value: guess.index });
    input.checked = guess.index === this.target;
    input.addEventListener("change", () => this.choose(guess.index));
    const level = make("i", { className: "level" });
    level.style.width = `${100 * guess.probability}%`;
    const name = make("span", { className: "name", textContent: guess.name });
    const share = make("span", { className: "share", textContent: percent(guess.probability) });
    const row = make("div", { className: "class" }, make("label", {}, input, name, share, level));
    row.append(this.versus(guess));
    return row;
  }

  // "Why this and not that", with one click.
  versus(guess) {
    const on = $("against").value === String(guess.index);
    const button = make("button", { type: "button", className: "versus", textContent: "vs" });
    const target = this.named(this.target)?.name ?? this.target;
    button.title = button.ariaLabel = `Why ${target} and not ${guess.name}?`;
    button.ariaPressed = String(on);
    button.disabled = guess.index === this.target;
    button.addEventListener("click", () => {
      $("against").value = on ? "" : String(guess.index);
      this.show();
      this.opposed(!on);
    });
    return button;
  }

  choose(target) {
    this.target = target;
    this.show();
    this.chosen();
  }

  typed(event) {
    event.preventDefault();
    const text = $("other-class").value.trim();
    if (text) this.choose(text);
    $("other-class").value = "";
  }
}

// Gives back the focus to what takes the place of the element that has it.
function focused(list) {
  const held = document.activeElement;
  const place = [...list.children].findIndex((row) => row.contains(held));
  return () => place >= 0 && list.children[place]?.querySelector(held.localName).focus();
}

function showWords(others = []) {
  const usual = { text: "as the method has it", value: "" };
  const words = [usual, { text: "its rivals", value: "rivals" }, { text: "nothing", value: "none" }, ...others];
  const kept = words.some(({ value }) => value === $("against").value) ? $("against").value : "";
  fill($("against"), words, kept);
}

async function suggest() {
  try {
    const names = await api.classes($("model").value, $("other-class").value);
    $("class-names").replaceChildren(...names.map((name) => new Option(name)));
  } catch {
    // suggestions are a help, no need
  }
}
