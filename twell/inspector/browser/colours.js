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

// As WCAG defines it, from 0 to 1.
function luminance(rgb) {
  const linear = (value) => (value <= 10 ? value / 3294 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const [red, green, blue] = rgb.map(linear);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
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
    const ink = (rgb) => (luminance(rgb) < 0.18 ? "#fff" : "#000"); // the higher contrast
    this.fill = this.rgb.map((rgb, n) => (n === bare ? "" : `rgb(${rgb})`));
    this.ink = this.rgb.map((rgb, n) => (n === bare ? "" : ink(rgb)));
    this.css = this.fill.map((fill, n) => fill && `background-color:${fill};color:${this.ink[n]}`);
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
    if (colour && (colour[3] ?? 1) > 0.5) return luminance(colour.slice(0, 3)) < 0.18;
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
  for (const name of ["cell", "out"]) {
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
    const label = "active neurons per token, mean over layers";
    return { kind: "log", label, values: side.means, of: named("active") };
  }
  const { layer, neuron } = state.shownNeuron(side);
  if (how === "effect") {
    const label = `rise of surprise without layer ${layer}, neuron ${neuron}, in nats`;
    return { kind: "signed", label, values: side.rise(layer, neuron), of: named("rise") };
  }
  const label = `h of layer ${layer}, neuron ${neuron}`;
  return { kind: "signed", label, values: side.valuesOf(layer, neuron), of: named("h") };
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
  const values = read(side);
  const left = state.reference(side);
  if (left && how !== "effect" && (how !== "neuron" || state.shares(left, side))) {
    const [change] = differences([values], [read(left)]);
    const scale = scaleOfChange(state, left, label, [change]);
    return { values: change, scale, of: (value) => `change of ${of(value)}` };
  }
  const sharing = { neuron: state.sharing(side), effect: [side] }[how] ?? state.sides;
  return { values, of, scale: scaleOf(state, kind, label, sharing.map(read)) };
}

// One value a token; NaN for the tokens that are left out.
export function included(state, side, values) {
  const skip = state.get("skip_first");
  return Float32Array.from(values, (value, token) => (skip && !side.position[token] ? NaN : value));
}

function scaleOf(state, kind, label, arrays) {
  return makeScale(kind, extent(arrays), label, state.ramps);
}

// A row that the other side lacks counts as 0.
function differences(rows, others) {
  return rows.map((row, n) => row.map((value, token) => value - (others[n][token] ?? 0)));
}

function scaleOfChange(state, left, label, changes) {
  return scaleOf(state, "signed", `difference to ${left.about.name}: ${label}`, changes);
}

// The values of the map, one array a layer (NaN: left out), and their scale.
export function mapColours(state, side) {
  const label = "active neurons per token";
  const rows = (one) => range(0, one.L - 1).map((n) => one.row("counts", n));
  const read = (one) => rows(one).map((row) => included(state, one, row));
  const values = read(side);
  const left = state.reference(side);
  if (left) {
    const changes = differences(values, read(left));
    return { values: changes, scale: scaleOfChange(state, left, label, changes) };
  }
  const every = state.sides.flatMap(read);
  return { values, scale: scaleOf(state, "log", label, every) };
}

export function showLegend(box, { label, kind, ramp, index, at }) {
  const text = (value) => (kind === "signed" && value ? signed(value) : number(value));
  const stops = range(0, 16).map((n) => ramp.fill[index(at(n / 16))] || "transparent");
  const style = { backgroundImage: `linear-gradient(90deg, ${stops})` };
  const [low, high] = [0, 1].map((place) => element("small", text(at(place))));
  const about = label.startsWith("h of") && help(ABOUT_H);
  const scale = element("span.tw-group", low, element("span.tw-ramp", { style }), high);
  const build = () => element("div.tw-legend", element("span", label, about), scale);
  renew(box, [["legend", [label, stops, kind, at(0), at(1)].join(), build]]);
}
