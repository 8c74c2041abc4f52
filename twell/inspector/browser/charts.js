// Charts, drawn by Observable Plot: the histogram of h between powers of two, and all neurons by
// how often and how strongly they fire.

import { dot, dotX, hexagon, hexbin, plot, pointer, rectY, tip } from "@observablehq/plot";

import { element } from "./elements.js";
import { compact, percent, plural, powerOfTwo, range, signed } from "./words.js";

const OCTAVES = 12;
const MARKED = 200; // of the matching neurons, drawn one by one
const STYLE = { background: "none", color: "var(--tw-muted)", overflow: "visible" };

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
  const most = histogram.map((_, bin) => Math.max(...all.map((one) => one.histogram[bin])));
  const low = Math.max(0, Math.min(most.findIndex(Boolean), edges.length - 6));
  const last = Math.min(most.length - 1, Math.max(most.findLastIndex(Boolean), low + 4));
  const every = Math.ceil((last - low) / 8);
  const labelled = range(low, last + 1).filter((n) => (n - edges.indexOf(0)) % every === 0);
  const ends = (bin) => `${powerOfTwo(edges[bin])} to ${powerOfTwo(edges[bin + 1])}`;
  const below = 0.7; // so that one token is seen
  return plot({
    ...{ width: 270, height: 128, marginLeft: 44, marginBottom: 36, marginTop: 18, style: STYLE },
    className: "tw-histogram",
    ariaLabel: `histogram of h, ${name}`,
    x: {
      ...{ domain: [low, last + 1], ticks: labelled, tickFormat: (n) => powerOfTwo(edges[n]) },
      label: `h ${name}`,
    },
    y: {
      ...{ type: "log", domain: [below, Math.max(...most, 10)], grid: true, label: "tokens" },
      ...{ ticks: 4, tickFormat: (count) => (/^10*$/.test(count) ? compact(count) : "") },
    },
    marks: [
      rectY(range(low, last).filter((bin) => histogram[bin]), {
        ...{ x1: (bin) => bin, x2: (bin) => bin + 1, y1: below, y2: (bin) => histogram[bin] },
        ...{ insetLeft: 0.75, insetRight: 0.75 },
        fill: (bin) => `var(--tw-${edges[bin] < 0 ? "minus" : "plus"})`,
        title: (bin) => `${ends(bin)}: ${plural(histogram[bin], "token")}`,
      }),
      dotX(quantiles, {
        ...{ x: ({ value }) => placeOf(value, edges), symbol: "triangle", r: 3, dy: 4 },
        ...{ frameAnchor: "bottom", fill: "var(--tw-ink)", className: "tw-quantile" },
        title: ({ value, quantile: q }) => `${percent(q)} of its values are below ${signed(value)}`,
      }),
    ],
  });
}

// All neurons: how often they fire against how strongly. found: the matching ones, by index;
// choose(index) is called after a click, with the nearest; mark(index) rings a neuron.
export function scatter({ fires, strength, about, N }, found, choose) {
  const alive = range(0, fires.length - 1).filter((index) => fires[index] && strength[index] > 0);
  const at = {
    ...{ x: (index) => fires[index] / about.tokens, y: (index) => strength[index] },
    ariaHidden: "true", // the chart has a name
  };
  const matching = found.length < alive.length ? found.slice(0, MARKED) : [];
  const axis = { type: "log", ticks: 4 };
  const accent = "var(--tw-accent)";
  const name = (index) => `${Math.floor(index / N)} \u00b7 ${index % N}`;
  const chart = plot({
    ...{ width: Math.min(460, innerWidth - 48), height: 290, marginLeft: 48, marginBottom: 36, style: STYLE },
    className: "tw-scatter",
    ariaLabel: "all neurons: how often and how strongly they fire",
    caption: `Shade: neurons at one place. Blue: the first ${MARKED} of the list.`,
    x: { ...axis, tickFormat: "~%", label: "share of tokens at which it fires" },
    y: { ...axis, tickFormat: "~g", label: "mean |h| where it fires" },
    opacity: { type: "log", range: [0.15, 0.9], legend: true, label: "neurons", color: "gray" },
    marks: [
      hexagon(alive, hexbin({ fillOpacity: "count" }, { ...at, binWidth: 8, fill: "gray" })),
      dot(matching, { ...at, r: 1.5, fill: accent }),
      tip(alive, pointer({ ...at, title: name, maxRadius: 12 })),
    ],
  });
  chart.onclick = () => chart.value >= 0 && choose(chart.value);
  const ring = element("svg:circle", { fill: "none", stroke: accent, "stroke-width": 2 });
  chart.querySelector("svg:last-of-type").append(ring);
  chart.mark = (index) => {
    ring.setAttribute("r", fires[index] ? 6 : 0);
    if (!fires[index]) return;
    for (const axis of ["x", "y"])
      ring.setAttribute(`c${axis}`, chart.scale(axis).apply(at[axis](index)));
  };
  return chart;
}
