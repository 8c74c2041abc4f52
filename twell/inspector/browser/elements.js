// Helpers that make and replace the elements of the view.

const SVG = "http://www.w3.org/2000/svg";
const CONTROLS = "button, select, input";

// Make an element. The tag may have classes, as in "button.tw-close" or "svg:rect". Objects are
// attributes; null, undefined and false are skipped; everything else is a child. Text becomes text
// nodes, never HTML.
export function element(tag, ...parts) {
  const [name, ...classes] = tag.split(".");
  const node = name.startsWith("svg:")
    ? document.createElementNS(SVG, name.slice(4))
    : document.createElement(name);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const part of parts.flat(Infinity)) {
    if (part === null || part === undefined || part === false) continue;
    if (typeof part !== "object" || part instanceof Node) node.append(part);
    else assign(node, part);
  }
  return node;
}

function assign(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
}

export function button(classes, onclick, ...parts) {
  return element(`button${classes}`, { type: "button", onclick }, ...parts);
}

// A select of [value, name] pairs. choose(value) is called when the reader takes one.
export function select(label, pairs, chosen, choose, attributes = {}) {
  const options = pairs.map(([value, name]) =>
    element("option", { selected: value === chosen }, name),
  );
  const onchange = ({ target }) => choose(pairs[target.selectedIndex][0]);
  return element("select", { "aria-label": label, onchange, ...attributes }, options);
}

// Replace the children of a node if what it shows has changed. shown: a text that says what.
export function renew(parent, shown, build) {
  if (parent.shown === shown) return;
  parent.shown = shown;
  refill(parent, build());
}

// Replace the children of a node. The control that had the focus keeps it: it is found by its name,
// and by its place among controls of the same name. Text that is being typed is kept.
export function refill(parent, ...nodes) {
  const { activeElement: active } = parent.getRootNode();
  const nameOf = (node) => node.ariaLabel || node.title || node.textContent;
  const controls = () =>
    [...parent.querySelectorAll(CONTROLS)].filter((node) => nameOf(node) === nameOf(active));
  const place = active && parent.contains(active) ? controls().indexOf(active) : -1;
  parent.replaceChildren(...nodes.flat(Infinity).filter(Boolean));
  if (place < 0) return;
  const now = controls()[place];
  now?.focus({ preventScroll: true });
  if (now && typeof active.selectionStart === "number") {
    now.value = active.value;
    now.setSelectionRange(active.selectionStart, active.selectionEnd);
  }
}
