// Helpers that make and replace the elements of the view, and small parts that several cards share.

import morphdom from "morphdom";

import { BYTES, signed } from "./words.js";

const HANDLERS = ["onclick", "onchange", "oninput", "onpointerenter", "onpointerleave"];

// Make an element. The tag may have classes, as in "button.tw-close". Objects are attributes; null,
// undefined and false are skipped; everything else is a child. Text becomes text nodes, never HTML.
export function element(tag, ...parts) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name);
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
    if (name.startsWith("on")) node[name] = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
}

// Draw the children of a node again where they changed. parts: of each child a name, a text that
// says what it shows, and a function that builds it.
export function renew(parent, parts) {
  const names = parts.map(([name]) => name);
  for (const child of [...parent.children]) if (!names.includes(child.named)) child.remove();
  parts.forEach(([named, shown, build], n) => {
    let node = [...parent.children].find((child) => child.named === named);
    if (node?.shown !== shown) node = node ? patch(node, build()) : build();
    Object.assign(node, { named, shown });
    if (parent.children[n] !== node) parent.insertBefore(node, parent.children[n] ?? null);
  });
}

// Make a node like a new one and return the node in its place. Elements stay, so that the focus, a
// press of the mouse, an open explanation and text that is being typed outlast a drawing. `data-of`
// says what an element belongs to: for something else it is replaced, and scrolls from its start.
function patch(old, fresh) {
  return morphdom(old, fresh, {
    getNodeKey: (node) => node.dataset?.of,
    onBeforeElUpdated(from, to) {
      for (const name of HANDLERS) from[name] = to[name];
      const typed = to.matches("input, textarea") && from.defaultValue === to.defaultValue;
      if (typed) to.value = from.value;
    },
  });
}

export function button(classes, onclick, ...parts) {
  return element(`button${classes}`, { type: "button", onclick }, ...parts);
}

// A select of [value, name] pairs. choose(value, select) is called when the reader takes one.
export function select(label, pairs, chosen, choose) {
  const options = pairs.map(([value, name]) =>
    element("option", { selected: value === chosen }, name),
  );
  const onchange = ({ target }) => choose(pairs[target.selectedIndex][0], target);
  return element("select", { "aria-label": label, onchange }, options);
}

// Would not be seen, or would move other text: controls, format characters, separators, white space
// but the space itself. Joiners inside emoji and words stay.
const HIDDEN = /((?!(?<=\S)\u200d)[\p{Cc}\p{Cf}\p{Co}\p{Zl}\p{Zp}]|(?! )\p{Zs})/u;

// The text of a token as nodes in which everything can be seen. breaks: a line of text ends at a
// newline. The font shows spaces (passage.css).
export function pieces(text, breaks = false) {
  if (BYTES.test(text)) return [element("span.tw-bytes", text)];
  if (!text) return [element("span.tw-bytes", "empty")];
  if (!HIDDEN.test(text)) return [text];
  const parts = text.split(HIDDEN).filter(Boolean);
  return parts.flatMap((part, n) => {
    if (part === "\n") {
      const ends = breaks && n < parts.length - 1;
      return [element("span.tw-mark", "\u23ce"), ...(ends ? [element("br")] : [])];
    }
    if (part === "\t") return element("span.tw-mark", "\u21e5\u00a0\u00a0");
    if (!HIDDEN.test(part)) return part;
    const code = part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    return element("span.tw-bytes", `U+${code}`);
  });
}

export function pill(text, special = false) {
  const classes = special ? "tw-pill.tw-special" : "tw-pill";
  return element(`span.${classes}`, { dir: "auto" }, pieces(text));
}

// A number with its sign, in the colour of it.
export function signedText(value, digits) {
  return element(value < 0 ? "b.tw-minus" : "b.tw-plus", signed(value, digits));
}

export function wordWith(text, value, classes = "", attributes = {}) {
  return element(`span.tw-word${classes}`, attributes, pill(text), " ", element("b", value));
}

export function fact(name, value) {
  return element("div.tw-fact", element("span", name), element("b", value));
}

export function quiet(...parts) {
  return element("p.tw-quiet", ...parts);
}

export function labelled(name, ...controls) {
  return element("label.tw-group", { data: { of: name } }, name, controls);
}

// A box for a number. choose(number) is called when the reader has typed one, with null if the box
// was emptied.
export function numberBox(label, value, choose, attributes = {}) {
  return element("input.tw-number", {
    ...{ type: "number", step: "any", value: value ?? "", "aria-label": label },
    onchange: ({ target }) => choose(target.value === "" ? null : Number(target.value)),
    ...attributes,
  });
}

// A question mark that explains a label in one sentence: below the pointer, or in a box when it is
// pressed.
export function help(sentence) {
  const show = ({ currentTarget }) => currentTarget.nextElementSibling.togglePopover();
  return [
    button(".tw-help", show, { title: sentence, "aria-label": sentence }, "?"),
    element("div.tw-tip", { popover: "auto" }, sentence),
  ];
}

export function closer(label, act) {
  return button(".tw-close", act, { "aria-label": label, title: label }, "\u00d7");
}

// A table of rows that are buttons (".tw-item"). columns: their widths; names: their titles.
export function table(columns, names, rows) {
  const head = element("div.tw-item.tw-names", names.map((name) => element("span", name)));
  return element("div.tw-table", { style: { gridTemplateColumns: columns } }, head, rows);
}

export function chip(name, value, digits, attributes) {
  const parts = [element("span", name), signedText(value, digits)];
  return element("button.tw-chip", { type: "button" }, attributes, parts);
}

// A horizontal bar with a number on it. share: its length, from 0 to 1.
export function countBar(share, value) {
  const style = { backgroundSize: `${100 * share}% 100%` };
  return element("span.tw-count", { style }, value);
}

// A bar from the middle to the right or, below 0, to the left. share: from -1 to 1.
export function signedBar(share) {
  const [wide, left] = [50 * Math.abs(share), share < 0 ? 50 + 50 * share : 50];
  const place = `${(100 * left) / (100 - wide)}%`; // as CSS counts: of the space that is left over
  const style = { backgroundSize: `${wide}% 100%`, backgroundPositionX: place };
  return element(`span.tw-both.${share < 0 ? "tw-minus" : "tw-plus"}`, { style });
}
