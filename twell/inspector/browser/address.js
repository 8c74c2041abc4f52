// The state of a view and its search in the address of a page: what differs from the beginning.

import { SORTS, STATES, UPRIGHT, WHERE } from "./search.js";

const whole = (text) => (/^\d{1,9}$/.test(text) ? Number(text) : undefined);
const yes = (text) => ({ yes: true, no: false })[text];
const among = (...words) => (text) => (words.includes(text) ? text : undefined);
const key = (names) => among(...Object.keys(names));
const numbers = (text, sign, count) => {
  const ends = text.split(sign).map(Number);
  const rising = ends.every((end, n) => n % 2 === 0 || ends[n - 1] <= end);
  return ends.length === count && rising ? ends : undefined;
};
// How the text of each part is read; undefined for nonsense.
const READ = {
  side: whole,
  token: whole,
  layer: whole,
  neuron: whole,
  colour: among("count", "neuron", "surprise"),
  scale: among("all", "layer", "neuron"),
  limit: (text) => (Number(text) > 0 && Number(text) < Infinity ? Number(text) : undefined),
  layers: (text) => (/^\d+-\d+$/.test(text) ? numbers(text, "-", 2) : undefined),
  skip_first: yes,
  compression: whole,
  difference: yes,
  finding: yes,
  words: (text) => text,
  where: key(WHERE),
  within: whole,
  state: key(STATES),
  sort: key(SORTS),
  upright: key(UPRIGHT),
  box: (text) => numbers(text, "~", 4), // left, right, low, high
};
const MAY_BE_NONE = ["token", "layer", "neuron", "limit", "layers", "within", "box"];

function written(name, value) {
  if (Array.isArray(value)) return value.join(name === "box" ? "~" : "-");
  if (typeof value === "boolean") return value ? "yes" : "no";
  return encodeURIComponent(value ?? "none");
}

export function addressOf(view, begin) {
  const parts = Object.keys(begin).map((name) => [name, written(name, view[name])]);
  const changed = parts.filter(([name, text]) => text !== written(name, begin[name]));
  return changed.map((part) => part.join("=")).join("&");
}

// The view of an address. A part that is missing or nonsense is as in the beginning.
export function viewOf(address, begin) {
  const words = new URLSearchParams(address);
  const view = { ...begin };
  for (const name of Object.keys(begin)) {
    const text = words.get(name);
    if (text === "none" && MAY_BE_NONE.includes(name)) view[name] = null;
    else if (text !== null) view[name] = READ[name](text) ?? begin[name];
  }
  return view;
}
