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

export function fact(name, value) {
  return element("div.tw-fact", element("span", name), element("b", value));
}

// A question mark that explains a label in one sentence; the view shows it at the pointer.
export function help(sentence) {
  return element(
    "button.tw-help",
    {
      type: "button",
      "aria-label": "explanation",
      "aria-description": sentence,
      data: { help: sentence },
    },
    "?",
  );
}

export function closer(label, act) {
  return button(".tw-close", act, { "aria-label": label, title: label }, "\u00d7");
}
