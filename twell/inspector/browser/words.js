// Numbers as they are read.

const ENGLISH = new Intl.NumberFormat("en"); // toLocaleString makes one each time
const COMPACT = new Intl.NumberFormat("en", { notation: "compact" });
export const integer = (value) => ENGLISH.format(value);
export const compact = (value) => COMPACT.format(value); // such as 10K

export function number(value) {
  if (Number.isNaN(value)) return "NaN";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.001 || size >= 1e7) return value.toExponential(2);
  return size >= 1000 ? integer(Math.round(value)) : String(Number(value.toPrecision(3)));
}

export function range(first, last) {
  return Array.from({ length: last - first + 1 }, (_, n) => first + n);
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

export function powerOfTwo(value) {
  const size = Math.abs(value);
  const text = size > 0 && size < 1 && size > 0.001 ? `1/${1 / size}` : number(size);
  return (value < 0 ? MINUS : "") + text;
}

export const BYTES = /^(?:<0x[0-9A-F]{2}>)+$/;
