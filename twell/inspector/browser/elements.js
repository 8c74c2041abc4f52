// One helper makes every element of the view.

const SVG = "http://www.w3.org/2000/svg";

// A tag with classes, "button.tw-close" or "svg:rect". An object is attributes; null, undefined and
// false are left out; everything else is a child. Text becomes text nodes, never HTML.
export function element(tag, ...parts) {
  const [name, ...classes] = tag.split(".");
  const node = name.startsWith("svg:")
    ? document.createElementNS(SVG, name.slice(4))
    : document.createElement(name);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const part of parts.flat()) {
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

// Make these the children of a node. What is there already stays: it keeps its focus and its layout.
export function fill(parent, nodes) {
  for (const node of [...parent.childNodes]) if (!nodes.includes(node)) node.remove();
  nodes.forEach((node, n) => {
    if (parent.childNodes[n] !== node) parent.insertBefore(node, parent.childNodes[n] ?? null);
  });
}
