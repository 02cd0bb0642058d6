// The choices as a request to the server, and as they stand in the address.

import { chosenModel, isChanged, optionNames, readOptions } from "./form.js";
import { $ } from "./dom.js";
import { changedDisplay } from "./display.js";

// Returns everything that differs from what the page shows at first.
export function readChoices({ info, blob, image }, classes, words) {
  const choices = { image };
  if (chosenModel() !== info.models[0]) choices.model = chosenModel().name;
  if (chosenModel().writes) Object.assign(choices, { prompt: words.prompt, target: words.target });
  else if (blob && classes.target !== classes.list[0]?.index) choices.target = classes.target;
  if ($("fit").value) choices.fit = $("fit").value;
  if ($("against").value) choices.against = $("against").value;
  if ($("method").value !== "dave") choices.method = $("method").value;
  for (const name of optionNames()) if (isChanged(name)) choices[name] = $(name).value;
  if ($("compare").checked) Object.assign(choices, readComparison());
  return Object.assign(choices, changedDisplay());
}

function readComparison() {
  const choices = { compare: $("compare-show").value };
  for (const name of ["compare-class", "compare-method"]) choices[name] = $(name).value;
  if ($("compare-model").value !== $("model").value) choices["compare-model"] = $("compare-model").value;
  return choices;
}

// Returns the request of the first panel or the second one; null if nothing is to be explained yet.
export function buildRequest(number, { blob, name, image }, classes, words) {
  const source = chosenModel().writes ? words : classes;
  const target = number ? $("compare-class").value : source.target;
  if (target === null) return null; // no word was chosen yet
  const title = source.find(target)?.name ?? target;
  const method = $(number ? "compare-method" : "method").value;
  const model = $(number ? "compare-model" : "model").value;
  const sameModel = model === $("model").value;
  const what = chosenModel().writes ? words.parameters(target) : classParameters(target, sameModel, classes);
  return { blob, image, options: { model, name, method, ...what, ...readOptions(method) }, title };
}

// Whether the visible panels show or compute what is chosen: a field reports its change only when it loses focus, and
// by then an image that came meanwhile may have been explained with it.
export function isUpToDate(panels, state, classes, words) {
  const matches = (panel, number) => {
    const request = buildRequest(number, state, classes, words);
    return Boolean(request) && panel.answers(request);
  };
  const visible = panels.filter((panel) => panel.root.isConnected);
  return visible.length > 0 && visible.every(matches);
}

// sameModel: whether the classes of the page are this model's; other models number theirs differently
function classParameters(target, sameModel, classes) {
  const reference = (index) => (sameModel ? index : (classes.find(index)?.name ?? index));
  // no class is compared with itself: the other way round
  const against = $("against").value === String(target) ? classes.target : $("against").value;
  const fit = $("fit").value ? { fit: $("fit").value } : {};
  return { target: reference(target), ...fit, ...(against === "" ? {} : { against: reference(against) }) };
}
