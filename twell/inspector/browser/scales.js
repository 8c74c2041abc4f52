// Which values colour a passage and its map, by which scale, and the legend of a scale.

import { makeScale } from "./colours.js";
import { element, refill } from "./elements.js";
import { help } from "./parts.js";
import { number, signed } from "./words.js";

export const ABOUT_H =
  "h is the value of a neuron for a token: the neuron adds h times its column of the down " +
  "projection to the output of its layer.";

// What can colour a passage: the kind of its scale, its label, and the value of each token.
const WAYS = {
  count: {
    kind: "log",
    label: (state, side) => `active neurons per token, ${layersOf(state.range(side), side)}`,
    values: (state, side) => side.means(...state.range(side)),
  },
  surprise: {
    kind: "linear",
    label: () => "surprise, \u2212log p in nats",
    values: (state, side) => side.surprise,
  },
  neuron: {
    kind: "signed",
    label: (state, side) => {
      const { layer, neuron } = state.shownNeuron(side);
      return `h of layer ${layer}, neuron ${neuron}`;
    },
    values: (state, side) => {
      const { layer, neuron } = state.shownNeuron(side);
      return side.valuesOf(layer, neuron);
    },
  },
};

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
  const way = WAYS[how];
  const skip = state.get("skip_first");
  const read = (one) => {
    const values = way.values(state, one);
    return one.included((token) => values[token], skip);
  };
  const label = way.label(state, side);
  const limit = state.scaling(how) === "all" ? state.get("limit") : null;
  const scaled = (kind, arrays, name) => {
    const [least, largest] = extent(arrays);
    return makeScale(kind, [least, limit || largest], name, state.ramps);
  };
  const values = read(side);
  const left = state.reference(side);
  if (left && (how !== "neuron" || state.shares(left, side))) {
    const before = read(left);
    const change = values.map((value, token) => value - before[token]);
    return { values: change, scale: scaled("signed", [change], changeOf(left, label)) };
  }
  return { values, scale: scaled(way.kind, sharing(state, side, how, read), label) };
}

// The values of all tokens that share the scale of a side.
function sharing(state, side, how, read) {
  const scaling = state.scaling(how);
  if (how !== "neuron") return (scaling === "all" ? state.sides : [side]).map(read);
  if (scaling === "neuron") return state.sharing(side).map(read);
  const skip = state.get("skip_first");
  const peaks = (one) => (layer) => one.included((token) => one.peaks(layer)[token], skip);
  const { layer } = state.shownNeuron(side);
  if (scaling === "layer") return state.sharing(side).map((one) => peaks(one)(layer));
  return state.sides.flatMap((one) => Array.from({ length: one.L }, (_, n) => peaks(one)(n)));
}

const changeOf = (left, name) => `difference to ${left.about.name}: ${name}`;

// The values of the map, one array a layer (NaN: left out), and the scale of each layer.
export function mapColours(state, side) {
  const skip = state.get("skip_first");
  const left = state.reference(side);
  const label = "active neurons per token";
  const before = (layer, token) => (left && layer < left.L ? left.count(layer, token) : 0);
  const layersFrom = ([first, last]) =>
    Array.from({ length: last - first + 1 }, (_, n) => first + n);
  const layers = layersFrom(state.range(side));
  const counts = (one, layer) => one.included((token) => one.count(layer, token), skip);
  const change = (layer) =>
    side.included((token) => side.count(layer, token) - before(layer, token), skip);
  const values = layers.map((layer) => (left ? change(layer) : counts(side, layer)));
  if (left) {
    const shared = makeScale("signed", extent(values), changeOf(left, label), state.ramps);
    return { values, scales: layers.map(() => shared) };
  }
  const shown = state.sides.filter((one) => one.T);
  if (state.get("scale") === "layer") {
    const scale = (layer) => {
      const having = shown.filter((one) => layer < one.L);
      const ends = extent(having.map((one) => counts(one, layer)));
      return makeScale("log", ends, `${label}, each layer on its own`, state.ramps);
    };
    return { values, scales: layers.map(scale) };
  }
  const every = shown.flatMap((one) => layersFrom(state.range(one)).map((n) => counts(one, n)));
  const [least, largest] = extent(every);
  const limit = state.get("colour") === "count" && state.get("limit");
  const shared = makeScale("log", [least, limit || largest], label, state.ramps);
  return { values, scales: layers.map(() => shared) };
}

// own: each layer has a scale of its own, so that the ends have no common value.
export function showLegend(box, scale, { own = false, notes = [] } = {}) {
  const gradient = scale.ramp.gradient((t) => scale.index(scale.at(t)));
  const text = (v) => (scale.kind === "signed" && v ? signed(v) : number(v));
  const ends = [0, 0.5, 1].map((t) => text(scale.at(t)));
  const ticks = own ? ["least", "", "most"] : ends;
  refill(
    box,
    element("span.tw-label", scale.label, scale.label.startsWith("h of") && help(ABOUT_H)),
    element(
      "span.tw-scale",
      element("span.tw-gradient", { style: { background: gradient } }),
      element("span.tw-ticks", ticks.map((tick) => element("span", tick))),
    ),
    notes,
  );
}
