// A model that writes: the prompt, and its answer word by word.

import * as api from "./api.js";
import { chosenModel } from "./form.js";
import { $, fill, make } from "./dom.js";

export class Words {
  // onPrompt: called with a prompt; onChoice: called when another word is chosen
  constructor(onPrompt, onChoice) {
    this.onChoice = onChoice;
    this.list = []; // {index, name}, counted from 1
    this.target = null;
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      onPrompt($("prompt").value.trim());
    });
  }

  get prompt() {
    return chosenModel().prompts ? $("prompt").value.trim() : "";
  }

  find(index) {
    return this.list.find((word) => String(word.index) === String(index));
  }

  // Lets the model write; returns the response, with the image in the size of its maps.
  async generate(blob, name, signal, onBusy) {
    const response = await api.generate(blob, { model: chosenModel().name, name, prompt: this.prompt }, signal, onBusy);
    this.answer = response.answer;
    this.list = response.words.map((word, number) => ({ index: number + 1, name: word }));
    return response;
  }

  // saved: target and compare-class of the address
  restore(saved) {
    this.target = this.find(saved.target)?.index ?? null;
    const second = saved["compare-class"] ?? this.list[1]?.index;
    fill($("compare-class"), this.list.map((word) => ({ text: word.name, value: String(word.index) })), second);
    this.show();
  }

  show() {
    $("answer").hidden = !this.list.length;
    $("answer").replaceChildren(...this.list.map((word) => this.button(word)));
    $("ask").hidden = !chosenModel().prompts;
  }

  button({ index, name }) {
    const button = make("button", { type: "button", textContent: name });
    button.ariaPressed = String(index === this.target);
    button.addEventListener("click", () => {
      this.target = index;
      for (const other of $("answer").children) other.ariaPressed = String(other === button);
      this.onChoice();
    });
    return button;
  }

  // Returns the parameters of a request for a word instead of a class.
  parameters(index) {
    return { word: index, prompt: this.prompt, answer: this.answer };
  }
}
