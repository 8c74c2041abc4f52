// How often h fell between powers of two, on a logarithmic axis of counts.

import { strongestOf } from "./data.js";
import { element } from "./elements.js";
import { integer, percent, plural, powerOfTwo, signed, superscript } from "./words.js";

const WIDE = 340;
const TALL = 115;
const INNER = { left: 46, right: 334, top: 8, bottom: 82 };
const OCTAVES = 12;

// Pairs of a value and a count in octaves of both signs up to `top`; the innermost ends at `least`.
function binned(least, top, pairs) {
  const octaves = Math.round(Math.log2(top / least)) + 1;
  const sizes = Array.from({ length: octaves }, (_, n) => least * 2 ** n);
  const histogram = new Array(2 * octaves).fill(0);
  for (const [value, count] of pairs) {
    const octave = Math.floor(Math.log2(Math.abs(value) / least)) + 1;
    const bin = Math.max(0, Math.min(octaves - 1, octave));
    histogram[value < 0 ? octaves - 1 - bin : octaves + bin] += count;
  }
  return { edges: [...sizes.map((v) => -v).reverse(), 0, ...sizes], histogram };
}

// Where there is no aggregate: the values of the passage, in the same kind of bins.
export function histogramOf(values) {
  const top = 2 ** (Math.floor(Math.log2(Math.abs(strongestOf(values)) || 1)) + 1);
  const pairs = values.map((value) => [value, 1]);
  return { ...binned(top / 2 ** (OCTAVES - 1), top, pairs), fires: values.length, own: true };
}

// Histograms in common bins. The innermost takes everything below, as the widest of theirs does.
export function shareBins(all) {
  const top = Math.max(...all.map(({ edges }) => edges.at(-1)));
  const ends = all.map(({ edges }) => edges[(edges.length + 1) / 2]);
  const least = Math.min(top, Math.max(...ends));
  const middle = ({ edges }, bin) => (edges[bin] + edges[bin + 1]) / 2;
  const pairs = (one) => one.histogram.map((count, bin) => [middle(one, bin), count]);
  return all.map((one) => ({ ...one, ...binned(least, top, pairs(one)) }));
}

const line = (name, x1, x2, y1, y2 = y1) => element(`svg:line.${name}`, { x1, x2, y1, y2 });
const text = (x, y, anchor, words, more = {}) =>
  element("svg:text", { x, y, "text-anchor": anchor, ...more }, words);

// Where a value stands among the edges: their index and a part of the next bin.
function placeOf(value, edges) {
  const bin = Math.max(0, edges.findLastIndex((edge) => edge <= value));
  const [low, high] = [edges[bin], edges[bin + 1] ?? Infinity];
  if (low === 0 || high === 0 || high === Infinity) return bin + 0.5;
  return bin + (Math.log2(value / low) / Math.log2(high / low));
}

// quantiles: examples, whose values are marked below the axis. all: histograms of the same bins,
// this one among them, that share their axes.
export function drawHistogram({ edges, histogram, fires, tokens, own, quantiles = [] }, all) {
  const most = histogram.map((_, bin) => Math.max(...all.map((one) => one.histogram[bin])));
  const { left, right, top, bottom } = INNER;
  const present = (count) => count > 0;
  const low = Math.max(0, Math.min(most.findIndex(present), edges.length - 6));
  const last = Math.min(most.length - 1, Math.max(most.findLastIndex(present), low + 4));
  const step = (right - left) / (last - low + 1);
  const x = (edge) => left + (edge - low) * step;
  const reach = Math.max(1, Math.log10(Math.max(...most)) * 1.02);
  const below = 0.15; // so that one token is seen
  const y = (count) => top + ((bottom - top) * (reach - Math.log10(count))) / (reach + below);
  const parts = [];
  for (let decade = 0; decade <= reach; decade += reach > 4 ? 2 : 1) {
    const at = y(10 ** decade);
    const tick = decade > 3 ? `10${superscript(decade)}` : integer(10 ** decade);
    parts.push(line("tw-grid", left, right, at), text(left - 4, at + 3, "end", tick));
  }
  for (let bin = low; bin <= last; bin++) {
    if (!histogram[bin]) continue;
    const at = y(histogram[bin]);
    const size = { width: Math.max(step - 1.5, 1), height: bottom - at };
    const ends = `${powerOfTwo(edges[bin])} to ${powerOfTwo(edges[bin + 1])}`;
    const title = element("svg:title", `${ends}: ${plural(histogram[bin], "token")}`);
    const sign = edges[bin] < 0 ? "tw-minus" : "tw-plus";
    parts.push(element(`svg:rect.${sign}`, { x: x(bin) + 0.75, y: at, ...size }, title));
  }
  parts.push(line("tw-axis", left, right, bottom));
  const every = Math.ceil(36 / step);
  const zero = edges.indexOf(0);
  for (let edge = low; edge <= last + 1; edge++) {
    if ((edge - zero) % every) continue;
    parts.push(line("tw-axis", x(edge), x(edge), bottom, bottom + 3));
    parts.push(text(x(edge), bottom + 15, "middle", powerOfTwo(edges[edge])));
  }
  for (const { value, quantile } of quantiles) {
    const at = x(placeOf(value, edges));
    const mark = element("svg:path.tw-quantile", { d: `M${at} ${bottom}l-3 5h6z` });
    const below = `${percent(quantile)} of its values are below ${signed(value)}`;
    mark.append(element("svg:title", below));
    parts.push(mark);
  }
  const name = { class: "tw-axis-name" };
  const among = own ? "in this passage" : `over ${integer(tokens)} tokens`;
  const label = `h, in powers of two, ${among} (n = ${integer(fires)})`;
  const middle = (top + bottom) / 2;
  parts.push(text((left + right) / 2, TALL - 3, "middle", label, name));
  const turned = { ...name, transform: `rotate(-90 8 ${middle})` };
  parts.push(text(8, middle, "middle", "tokens, log scale", turned));
  const size = { viewBox: `0 0 ${WIDE} ${TALL}` };
  const about = { role: "img", "aria-label": `histogram of h, ${fires} firings` };
  return element("svg:svg.tw-histogram", size, about, parts);
}
