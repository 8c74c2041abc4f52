// Which values colour a passage and its map, by which scale, and the legend of a scale.

import { makeScale } from "./colours.js";
import { strongestOf } from "./data.js";
import { element } from "./elements.js";
import { help } from "./parts.js";
import { number, signed } from "./words.js";

const PALEST = 1e-30; // an active neuron with the value 0

// The value of each token of a passage (NaN: none) and their scale.
export function passageColours(state, side) {
  const how = state.colouring(side);
  const left = state.reference(side);
  if (how === "neuron") return neuronColours(state, side);
  if (left) return differenceColours(state, left, side, how);
  return how === "surprise" ? surpriseColours(state, side) : countColours(state, side);
}

function valuesOf(state, side, valueOf) {
  const skip = state.get("skip_first");
  const value = (_, token) => (side.included(token, skip) ? valueOf(token) : NaN);
  return Float32Array.from({ length: side.T }, value);
}

// The end of a scale that the reader fixed, unless each layer or neuron has its own scale.
function fixedEnd(state, how) {
  return state.scaling(how) === "all" && state.get("limit");
}

function layersOf(state, side) {
  const [first, last] = state.range(side);
  if (first === last) return `layer ${first}`;
  const all = first === 0 && last === side.L - 1;
  return all ? "mean over layers" : `mean over layers ${first}\u2013${last}`;
}

// h of a neuron at each token; NaN where a token is left out.
function valuesOfNeuron(state, side, { layer, neuron }) {
  const skip = state.get("skip_first");
  const { tokens, values: h } = side.column(layer, neuron);
  const values = new Float32Array(side.T);
  tokens.forEach((token, n) => {
    values[token] = side.included(token, skip) ? h[n] || PALEST : NaN;
  });
  return values;
}

// Sides that show the same neuron share its scale.
function neuronColours(state, side) {
  const shown = state.shownNeuron(side);
  const { layer, neuron } = shown;
  const skip = state.get("skip_first");
  const sharing = state.sharing(side);
  const values = valuesOfNeuron(state, side, shown);
  const strongest = (one) =>
    one === side ? strongestOf(values) : strongestOf(valuesOfNeuron(state, one, shown));
  const largest = {
    neuron: () => Math.max(...sharing.map((one) => Math.abs(strongest(one)))),
    layer: () => Math.max(...sharing.map((one) => one.largestValue(layer, layer, skip))),
    all: () => Math.max(...state.sides.map((one) => one.largestValue(0, one.L - 1, skip))),
  }[state.scaling("neuron")];
  const label = `h of layer ${layer}, neuron ${neuron}`;
  const left = state.reference(side);
  if (left && sharing.length === 2) {
    const before = valuesOfNeuron(state, left, shown);
    const change = values.map((value, token) => value - before[token]);
    const end = fixedEnd(state, "neuron") || Math.abs(strongestOf(change));
    return { values: change, scale: makeScale("signed", end, changeOf(left, label), state.ramps) };
  }
  const end = fixedEnd(state, "neuron") || largest();
  return { values, scale: makeScale("signed", end, label, state.ramps) };
}

function differenceColours(state, left, right, how) {
  const means = (side) => side.means(...state.range(side));
  const of = how === "surprise" ? (side) => side.surprise : means;
  const [before, after] = [of(left), of(right)];
  const values = valuesOf(state, right, (token) => after[token] - before[token]);
  const end = fixedEnd(state, how) || Math.abs(strongestOf(values));
  const name = how === "surprise" ? "surprise, nats" : `active neurons, ${layersOf(state, right)}`;
  return { values, scale: makeScale("signed", end, changeOf(left, name), state.ramps) };
}

const changeOf = (left, name) => `difference to ${left.about.name}: ${name}`;

function surpriseColours(state, side) {
  const values = valuesOf(state, side, (token) => side.surprise[token]);
  const largest = state.sides.map((one) => one.largestSurprise(state.get("skip_first")));
  const end = state.get("limit") || Math.max(...largest);
  const label = "surprise, \u2212log p in nats";
  return { values, scale: makeScale("linear", end, label, state.ramps) };
}

// The least and the largest value above 0 of several sides.
function union(ranges) {
  const [least, largest] = [0, 1].map((end) => ranges.map((range) => range[end]));
  return [Math.min(...least), Math.max(...largest)];
}

function countColours(state, side) {
  const means = side.means(...state.range(side));
  const values = valuesOf(state, side, (token) => means[token]);
  const sharing = state.scaling("count") === "all" ? state.sides : [side];
  const range = (one) => one.meanRange(...state.range(one), state.get("skip_first"));
  const [least, largest] = union(sharing.map(range));
  const label = `active neurons per token, ${layersOf(state, side)}`;
  const end = fixedEnd(state, "count") || largest;
  return { values, scale: makeScale("log", end, label, state.ramps, least) };
}

// The scale of each layer's counts.
export function mapScales(state, side) {
  const skip = state.get("skip_first");
  const [first, last] = state.range(side);
  const label = "active neurons per token";
  const scale = ([least, largest], name) => makeScale("log", largest, name, state.ramps, least);
  const shown = state.sides.filter((one) => one.T);
  const layers = Array.from({ length: last - first + 1 }, (_, n) => first + n);
  const left = state.reference(side);
  if (left) {
    const range = layers.map((layer) => side.largestChange(left, layer, skip));
    const shared = makeScale("signed", Math.max(...range), changeOf(left, label), state.ramps);
    return layers.map(() => shared);
  }
  if (state.get("scale") === "layer") {
    const name = `${label}, each layer on its own`;
    const having = (layer) => shown.filter((one) => layer < one.L);
    const range = (layer) => having(layer).map((one) => one.countRange(layer, layer, skip));
    return layers.map((layer) => scale(union(range(layer)), name));
  }
  const range = (one) => one.countRange(...state.range(one), skip);
  const [least, largest] = union(shown.map(range));
  const limit = state.get("colour") === "count" && state.get("limit");
  const shared = scale([least, limit || largest], label);
  return layers.map(() => shared);
}

export const ABOUT_H =
  "h is the value of a neuron for a token: the neuron adds h times its column of the down " +
  "projection to the output of its layer.";

// own: each layer has a scale of its own, so that the ends have no common value.
export function showLegend(box, scale, { own = false, notes = [] } = {}) {
  const gradient = scale.ramp.gradient((t) => scale.index(scale.at(t)));
  const text = (v) => (scale.kind === "signed" && v ? signed(v) : number(v));
  const ends = [
    [0, "least"],
    [1, "most"],
  ];
  const ticks = own ? ends : scale.ticks.map(([place, v]) => [place, text(v)]);
  const shown = [scale.label, gradient, ticks, ...notes.map((node) => node.textContent)].join();
  if (box.shown === shown) return;
  box.shown = shown;
  box.replaceChildren(
    element("span.tw-label", scale.label, scale.label.startsWith("h of") && help(ABOUT_H)),
    element(
      "span.tw-scale",
      element("span.tw-gradient", { style: { background: gradient } }),
      element(
        "span.tw-ticks",
        ticks.map(([place, text]) => element("span", { style: { left: `${100 * place}%` } }, text)),
      ),
    ),
    ...notes,
  );
}
