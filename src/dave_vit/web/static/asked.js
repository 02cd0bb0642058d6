// What is asked for: as it stands in the address, and as the server is told.

import { OPTIONS, changed, model, options } from "./choices.js";
import { $ } from "./dom.js";
import { lookSaid } from "./look.js";

// All that differs from what the page shows at first.
export function choices({ info, blob, image }, classes, words) {
  const said = { image };
  if (model() !== info.models[0]) said.model = model().name;
  if (model().writes) Object.assign(said, { prompt: words.prompt, target: words.target });
  else if (blob && classes.target !== classes.list[0]?.index) said.target = classes.target;
  if ($("against").value) said.against = $("against").value;
  if ($("method").value !== "dave") said.method = $("method").value;
  for (const name of OPTIONS) if (changed(name)) said[name] = $(name).value;
  if ($("compare").checked) Object.assign(said, compared());
  return Object.assign(said, lookSaid());
}

function compared() {
  const said = { compare: $("compare-show").value };
  for (const name of ["compare-class", "compare-method"]) said[name] = $(name).value;
  if ($("compare-model").value !== $("model").value) said["compare-model"] = $("compare-model").value;
  return said;
}

// The request of the first panel or the second one; null where there is nothing to ask for.
export function requestOf(number, { blob, name }, classes, words) {
  const asked = model().writes ? words : classes;
  const wanted = number ? $("compare-class").value : asked.target;
  if (wanted === null) return null; // no word was chosen yet
  const title = asked.named(wanted)?.name ?? wanted;
  const method = $(number ? "compare-method" : "method").value;
  const chosen = $(number ? "compare-model" : "model").value;
  const about = model().writes ? words.said(wanted) : aboutClass(wanted, chosen === $("model").value, classes);
  return { blob, options: { model: chosen, name, method, ...about, ...options(method) }, title };
}

// Whether the panels that are shown have the map of what is chosen, or wait for it: a field tells of its change only
// when it is left, and by then an image that came meanwhile may have been explained with it.
export function answered(panels, state, classes, words) {
  const asked = (panel, number) => {
    const request = requestOf(number, state, classes, words);
    return Boolean(request) && panel.answers(request);
  };
  const shown = panels.filter((panel) => panel.root.isConnected);
  return shown.length > 0 && shown.every(asked);
}

// same: whether it is asked of the model whose classes are shown; others number theirs otherwise
function aboutClass(wanted, same, classes) {
  const told = (index) => (same ? index : (classes.named(index)?.name ?? index));
  // no class is set against itself: the other way round
  const against = $("against").value === String(wanted) ? classes.target : $("against").value;
  return { target: told(wanted), ...(against === "" ? {} : { against: told(against) }) };
}
