// Charts: the histogram of h between powers of two, and the scatter of all neurons.

import { pixel } from "./colours.js";
import { range } from "./data.js";
import { element } from "./elements.js";
import { compact, number, percent, plural, powerOfTwo, signed } from "./words.js";

const SIZE = { width: 340, viewBox: "0 0 340 115" };
const INNER = { left: 46, right: 334, top: 8, bottom: 82 };
const OCTAVES = 12;
const TALL = 300; // of the scatter
const REACH = 12; // pixels between a click and its neuron

// The grid, the numbers and the names of two axes. ticks: pairs of a place in pixels and a text.
function axes({ left, right, top, bottom }, across, upright) {
  const line = (x1, x2, y1, y2) => element("svg:line", { x1, x2, y1, y2 });
  const text = (x, y, anchor, words) =>
    element("svg:text", { x, y, "text-anchor": anchor }, words);
  const name = text((left + right) / 2, bottom + 29, "middle", across.name);
  const turned = text(0, 0, "middle", upright.name);
  turned.setAttribute("transform", `translate(9 ${(top + bottom) / 2}) rotate(-90)`);
  for (const node of [name, turned]) node.setAttribute("class", "tw-axis-name");
  return [
    ...across.ticks.map(([x]) => line(x, x, top, bottom + 3)),
    ...across.ticks.map(([x, words]) => text(x, bottom + 14, "middle", words)),
    ...upright.ticks.map(([y]) => line(left, right, y, y)),
    ...upright.ticks.map(([y, words]) => text(left - 5, y + 3, "end", words)),
    name,
    turned,
  ];
}

// Lists of pairs of a value and a count, binned by octaves of both signs. All have the same bins;
// the innermost takes everything below `least`.
export function histograms(lists, least) {
  const sizes = lists.flat().map(([value, count]) => (count ? Math.abs(value) : 0));
  const top = Math.floor(Math.log2(Math.max(...sizes) || 1)) + 1;
  const bottom = Math.min(top, least === undefined ? top - OCTAVES : Math.log2(least));
  const ends = Array.from({ length: top - bottom + 1 }, (_, n) => 2 ** (bottom + n));
  const edges = [...ends.map((end) => -end).reverse(), 0, ...ends];
  return lists.map((pairs) => {
    const histogram = new Array(2 * ends.length).fill(0);
    for (const [value, count] of pairs) {
      const octave = Math.max(0, Math.floor(Math.log2(Math.abs(value))) + 1 - bottom);
      if (count) histogram[value < 0 ? ends.length - 1 - octave : ends.length + octave] += count;
    }
    return { edges, histogram };
  });
}

export function pairsOf({ edges, histogram }) {
  return histogram.map((count, bin) => [(edges[bin] + edges[bin + 1]) / 2, count]);
}

// The place of a value among the edges: an index and a part of the next bin.
function placeOf(value, edges) {
  const bin = Math.max(0, edges.findLastIndex((edge) => edge <= value));
  const [low, high] = [edges[bin], edges[bin + 1] ?? Infinity];
  if (low === 0 || high === 0 || high === Infinity) return bin + 0.5;
  return bin + Math.log2(value / low) / Math.log2(high / low);
}

// all: histograms of the same bins, this one among them, that share their axes; name: of the
// values; quantiles: examples, whose values are marked below the axis.
export function drawHistogram({ edges, histogram }, all, name, quantiles = []) {
  const { left, right, top, bottom } = INNER;
  const most = histogram.map((_, bin) => Math.max(...all.map((one) => one.histogram[bin])));
  const present = (count) => count > 0;
  const low = Math.max(0, Math.min(most.findIndex(present), edges.length - 6));
  const last = Math.min(most.length - 1, Math.max(most.findLastIndex(present), low + 4));
  const step = (right - left) / (last - low + 1);
  const x = (edge) => left + (edge - low) * step;
  const reach = Math.max(1, Math.log10(Math.max(...most)) * 1.02);
  const below = 0.15; // so that one token is seen
  const y = (count) => top + ((bottom - top) * (reach - Math.log10(count))) / (reach + below);

  const every = Math.ceil(36 / step);
  const shown = edges.map((edge, n) => [n, edge]).slice(low, last + 2);
  const labelled = shown.filter(([n]) => (n - edges.indexOf(0)) % every === 0);
  const across = {
    name: `h, in powers of two, ${name}`,
    ticks: labelled.map(([n, edge]) => [x(n), powerOfTwo(edge)]),
  };
  const decades = range(0, Math.floor(reach)).filter((n) => reach <= 4 || n % 2 === 0);
  const upright = {
    name: "tokens, log scale",
    ticks: decades.map((n) => [y(10 ** n), compact(10 ** n)]),
  };
  const bars = histogram.map((count, bin) => {
    if (!count) return null;
    const size = { width: Math.max(step - 1.5, 1), height: bottom - y(count) };
    const ends = `${powerOfTwo(edges[bin])} to ${powerOfTwo(edges[bin + 1])}`;
    const title = element("svg:title", `${ends}: ${plural(count, "token")}`);
    const sign = edges[bin] < 0 ? "tw-minus" : "tw-plus";
    return element(`svg:rect.${sign}`, { x: x(bin) + 0.75, y: y(count), ...size }, title);
  });
  const marks = quantiles.map(({ value, quantile }) => {
    const title = `${percent(quantile)} of its values are below ${signed(value)}`;
    const shape = { d: `M${x(placeOf(value, edges))} ${bottom}l-3 5h6z` };
    return element("svg:path.tw-quantile", shape, element("svg:title", title));
  });
  const about = { role: "img", "aria-label": `histogram of h, ${name}`, ...SIZE };
  const grid = axes(INNER, across, upright);
  return element("svg:svg.tw-chart.tw-histogram", about, grid, bars, marks);
}

// All neurons of a model as points: how often they fire against how strongly. A click takes the
// nearest.
export class Scatter {
  // host: { state, schedule }; chosen(index) is called after a click on a neuron.
  constructor(host, chosen) {
    this.host = host;
    this.canvas = element("canvas.tw-points", {
      role: "img",
      "aria-label": "all neurons: share of tokens that fire against mean |h|",
      onclick: (event) => {
        const near = this.nearest(event.offsetX, event.offsetY);
        if (near !== null) chosen(near);
      },
    });
    this.axes = element("svg:svg.tw-chart", { height: TALL, width: "100%" });
    this.ring = element("i.tw-ring", { hidden: true });
    this.node = element("div.tw-scatter", this.axes, this.canvas, this.ring);
    // To ask for the width while drawing would lay out everything once more.
    new ResizeObserver(([{ contentRect }]) => {
      this.wide = contentRect.width;
      host.schedule();
    }).observe(this.node);
  }

  // found: the matching neurons, by index.
  draw(overview, found, selected) {
    this.node.hidden = !overview.fires; // without an aggregate there are no points
    if (!this.wide || !overview.fires) return;
    const { ramps } = this.host.state;
    const shown = [overview, found, ramps, this.wide, devicePixelRatio];
    if (shown.some((part, n) => part !== this.shown?.[n])) {
      this.measure(overview);
      this.drawPoints(overview.fires, found, ramps);
    }
    this.shown = shown;
    this.ring.hidden = selected === null || !overview.fires[selected];
    if (this.ring.hidden) return;
    this.ring.style.left = `${this.left[selected]}px`;
    this.ring.style.top = `${this.top[selected]}px`;
  }

  measure({ fires, strength, about }) {
    const inner = { left: 58, right: this.wide - 12, top: 8, bottom: TALL - 34 };
    const rate = Float32Array.from(fires, (count) => count / about.tokens);
    const x = logAxis(rate, inner.left, inner.right);
    const y = logAxis(strength, inner.bottom, inner.top);
    this.left = rate.map(x.to);
    this.top = strength.map(y.to);
    const share = (value) => `${Number((100 * value).toPrecision(2))}%`;
    const axis = ({ ticks, to }, name, written) => ({
      name: `${name}, log scale`,
      ticks: ticks.map((value) => [to(value), written(value)]),
    });
    const across = axis(x, "share of tokens at which it fires", share);
    const upright = axis(y, "mean |h| where it fires", number);
    this.axes.replaceChildren(...axes(inner, across, upright));
  }

  // Pixels are set one by one, since a rectangle of the canvas for each point takes ten times as
  // long. Faint points that overlap add up.
  drawPoints(fires, found, ramps) {
    const scale = devicePixelRatio;
    const [width, height] = [Math.round(this.wide * scale), Math.round(TALL * scale)];
    Object.assign(this.canvas, { width, height });
    const image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    const size = Math.round(2 * scale);
    const dot = (index, colour, alpha) => {
      const left = Math.round(this.left[index] * scale - size / 2);
      const top = Math.round(this.top[index] * scale - size / 2);
      for (let y = top; y < top + size && y < height; y++)
        for (let x = left; x < left + size; x++) {
          const before = pixels[y * width + x] >>> 24;
          pixels[y * width + x] = (colour & 0xffffff) | (Math.min(before + alpha, 255) << 24);
        }
    };
    const [faint, strong] = [pixel(ramps.muted), pixel(ramps.accent)];
    fires.forEach((count, index) => count && dot(index, faint, 40));
    for (const index of found) if (fires[index]) dot(index, strong, 160);
    this.canvas.getContext("2d").putImageData(image, 0, 0);
  }

  nearest(x, y) {
    let [best, least] = [null, REACH ** 2];
    for (let index = 0; index < this.left.length; index++) {
      const far = (this.left[index] - x) ** 2 + (this.top[index] - y) ** 2;
      if (far < least) [best, least] = [index, far];
    }
    return best;
  }
}

// A logarithmic axis from one pixel to another that holds all values above 0, with powers of ten as
// ticks. A 0 is beyond its end.
function logAxis(values, from, to) {
  const known = values.filter((value) => value > 0);
  const [low, high] = known.length
    ? [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))]
    : [0.1, 1];
  const start = Math.log(low / 1.2);
  const scale = (to - from) / (Math.log(high * 1.2) - start);
  const ticks = range(Math.ceil(Math.log10(low)), Math.floor(Math.log10(high * 1.0001)));
  return {
    ticks: ticks.filter((_, n) => ticks.length <= 7 || n % 2 === 0).map((power) => 10 ** power),
    to: (value) => from + scale * (Math.log(value) - start),
  };
}
