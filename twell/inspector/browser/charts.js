// The histogram of h between powers of two, drawn by Observable Plot.

import { plot, rectY } from "@observablehq/plot";

import { compact, plural, powerOfTwo, range, signed } from "./words.js";

const OCTAVES = 12;
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

// all: histograms of the same bins, this one among them, that share their axes; name: of the
// values.
export function drawHistogram({ edges, histogram }, all, name) {
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
    ],
  });
}
