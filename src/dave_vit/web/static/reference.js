// The API page, made of openapi.json.

function make(tag, text = "", className = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className });
}

function list(entries) {
  const terms = make("dl");
  for (const [name, about] of entries) {
    const term = make("dt");
    term.append(make("code", name));
    terms.append(term, make("dd", about));
  }
  return terms;
}

function kind(schema = {}) {
  const kinds = (schema.anyOf ?? [schema]).filter((part) => part.type !== "null");
  return kinds.map((part) => (part.enum ? part.enum.join(" | ") : part.type ?? "")).join(" or ");
}

function parameter({ name, required, schema, description }) {
  const usual = String(schema?.default ?? "") && `default ${schema.default}`;
  const about = [description ?? schema?.description, kind(schema), required ? "required" : usual];
  return [name, about.filter(Boolean).join("; ")];
}

function example(verb, path, route) {
  const body = route.requestBody ? " --data-binary @cat.jpg" : "";
  return `curl${body} '${location.origin}${path}'`;
}

function card(path, verb, route) {
  const section = make("section", "", "card");
  const title = make("h2");
  title.append(make("span", verb.toUpperCase(), "verb"), " ", make("code", path));
  section.append(title, make("p", route.description ?? ""), make("pre", example(verb, path, route)));
  if (route.parameters?.length) section.append(make("h3", "Parameters"), list(route.parameters.map(parameter)));
  const answers = Object.entries(route.responses).map(([code, { description }]) => [code, description]);
  section.append(make("h3", "Answers"), list(answers));
  return section;
}

const { info, paths } = await (await fetch("/api/openapi.json")).json();
document.getElementById("about").textContent = `${info.description} Version ${info.version}.`;
for (const [path, routes] of Object.entries(paths))
  for (const [verb, route] of Object.entries(routes)) document.getElementById("routes").append(card(path, verb, route));
