// Colours of values: ramps of 256 colours, and scales that give every value its place in one.

export function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// As ImageData holds a pixel.
export function pixel([r, g, b]) {
  return (255 << 24) | (b << 16) | (g << 8) | r;
}

function brightness([r, g, b]) {
  return 0.299 * r + 0.587 * g + 0.114 * b;
}

// 256 colours between anchors; `bare` stays transparent, so that the page shows through.
export class Ramp {
  constructor(anchors, bare) {
    const stops = anchors.map(channels);
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

  // The colours of indices at fractions of the width.
  gradient(indexAt) {
    const stops = Array.from({ length: 33 }, (_, n) => this.fill[indexAt(n / 32)] || "transparent");
    return `linear-gradient(to right, ${stops.join(", ")})`;
  }

  // A colour as a pixel; where it is transparent, the one behind.
  pixel(index, behind) {
    return index === this.bare ? behind : pixel(this.rgb[index]);
  }
}

// What is not 0 is never as pale as 0.
const FAINT = 0.1;

// Counts ("log") rise by their logarithm from the least to the largest, surprise ("linear") evenly,
// signed values both ways from 0. The scale has index (the colour of a value), at (the value at a
// fraction of the width) and ticks (fraction, value).
export function makeScale(kind, largest, label, ramps, least = 1) {
  const top = largest > 0 ? largest : 1;
  const low = Math.min(least, top);
  const span = Math.log(top / low);
  const rise = (v) => (kind !== "log" ? v / top : span ? Math.log(v / low) / span : 1);
  const share = (v) => FAINT + (1 - FAINT) * Math.min(Math.max(rise(Math.abs(v)), 0), 1);
  const scale = { kind, top, label, ramp: ramps.sequential };
  scale.index = (v) => (v === 0 ? 0 : Math.round(255 * share(v)));
  scale.at = (t) => t * top;
  scale.ticks = [0, top / 2, top].map((v) => [rise(v), v]);
  if (kind === "log") {
    scale.at = (t) => low * Math.exp(t * span);
    scale.ticks = ticksOfLog(low, top).map((v) => [rise(v), v]);
  } else if (kind === "signed") {
    scale.ramp = ramps.diverging;
    scale.index = (v) => (v === 0 ? 128 : Math.round(127.5 + 127.5 * Math.sign(v) * share(v)));
    scale.at = (t) => (2 * t - 1) * top;
    scale.ticks = [-top, 0, top].map((v, n) => [n / 2, v]);
  }
  return scale;
}

// 1, 2, 5 and their tenfolds, apart from each other and from the ends.
function ticksOfLog(low, top) {
  const apart = Math.log(top / low) / 7;
  const ticks = [low];
  for (let power = 10 ** Math.floor(Math.log10(low)); power < top; power *= 10)
    for (const tick of [power, 2 * power, 5 * power])
      if (Math.log(tick / ticks.at(-1)) > apart && Math.log(top / tick) > apart) ticks.push(tick);
  return top > low ? [...ticks, top] : [low];
}

// Light or dark, as the background of the element: JupyterLab's theme, the page's, the system's.
export function isDark(element) {
  for (let node = element; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor.match(/[\d.]+/g)?.map(Number);
    if (colour && (colour.length < 4 || colour[3] > 0.5)) return brightness(colour) < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

// The ramps of a view that is light or dark as what surrounds it, and the variables of its style
// that canvases use: asked for while drawing, they would cost a layout.
export function themeOf(root, palettes) {
  const dark = isDark(root.parentElement);
  root.classList.toggle("tw-dark", dark);
  const { sequential, diverging } = palettes[dark ? "dark" : "light"];
  const style = getComputedStyle(root);
  const ramps = { dark, sequential: new Ramp(sequential, 0), diverging: new Ramp(diverging, 128) };
  for (const name of ["cell", "out", "over", "muted", "accent", "line"])
    ramps[name] = style.getPropertyValue(`--tw-${name}`).trim();
  return ramps;
}
