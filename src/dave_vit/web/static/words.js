// A model that writes: what it is asked, and its answer word by word.

import * as api from "./api.js";
import { model } from "./choices.js";
import { $, fill, make } from "./dom.js";

export class Words {
  // asked: called with a prompt; chosen: called when another word is
  constructor(asked, chosen) {
    this.chosen = chosen;
    this.list = []; // {index, name}, counted from 1
    this.target = null;
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      asked($("prompt").value.trim());
    });
  }

  get prompt() {
    return model().prompts ? $("prompt").value.trim() : "";
  }

  named(wanted) {
    return this.list.find((word) => String(word.index) === String(wanted));
  }

  // Lets the model write; gives back the image in the size of its maps.
  async ask(blob, name, signal, busy) {
    const told = await api.ask(blob, { model: model().name, name, prompt: this.prompt }, signal, busy);
    this.answer = told.answer;
    this.list = told.words.map((word, number) => ({ index: number + 1, name: word }));
    return told;
  }

  use(said) {
    this.target = this.named(said.target)?.index ?? null;
    const second = said["compare-class"] ?? this.list[1]?.index;
    fill($("compare-class"), this.list.map((word) => ({ text: word.name, value: String(word.index) })), second);
    this.show();
  }

  show() {
    $("answer").hidden = !this.list.length;
    $("answer").replaceChildren(...this.list.map((word) => this.button(word)));
    $("ask").hidden = !model().prompts;
  }

  button({ index, name }) {
    const button = make("button", { type: "button", textContent: name });
    button.ariaPressed = String(index === this.target);
    button.addEventListener("click", () => {
      this.target = index;
      for (const other of $("answer").children) other.ariaPressed = String(other === button);
      this.chosen();
    });
    return button;
  }

  // What a request for a word says in the place of a class.
  said(wanted) {
    return { word: wanted, prompt: this.prompt, answer: this.answer };
  }
}
