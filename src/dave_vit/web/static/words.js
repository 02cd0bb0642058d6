// A model that writes: the prompt, and its answer word by word.

import * as api from "./api.js";
import { chosenModel } from "./form.js";
import { $, fill, make, percent } from "./dom.js";
import { describeSources, shadeOf } from "./sources.js";

const LEGEND = "Shaded by the image's share of the evidence: violet for a word, orange against it. Underlined: not grounded in the image.";

export class Words {
  // onPrompt: called with a prompt; onChoice: called when another word is chosen; onTraced: called when it is known
  // where the words come from; page: what all panels share
  constructor(page, { onPrompt, onChoice, onTraced }) {
    Object.assign(this, { page, onChoice, onTraced });
    this.traced = []; // {text, probability, sources} of each word
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
    this.clear();
    const response = await api.generate(blob, { model: chosenModel().name, name, prompt: this.prompt }, signal, onBusy);
    this.answer = response.answer;
    this.list = response.words.map((word, number) => ({ index: number + 1, name: word }));
    this.trace(blob, name);
    return response;
  }

  // Forgets the answer.
  clear() {
    this.tracing?.abort();
    Object.assign(this, { list: [], traced: [], note: "" });
  }

  // Asks where the words come from; the answer is shown before that is known.
  async trace(blob, name) {
    const { signal } = (this.tracing = new AbortController());
    try {
      const options = { model: chosenModel().name, name, prompt: this.prompt, answer: this.answer };
      const traced = await api.sources(blob, options, signal);
      if (signal.aborted) return;
      this.traced = traced;
      this.note = traced.some(({ sources }) => sources) ? LEGEND : "This model cannot be decomposed exactly: its words have maps, but no sources.";
    } catch (error) {
      if (error.name === "AbortError") return;
      this.note = error.message;
    }
    this.mark();
    this.onTraced();
  }

  // Shades each word by the image's share, and underlines those that are not grounded in the image.
  mark() {
    $("answer-note").textContent = this.note ?? "";
    [...$("answer").children].forEach((button, number) => {
      const { probability, sources } = this.traced[number] ?? {};
      if (!sources) return;
      Object.assign(button.style, shadeOf(sources.image_share, this.page.colours.dave_signed));
      button.classList.toggle("ungrounded", !sources.grounded);
      button.title = `${percent(probability)} likely. ${describeSources(sources)}`;
    });
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
    this.mark();
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
