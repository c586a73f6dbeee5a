// Elements. Texts of the engine only ever become text nodes, so markup in them stays a text.

export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) node.setAttribute(key, value);
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const shown = new WeakMap();

/** Build the children of `parent` anew, but only if `data` has changed: a selection and the focus stay. */
export function show(parent, data, build) {
  const text = JSON.stringify(data);
  if (shown.get(parent) === text) return;
  shown.set(parent, text);
  parent.replaceChildren(...build());
}

/** The head and the rows of a table. `rows` are lists of cells; the first cell of each names the row. */
export function table(heads, rows) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  const body = rows.map(([first, ...cells]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...cells.map((cell) => element("td", {}, cell))));
  return [element("thead", {}, head), element("tbody", {}, ...body)];
}

/** Pairs of a name and a value, as the children of a `dl`. */
export function pairs(entries) {
  return entries.map(([name, value, kind]) =>
    element("div", kind ? { class: kind } : {}, element("dt", {}, name), element("dd", {}, value)));
}

export function lines(...parts) {
  const node = document.createElement("div");
  for (const part of parts.filter((one) => one !== "")) node.append(element("div", {}, part));
  return node;
}
