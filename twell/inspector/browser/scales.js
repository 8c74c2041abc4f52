// Which values colour a passage and its map, by which scale, and the legend of a scale.

import { makeScale } from "./colours.js";
import { range } from "./data.js";
import { element, help, renew } from "./elements.js";
import { number, signed } from "./words.js";

export const ABOUT_H =
  "h is the value of a neuron for a token: the neuron adds h times its column of the down " +
  "projection to the output of its layer.";

// What colours a passage: the kind of its scale, its label, and the value of each token.
function wayOf(state, side, how) {
  if (how === "surprise")
    return { kind: "linear", label: "surprise, \u2212log p in nats", values: side.surprise };
  if (how === "count") {
    const label = `active neurons per token, ${layersOf(state.range(side), side)}`;
    return { kind: "log", label, values: side.means(...state.range(side)) };
  }
  const { layer, neuron } = state.shownNeuron(side);
  const label = `h of layer ${layer}, neuron ${neuron}`;
  return { kind: "signed", label, values: side.valuesOf(layer, neuron) };
}

function layersOf([first, last], side) {
  if (first === last) return `layer ${first}`;
  const all = first === 0 && last === side.L - 1;
  return all ? "mean over layers" : `mean over layers ${first}\u2013${last}`;
}

// The least size above 0 and the largest of several arrays of values. NaN does not count.
function extent(arrays) {
  let [least, largest] = [Infinity, 0];
  for (const values of arrays)
    for (const value of values) {
      const size = Math.abs(value);
      if (size > 0 && size < least) least = size;
      if (size > largest) largest = size;
    }
  return [least, largest];
}

// The value of each token of a passage (NaN: left out) and their scale.
export function passageColours(state, side) {
  const how = state.colouring(side);
  const read = (one) => {
    const { values } = wayOf(state, one, how);
    return included(state, one, (token) => values[token]);
  };
  const { kind, label } = wayOf(state, side, how);
  const values = read(side);
  const limit = state.scaling(how) === "all" && state.get("limit");
  const left = state.reference(side);
  if (!left || (how === "neuron" && !state.shares(left, side)))
    return { values, scale: scaleOf(state, kind, label, sharing(state, side, how, read), limit) };
  const before = read(left);
  const change = values.map((value, token) => value - before[token]);
  const name = changeOf(left, label);
  return { values: change, scale: scaleOf(state, "signed", name, [change], limit) };
}

// One value a token as a row of numbers; NaN for the tokens that are left out.
export function included(state, side, valueOf) {
  const skip = state.get("skip_first");
  const value = (_, token) => (skip && !side.position[token] ? NaN : valueOf(token));
  return Float32Array.from({ length: side.T }, value);
}

function scaleOf(state, kind, label, arrays, limit) {
  const [least, largest] = extent(arrays);
  return makeScale(kind, [least, limit || largest], label, state.ramps);
}

function sharing(state, side, how, read) {
  const scaling = state.scaling(how);
  if (how !== "neuron") return (scaling === "all" ? state.sides : [side]).map(read);
  if (scaling === "neuron") return state.sharing(side).map(read);
  const peaks = (one, layer) => included(state, one, (token) => one.peaks(layer)[token]);
  const { layer } = state.shownNeuron(side);
  if (scaling === "layer") return state.sharing(side).map((one) => peaks(one, layer));
  return state.sides.flatMap((one) => range(0, one.L - 1).map((n) => peaks(one, n)));
}

const changeOf = (left, name) => `difference to ${left.about.name}: ${name}`;

// The values of the map, one array a layer (NaN: left out), and the scale of each layer.
export function mapColours(state, side) {
  const label = "active neurons per token";
  const counts = (one, layer) => included(state, one, (token) => one.count(layer, token));
  const layers = range(...state.range(side));
  const left = state.reference(side);
  if (left) {
    const before = (layer, token) => (layer < left.L ? left.count(layer, token) : 0);
    const change = (layer) =>
      included(state, side, (token) => side.count(layer, token) - before(layer, token));
    const values = layers.map(change);
    const shared = scaleOf(state, "signed", changeOf(left, label), values);
    return { values, scales: layers.map(() => shared) };
  }
  const values = layers.map((layer) => counts(side, layer));
  const shown = state.sides.filter((one) => one.T);
  if (state.get("scale") === "layer") {
    const own = (layer) => shown.filter((one) => layer < one.L).map((one) => counts(one, layer));
    const name = `${label}, each layer on its own`;
    return { values, scales: layers.map((layer) => scaleOf(state, "log", name, own(layer))) };
  }
  const every = shown.flatMap((one) => range(...state.range(one)).map((n) => counts(one, n)));
  const limit = state.get("colour") === "count" && state.get("limit");
  const shared = scaleOf(state, "log", label, every, limit);
  return { values, scales: layers.map(() => shared) };
}

// own: each layer has a scale of its own, so that the ends have no common value.
export function showLegend(box, scale, own = false, note = "") {
  const background = scale.ramp.gradient((t) => scale.index(scale.at(t)));
  const text = (v) => (scale.kind === "signed" && v ? signed(v) : number(v));
  const ticks = own ? ["least", "", "most"] : [0, 0.5, 1].map((t) => text(scale.at(t)));
  const build = () =>
    element(
      "div.tw-legend",
      element("span", scale.label, scale.label.startsWith("h of") && help(ABOUT_H)),
      element(
        "span.tw-scale",
        element("span.tw-gradient", { style: { background } }),
        element("span.tw-ticks", ticks.map((tick) => element("span", tick))),
      ),
      note && element("span.tw-overs", note),
    );
  renew(box, [["legend", [scale.label, background, note, ...ticks].join(), build]]);
}
