// The API as openapi.json describes it, and a way to try it. Everything is written as text, nothing as markup, and all
// addresses are relative: the page works under any path, and without a network beyond this server.

const NAME = "cllm-api-key";
const byId = (id) => document.getElementById(id);
const headers = () => {
  const key = sessionStorage.getItem(NAME);
  return key ? { authorization: `Bearer ${key}` } : {};
};

function make(name, content = [], properties = {}) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...[content].flat());
  return element;
}

/** What `$ref` stands for. */
function resolve(api, schema) {
  let found = schema ?? {};
  while (found.$ref) found = found.$ref.split("/").slice(1).reduce((part, name) => part?.[name], api) ?? {};
  return found;
}

function typeOf(api, schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((each) => typeOf(api, each)).filter((type) => type !== "null").join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.type === "array") return `list of ${typeOf(api, schema.items ?? {})}`;
  return schema.type ?? "anything";
}

function table(api, rows) {
  const head = make("tr", ["name", "type", "meaning"].map((title) => make("th", title)));
  const lines = rows.map(({ name, schema, required, description }) =>
    make("tr", [
      make("td", make("code", required ? `${name} (required)` : name)),
      make("td", typeOf(api, schema)),
      make("td", description ?? schema.description ?? ""),
    ]));
  return make("table", [make("thead", head), make("tbody", lines)]);
}

async function send(method, path, body, output) {
  output.hidden = false;
  output.textContent = "…";
  const sent = { method, headers: { ...headers() } };
  if (body !== null) {
    sent.headers["content-type"] = "application/json";
    sent.body = body;
  }
  try {
    const response = await fetch(path.slice(1), sent);
    output.textContent = `${response.status}\n`;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) output.append(piece.value);
  } catch (error) {
    output.textContent = String(error);
  }
}

function operationOf(api, path, method, operation) {
  const parts = [];
  if (operation.description) parts.push(make("p", operation.description));
  const parameters = (operation.parameters ?? []).map((each) => ({ ...each, schema: each.schema ?? {} }));
  if (parameters.length) parts.push(table(api, parameters));
  const reference = operation.requestBody?.content?.["application/json"]?.schema;
  const schema = resolve(api, reference);
  const body = reference
    ? make("textarea", [], { value: JSON.stringify(schema.example ?? {}, null, 2), ariaLabel: "Body" })
    : null;
  if (reference) {
    const required = new Set(schema.required ?? []);
    const rows = Object.entries(schema.properties ?? {})
      .map(([name, each]) => ({ name, schema: each, required: required.has(name) }));
    parts.push(table(api, rows), body);
  }
  const address = make("input", [], { value: path, ariaLabel: "Path", size: 40 });
  const output = make("pre", [], { hidden: true });
  const button = make("button", "Send", { type: "button" });
  button.addEventListener("click", () => send(method.toUpperCase(), address.value, body ? body.value : null, output));
  parts.push(make("p", [address, " ", button]), output);
  const title = make("summary", [make("span", method.toUpperCase(), { className: "method" }), make("code", path)]);
  return make("details", [title, make("div", parts, { className: "body" })], { id: `${method} ${path}` });
}

function show(api) {
  byId("title").textContent = `${api.info.title} ${api.info.version}`;
  byId("description").textContent = api.info.description ?? "";
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags?.[0] ?? "Others";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(operationOf(api, path, method, operation));
    }
  }
  byId("operations").replaceChildren(
    ...[...groups].map(([tag, operations]) => make("section", [make("h2", tag), ...operations])));
}

async function load() {
  const response = await fetch("openapi.json", { headers: headers() });
  byId("key-form").hidden = response.status !== 401;
  if (response.status === 401) {
    byId("key-error").textContent = sessionStorage.getItem(NAME) ? "The server does not take this key." : "";
  } else if (response.ok) {
    show(await response.json());
  } else {
    byId("description").textContent = `The server answered ${response.status}.`;
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(NAME, byId("key").value);
  load();
});
load();
