// Numbers and the text of tokens, as they are read.

import { element } from "./elements.js";

const ENGLISH = new Intl.NumberFormat("en"); // toLocaleString makes one each time
export const integer = (value) => ENGLISH.format(value);

export function number(value) {
  if (Number.isNaN(value)) return "NaN";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.001 || size >= 1e7) return value.toExponential(2);
  return size >= 1000 ? integer(Math.round(value)) : String(Number(value.toPrecision(3)));
}

const MINUS = "\u2212"; // as wide as a plus

// The same number of digits everywhere in a column, with a sign.
export function signed(value, digits = 3) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  const text = size >= 0.001 && size < 1000 ? size.toPrecision(digits) : number(size);
  return (value < 0 ? MINUS : "+") + text;
}

export function percent(fraction) {
  const value = 100 * fraction;
  if (value === 0) return "0%";
  if (value < 0.01) return "<0.01%";
  return `${value.toFixed(value >= 9.95 ? 0 : value >= 0.095 ? 1 : 2)}%`;
}

export function plural(count, word) {
  return `${integer(count)} ${word}${count === 1 ? "" : "s"}`;
}

export function superscript(exponent) {
  const digits = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079";
  return String(exponent).replace("-", "\u207b").replace(/\d/g, (digit) => digits[digit]);
}

// Powers of two as one writes them: 1/16, 4, -32, 2 to the -12.
export function powerOfTwo(value) {
  const size = Math.abs(value);
  const exponent = Math.log2(size);
  let text = size < 1 && size ? `1/${1 / size}` : String(size);
  if (size && (exponent > 12 || exponent < -8)) text = `2${superscript(exponent)}`;
  return (value < 0 ? MINUS : "") + text;
}

export const BYTES = /^(?:<0x[0-9A-F]{2}>)+$/;
export const PLAIN = /^[ \p{L}\p{N}\p{P}\p{S}]+$/u; // shows itself
// Would not be seen, or would move other text: controls, format characters, separators, white space
// but the space itself.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\p{Zl}\p{Zp}\uFEFF]|(?! )\p{Zs}/u;
const JOINERS = /[\u200d\ufe0f]/; // of emoji and letters

// The text of a token as nodes in which everything can be seen. breaks: a line of text ends at a
// newline. The font shows spaces (dots.css).
export function pieces(text, breaks = false) {
  if (BYTES.test(text)) return [element("span.tw-bytes", text)];
  if (PLAIN.test(text)) return [text];
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  const mark = (name, shown) => {
    flush();
    nodes.push(element(`span.${name}`, shown));
  };
  const characters = [...text];
  characters.forEach((character, at) => {
    if (character === "\n") {
      mark("tw-mark", "\u23ce");
      if (breaks && at < characters.length - 1) nodes.push(element("br"));
    } else if (character === "\t") mark("tw-mark", "\u21e5\u00a0\u00a0");
    else if (HIDDEN.test(character) && !(plain && JOINERS.test(character))) {
      const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      mark("tw-bytes", `U+${code}`);
    } else plain += character;
  });
  flush();
  if (!nodes.length) mark("tw-bytes", "empty");
  return nodes;
}

const RIGHT_TO_LEFT =
  /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/gu;

export function direction(text) {
  const right = (text.match(RIGHT_TO_LEFT) ?? []).length;
  return right && 2 * right > (text.match(/\p{L}/gu) ?? []).length ? "rtl" : "ltr";
}
