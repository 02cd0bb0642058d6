// The API page, built from openapi.json.

import { $, make } from "./dom.js";

const text = (tag, textContent, className = "") => make(tag, { textContent, className });

function definitionList(entries) {
  const items = entries.flatMap(([name, about]) => [make("dt", {}, text("code", name)), text("dd", about)]);
  return make("dl", {}, ...items);
}

function describeType(schema = {}) {
  const types = (schema.anyOf ?? [schema]).filter((part) => part.type !== "null");
  return types.map((part) => (part.enum ? part.enum.join(" | ") : part.type ?? "")).join(" or ");
}

function describeParameter({ name, required, schema, description }) {
  const fallback = String(schema?.default ?? "") && `default ${schema.default}`;
  const about = [description ?? schema?.description, describeType(schema), required ? "required" : fallback];
  return [name, about.filter(Boolean).join("; ")];
}

function example(path, route) {
  const body = route.requestBody ? " --data-binary @cat.jpg" : "";
  return `curl${body} '${location.origin}${path}'`;
}

function card(path, verb, route) {
  const title = make("h2", {}, text("span", verb.toUpperCase(), "verb"), " ", text("code", path));
  const section = make("section", { className: "card" }, title);
  section.append(text("p", route.description ?? ""), text("pre", example(path, route)));
  const parameters = (route.parameters ?? []).map(describeParameter);
  if (parameters.length) section.append(text("h3", "Parameters"), definitionList(parameters));
  const responses = Object.entries(route.responses).map(([code, { description }]) => [code, description]);
  section.append(text("h3", "Responses"), definitionList(responses));
  return section;
}

const { info, paths } = await (await fetch("/api/openapi.json")).json();
$("about").textContent = `${info.description} Version ${info.version}.`;
for (const [path, routes] of Object.entries(paths))
  for (const [verb, route] of Object.entries(routes)) $("routes").append(card(path, verb, route));
