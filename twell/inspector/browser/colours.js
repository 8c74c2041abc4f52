// Ramps of 256 colours, scales, which values colour a passage and its map, and the legend.

import { element, help, renew } from "./elements.js";
import { number, range, signed } from "./words.js";

export const ABOUT_H =
  "h is the value of a neuron for a token: the neuron adds h times its column of the down " +
  "projection to the output of its layer.";

const FAINT = 0.1; // the place of the least value: what is not 0 is never as pale as 0

export function pixel([r, g, b]) {
  return (255 << 24) | (b << 16) | (g << 8) | r;
}

function brightness([r, g, b]) {
  return 0.299 * r + 0.587 * g + 0.114 * b;
}

// 256 colours between anchors; `bare` stays transparent, so that the page shows through.
class Ramp {
  constructor(anchors, bare) {
    const stops = anchors.map((hex) => hex.match(/\w\w/g).map((digits) => parseInt(digits, 16)));
    this.rgb = Array.from({ length: 256 }, (_, n) => {
      const place = (n / 255) * (stops.length - 1);
      const left = Math.min(Math.floor(place), stops.length - 2);
      const mix = (from, c) => Math.round(from + (stops[left + 1][c] - from) * (place - left));
      return stops[left].map(mix);
    });
    this.bare = bare;
    const ink = (rgb) => (brightness(rgb) < 140 ? "#fff" : "#16191d");
    this.fill = this.rgb.map((rgb, n) => (n === bare ? "" : `rgb(${rgb})`));
    this.ink = this.rgb.map((rgb, n) => (n === bare ? "" : ink(rgb)));
  }

  gradient(indexAt) {
    const stops = Array.from({ length: 33 }, (_, n) => this.fill[indexAt(n / 32)] || "transparent");
    return `linear-gradient(to right, ${stops.join(", ")})`;
  }

  // A colour as a pixel; where it is transparent, the one behind.
  pixel(index, behind) {
    return index === this.bare ? behind : pixel(this.rgb[index]);
  }
}

// A scale from `least` to `largest`: "log" for counts, "linear" for surprise, "signed" for values
// that rise both ways from 0. index(value) is its colour in the ramp, at(fraction) the value at a
// fraction of the width.
export function makeScale(kind, [least, largest], label, ramps) {
  const top = largest > 0 ? largest : 1;
  const low = Math.min(least, top);
  const span = Math.log(top / low);
  const signed = kind === "signed";
  const place = (size) => (kind !== "log" ? size / top : span ? Math.log(size / low) / span : 1);
  const share = (v) => FAINT + (1 - FAINT) * Math.min(Math.max(place(Math.abs(v)), 0), 1);
  const middle = signed ? 127.5 : 0;
  return {
    ...{ kind, top, label, ramp: signed ? ramps.diverging : ramps.sequential },
    index: (v) =>
      v === 0 ? Math.ceil(middle) : Math.round(middle + (255 - middle) * Math.sign(v) * share(v)),
    at: (t) => (signed ? (2 * t - 1) * top : kind === "log" ? low * Math.exp(t * span) : t * top),
  };
}

// Light or dark, as the background of the element: JupyterLab's theme, the page's, the system's.
export function isDark(element) {
  for (let node = element; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor.match(/[\d.]+/g)?.map(Number);
    if (colour && (colour.length < 4 || colour[3] > 0.5)) return brightness(colour) < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

// Make a view light or dark. Return its ramps, and the colours of its style that canvases use.
export function themeOf(root, palettes) {
  const dark = isDark(root.parentElement);
  const theme = dark ? "dark" : "light";
  root.style.colorScheme = theme;
  const { sequential, diverging } = palettes[theme];
  const ramps = { dark, sequential: new Ramp(sequential, 0), diverging: new Ramp(diverging, 128) };
  for (const name of ["cell", "out", "over"]) {
    root.style.color = `var(--tw-${name})`;
    ramps[name] = getComputedStyle(root).color.match(/\d+/g).map(Number);
  }
  root.style.color = "";
  return ramps;
}

const SURPRISE = "surprise, \u2212log p in nats";
const named = (name) => (value) => `${name} ${number(value)}`; // a value in words

// What colours a passage: the kind of its scale, its label, and the value of each token.
function wayOf(state, side, how) {
  if (how === "surprise")
    return { kind: "linear", label: SURPRISE, values: side.surprise, of: named("surprise") };
  if (how === "count") {
    const label = `active neurons per token, ${layersOf(state.range(side), side)}`;
    return { kind: "log", label, values: side.means(...state.range(side)), of: named("active") };
  }
  const { layer, neuron } = state.shownNeuron(side);
  const label = `h of layer ${layer}, neuron ${neuron}`;
  return { kind: "signed", label, values: side.valuesOf(layer, neuron), of: named("h") };
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
  const read = (one) => included(state, one, wayOf(state, one, how).values);
  const { kind, label, of } = wayOf(state, side, how);
  const limit = state.scaling(how) === "all" && state.get("limit");
  const values = read(side);
  const left = state.reference(side);
  if (left && (how !== "neuron" || state.shares(left, side))) {
    const [change] = differences([values], [read(left)]);
    const scale = scaleOfChange(state, left, label, [change], limit);
    return { values: change, scale, of: (value) => `change of ${of(value)}` };
  }
  return { values, of, scale: scaleOf(state, kind, label, sharing(state, side, how, read), limit) };
}

// One value a token; NaN for the tokens that are left out.
export function included(state, side, values) {
  const skip = state.get("skip_first");
  return Float32Array.from(values, (value, token) => (skip && !side.position[token] ? NaN : value));
}

function scaleOf(state, kind, label, arrays, limit) {
  const [least, largest] = extent(arrays);
  return makeScale(kind, [least, limit || largest], label, state.ramps);
}

function sharing(state, side, how, read) {
  const scaling = state.scaling(how);
  if (how !== "neuron") return (scaling === "all" ? state.sides : [side]).map(read);
  if (scaling === "neuron") return state.sharing(side).map(read);
  const peaks = (one, layer) => included(state, one, one.peaks(layer));
  const { layer } = state.shownNeuron(side);
  if (scaling === "layer") return state.sharing(side).map((one) => peaks(one, layer));
  return state.sides.flatMap((one) => range(0, one.L - 1).map((n) => peaks(one, n)));
}

// A row that the other side lacks counts as 0.
function differences(rows, others) {
  return rows.map((row, n) => row.map((value, token) => value - (others[n][token] ?? 0)));
}

function scaleOfChange(state, left, label, changes, limit) {
  const name = `difference to ${left.about.name}: ${label}`;
  return scaleOf(state, "signed", name, changes, limit);
}

// The values of the map, one array a layer (NaN: left out), and the scale of each layer.
export function mapColours(state, side) {
  const label = "active neurons per token";
  const layers = range(...state.range(side));
  const read = (one, some) => some.map((n) => included(state, one, one.row("counts", n)));
  const values = read(side, layers);
  const alike = (scale) => layers.map(() => scale);
  const left = state.reference(side);
  if (left) {
    const changes = differences(values, read(left, layers));
    return { values: changes, scales: alike(scaleOfChange(state, left, label, changes)) };
  }
  if (state.get("scale") === "layer") {
    const own = (layer) => state.sides.flatMap((one) => read(one, [layer]));
    const name = `${label}, each layer on its own`;
    return { values, scales: layers.map((layer) => scaleOf(state, "log", name, own(layer))) };
  }
  const every = state.sides.flatMap((one) => read(one, range(...state.range(one))));
  const limit = state.get("colour") === "count" && state.get("limit");
  return { values, scales: alike(scaleOf(state, "log", label, every, limit)) };
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
