// The state of a view and its search as an address keeps it: what differs from where it begins.

import { SORTS, STATES, UPRIGHT, WHERE } from "./search.js";

const whole = (text) => (/^\d{1,9}$/.test(text) ? Number(text) : undefined);
const yes = (text) => (text === "yes" ? true : text === "no" ? false : undefined);
const among = (...words) => (text) => (words.includes(text) ? text : undefined);
const key = (names) => among(...Object.keys(names));
// How the text of each part is read; undefined for nonsense.
const READ = {
  side: whole,
  token: whole,
  layer: whole,
  neuron: whole,
  colour: among("count", "neuron", "surprise"),
  scale: among("all", "layer", "neuron"),
  limit: (text) => (Number(text) > 0 && Number(text) < Infinity ? Number(text) : undefined),
  layers: (text) => {
    const range = text.split("-").map(whole);
    return range.length === 2 && range[0] <= range[1] ? range : undefined;
  },
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
  box: (text) => {
    const ends = text.split("~").map(Number);
    const [left, right, low, high] = ends;
    return ends.length === 4 && left <= right && low <= high ? ends : undefined;
  },
};
const MAY_BE_NONE = ["token", "layer", "neuron", "limit", "layers", "within", "box"];

function written(name, value) {
  if (Array.isArray(value)) return value.join(name === "box" ? "~" : "-");
  if (typeof value === "boolean") return value ? "yes" : "no";
  return encodeURIComponent(value ?? "none");
}

export function addressOf(view, begin) {
  const names = Object.keys(begin);
  const pairs = names.map((name) => [name, ...[view, begin].map((one) => written(name, one[name]))]);
  const changed = pairs.filter(([, now, before]) => now !== before);
  return changed.map(([name, now]) => `${name}=${now}`).join("&");
}

// The view of an address. Where it says nothing, or nonsense, the view is as the page begins.
export function viewOf(address, begin) {
  const words = new URLSearchParams(address);
  const view = {};
  for (const name of Object.keys(begin)) {
    const text = words.get(name);
    const none = text === "none" && MAY_BE_NONE.includes(name);
    const value = text === null || none ? undefined : READ[name](text);
    view[name] = none ? null : (value ?? begin[name]);
  }
  return view;
}
