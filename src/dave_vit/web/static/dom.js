// Short words for what every part of the page does.

export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// values: texts, or {text, value}
export function fill(select, values, chosen) {
  select.replaceChildren(...values.map((value) => new Option(value.text ?? value, value.value ?? value)));
  if (chosen !== undefined) select.value = chosen;
}

export function digits(value) {
  const size = Math.abs(value);
  return size === 0 ? "0" : size < 0.001 || size >= 10000 ? value.toExponential(2) : value.toPrecision(3);
}

export function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

// Scrolls to `place` where less than half of an element of it is seen.
export function bringIntoSight(element, place) {
  const box = element.getBoundingClientRect();
  const seen = Math.min(box.bottom, innerHeight) - Math.max(box.top, 0);
  if (seen < box.height / 2) place.scrollIntoView({ behavior: "smooth", block: "start" });
}
