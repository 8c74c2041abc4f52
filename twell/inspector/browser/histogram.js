// The axes of charts, and the histogram of h between powers of two.

import { range } from "./data.js";
import { element } from "./elements.js";
import { compact, percent, plural, powerOfTwo, signed } from "./words.js";

const SIZE = { width: 340, viewBox: "0 0 340 115" };
const INNER = { left: 46, right: 334, top: 8, bottom: 82 };
const OCTAVES = 12;

// The grid, the numbers and the names of two axes. ticks: pairs of a place in pixels and a text.
export function axes({ left, right, top, bottom }, across, upright) {
  const line = (x1, x2, y1, y2) => element("svg:line", { x1, x2, y1, y2 });
  const text = (x, y, anchor, words, about = {}) =>
    element("svg:text", { x, y, "text-anchor": anchor, ...about }, words);
  const transform = `translate(9 ${(top + bottom) / 2}) rotate(-90)`;
  return [
    across.ticks.map(([x]) => line(x, x, top, bottom + 3)),
    across.ticks.map(([x, words]) => text(x, bottom + 14, "middle", words)),
    upright.ticks.map(([y]) => line(left, right, y, y)),
    upright.ticks.map(([y, words]) => text(left - 5, y + 3, "end", words)),
    text((left + right) / 2, bottom + 29, "middle", across.name),
    text(0, 0, "middle", upright.name, { transform }),
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
