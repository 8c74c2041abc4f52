// Colours of values: ramps of 256 colours, and scales that give every value a colour.

const FAINT = 0.1; // the place of the least value: what is not 0 is never as pale as 0

export function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

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
  for (const name of ["cell", "out", "over", "muted", "accent"]) {
    root.style.color = `var(--tw-${name})`;
    ramps[name] = getComputedStyle(root).color.match(/\d+/g).map(Number);
  }
  root.style.color = "";
  return ramps;
}
