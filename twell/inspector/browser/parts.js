// Small parts that several cards share.

import { button, element } from "./elements.js";
import { pieces } from "./words.js";

export function pill(text, special = false) {
  const classes = special ? "tw-pill.tw-special" : "tw-pill";
  return element(`span.${classes}`, { dir: "auto" }, pieces(text));
}

export function tokenPill(side, token) {
  return pill(side.text(token), side.isSpecial(token));
}

// A word with a number, and a smaller number beside it.
export function wordWith(classes, text, value, more, title) {
  const small = more && element("small", { title }, more);
  return element(`span.tw-word${classes}`, pill(text), element("b", value), small);
}

export function fact(name, value) {
  return element("div.tw-fact", element("span", name), element("b", value));
}

export function quiet(...parts) {
  return element("p.tw-quiet", ...parts);
}

// A control with a name before it.
export function labelled(name, ...controls) {
  return element("label.tw-group", element("span", name), controls);
}

// A box for a number. choose(number) is called when the reader has typed one, with null if the box
// was emptied.
export function numberBox(label, value, choose, attributes = {}) {
  return element("input.tw-number", {
    ...{ type: "number", step: "any", value: value ?? "", "aria-label": label, ...attributes },
    onchange: ({ target }) => choose(target.value === "" ? null : Number(target.value)),
  });
}

// A question mark that explains a label in one sentence; the view shows it at the pointer.
export function help(sentence) {
  const about = { "aria-label": "explanation", "aria-description": sentence };
  return element("button.tw-help", { type: "button", data: { help: sentence }, ...about }, "?");
}

export function closer(label, act) {
  return button(".tw-close", act, { "aria-label": label, title: label }, "\u00d7");
}

// A horizontal bar with a number on it. share: its length, from 0 to 1.
export function countBar(share, value, ...marks) {
  const bar = element("i", { style: { width: `${100 * share}%` } });
  return element("span.tw-count", bar, element("b", value), marks);
}
