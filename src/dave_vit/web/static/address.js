// What is chosen, as it stands in the address: behind the #, so that it never leaves the browser.

export function read() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

export function text(choices) {
  const said = Object.entries(choices).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  return said.length ? `#${new URLSearchParams(said)}` : "";
}

// A new entry for Back, unless nothing changed; replace: in the place of the present one.
export function write(choices, replace) {
  const wanted = text(choices);
  if (wanted === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", wanted || location.pathname);
}
