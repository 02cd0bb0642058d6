// The choices as they stand in the address: behind the #, so that they never leave the browser.

export function readAddress() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

function format(choices) {
  const entries = Object.entries(choices).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  return entries.length ? `#${new URLSearchParams(entries)}` : "";
}

// Adds an entry to the browser's history, unless nothing changed; replace: overwrites the present entry.
export function writeAddress(choices, replace) {
  const hash = format(choices);
  if (hash === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", hash || location.pathname);
}
