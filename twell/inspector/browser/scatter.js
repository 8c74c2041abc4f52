// All neurons of a model as points: how often they fire against how strongly. A click takes the
// nearest.

import { range } from "./data.js";
import { element } from "./elements.js";
import { axes } from "./histogram.js";
import { number } from "./words.js";

const FIELD = { viewBox: "0 0 480 260" };
const PLOT = { left: 58, right: 468, top: 8, bottom: 226 };
const REACH = 12; // between a click and its neuron

// A logarithmic axis that holds all values above 0, with powers of ten as ticks.
function logAxis(values, from, to, name, written) {
  const logs = values.filter((value) => value > 0).map(Math.log10);
  const low = logs.reduce((a, b) => Math.min(a, b), 0) - 0.1;
  const high = logs.reduce((a, b) => Math.max(a, b), low) + 0.1;
  const place = (value) => from + ((to - from) * (Math.log10(value) - low)) / (high - low);
  const ticks = range(Math.ceil(low), Math.floor(high)).map((power) => 10 ** power);
  return { name, place, ticks: ticks.map((value) => [place(value), written(value)]) };
}

// The points, and the ring around the selected one; as parts of `renew`. found: the matching
// neurons, by index; choose(index) is called after a click.
export function scatter({ fires, strength, about }, asked, found, selected, choose) {
  const { left, right, top, bottom } = PLOT;
  const rate = Float32Array.from(fires, (count) => count / about.tokens);
  const share = (value) => `${Number((100 * value).toPrecision(2))}%`;
  const x = logAxis(rate, left, right, "share of tokens at which it fires, log scale", share);
  const y = logAxis(strength, bottom, top, "mean |h| where it fires, log scale", number);
  const at = (index) => [x.place(rate[index]), y.place(strength[index])];
  const dot = (index) => `M${at(index).map((value) => value.toFixed(1)).join(" ")}h0`;
  const path = (kind, indices) => {
    const d = indices.filter((index) => fires[index]).map(dot);
    return element(`svg:path.${kind}`, { d: d.join("") });
  };
  const onclick = ({ offsetX, offsetY, currentTarget }) => {
    const scale = 480 / currentTarget.clientWidth;
    const far = (index) => {
      const [left, top] = at(index);
      return Math.hypot(left - scale * offsetX, top - scale * offsetY);
    };
    const near = range(0, fires.length - 1).reduce((a, b) => (far(b) < far(a) ? b : a), 0);
    if (far(near) < REACH) choose(near);
  };
  const label = { role: "img", "aria-label": "all neurons: how often and how strongly they fire" };
  const points = () =>
    element(
      "svg:svg.tw-chart",
      { ...FIELD, ...label, onclick },
      axes(PLOT, x, y),
      path("tw-points", range(0, fires.length - 1)),
      path("tw-points.tw-matching", found),
    );
  const ring = () => {
    const [cx, cy] = at(selected);
    return element("svg:svg.tw-chart.tw-ring", FIELD, element("svg:circle", { cx, cy, r: 6 }));
  };
  const ringed = selected !== null && fires[selected];
  return [["points", asked, points], ...(ringed ? [["ring", selected, ring]] : [])];
}
