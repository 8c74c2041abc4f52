// The state of a view as a page's address keeps it: what differs from where the page begins.

import { TRAITS } from "./state.js";

const whole = (text) => (/^\d{1,9}$/.test(text) ? Number(text) : undefined);
const yes = (text) => (text === "yes" ? true : text === "no" ? false : undefined);
const among = (...words) => (text) => (words.includes(text) ? text : undefined);
// How the text of each trait is read; undefined for nonsense.
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
};
const MAY_BE_NONE = ["token", "layer", "neuron", "limit", "layers"];

function written(value) {
  if (Array.isArray(value)) return value.join("-");
  return typeof value === "boolean" ? (value ? "yes" : "no") : String(value ?? "none");
}

export function addressOf(view, begin) {
  const pairs = TRAITS.map((name) => [name, written(view[name]), written(begin[name])]);
  const changed = pairs.filter(([, now, before]) => now !== before);
  return changed.map(([name, now]) => `${name}=${now}`).join("&");
}

// The view of an address. Where it says nothing, or nonsense, the view is as the page begins.
export function viewOf(address, begin) {
  const words = new URLSearchParams(address);
  const view = {};
  for (const name of TRAITS) {
    const text = words.get(name);
    const none = text === "none" && MAY_BE_NONE.includes(name);
    const value = text === null || none ? undefined : READ[name](text);
    view[name] = none ? null : (value ?? begin[name]);
  }
  return view;
}
