// Helpers for elements and numbers, shared by the page and the notebook widget.

export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// choices: texts, or {text, value}; selected: a value
export function fill(select, choices, selected) {
  select.replaceChildren(...choices.map((choice) => new Option(choice.text ?? choice, choice.value ?? choice)));
  if (selected !== undefined) select.value = selected;
}

export function digits(value) {
  const size = Math.abs(value);
  return size === 0 ? "0" : size < 0.001 || size >= 10000 ? value.toExponential(2) : value.toPrecision(3);
}

export function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

// Scrolls to `container` if less than half of an element in it is visible.
export function scrollIfHidden(element, container) {
  const box = element.getBoundingClientRect();
  const visible = Math.min(box.bottom, innerHeight) - Math.max(box.top, 0);
  if (visible < box.height / 2) container.scrollIntoView({ behavior: "smooth", block: "start" });
}
