// All neurons of a model as points: how often they fire against how strongly, or their layer. A
// drag brushes, a click takes the nearest.

import { element } from "./elements.js";
import { axes } from "./histogram.js";
import { integer, number, percent } from "./words.js";

const HEIGHT = 300;
const SPACE = { left: 58, right: 12, top: 8, bottom: 34 };
const REACH = 12; // pixels between a click and its neuron

export class Scatter {
  // host: { state, schedule }; brushed(box): what a drag took, null: everything; chosen(index).
  constructor(host, brushed, chosen) {
    Object.assign(this, { host, brushed, chosen });
    this.canvas = element("canvas.tw-points", {
      role: "img",
      "aria-label": "all neurons: share of tokens that fire against mean |h|",
      onpointerdown: (event) => this.pressed(event),
      onpointermove: (event) => this.moved(event),
      onpointerup: (event) => this.released(event),
    });
    this.axes = element("svg:svg.tw-chart", { height: HEIGHT, width: "100%" });
    this.ring = element("i.tw-ring", { hidden: true });
    this.brush = element("i.tw-brush", { hidden: true });
    this.node = element("div.tw-scatter", this.axes, this.canvas, this.ring, this.brush);
    // To ask for the width while drawing would lay out everything once more.
    new ResizeObserver(([{ contentRect }]) => {
      this.wide = contentRect.width;
      host.schedule();
    }).observe(this.node);
  }

  // found: the matching neurons, by index; query: the search, which has the axes and the brush.
  draw(overview, found, selected, query) {
    if (!this.wide || !overview.fires) return;
    const { wide } = this;
    const { ramps } = this.host.state;
    const isNew = (key, ...parts) => {
      const same = this[key]?.every((part, n) => part === parts[n]);
      this[key] = parts;
      return !same;
    };
    const moved = isNew("frame", overview, wide, query.upright);
    if (moved) this.measure(overview, query);
    if (isNew("drawn", found, ramps) || moved) this.drawPoints(found);
    this.ring.hidden = selected === null || !overview.fires[selected];
    if (!this.ring.hidden) {
      const [left, top] = this.place(selected);
      Object.assign(this.ring.style, { left: `${left}px`, top: `${top}px` });
    }
    this.showBrush(query.box && this.corners(query.box));
  }

  measure(overview, query) {
    Object.assign(this, { overview });
    const { tokens } = overview.about;
    const { N, L, fires, strength } = overview;
    const inner = {
      ...{ left: SPACE.left, right: this.wide - SPACE.right },
      ...{ top: SPACE.top, bottom: HEIGHT - SPACE.bottom },
    };
    const layered = query.upright === "layer";
    const upwards = [inner.bottom, inner.top];
    this.x = axisOf(fires, (index) => fires[index] / tokens, [inner.left, inner.right]);
    this.y = layered
      ? linear([-0.5, L - 0.5], upwards)
      : axisOf(fires, (index) => strength[index], upwards);
    // Neurons of a layer are spread over the height of its row, by number.
    const height = (index) =>
      layered ? Math.floor(index / N) + 0.7 * ((index % N) / N - 0.5) : strength[index];
    this.places = Float32Array.from({ length: 2 * fires.length }, (_, at) =>
      at % 2 ? this.y.to(height(at >> 1)) : this.x.to(fires[at >> 1] / tokens),
    );
    const every = Math.ceil(L / 16);
    const rows = Array.from({ length: Math.ceil(L / every) }, (_, n) => n * every);
    const written = (share) => `${Number((100 * share).toPrecision(2))}%`;
    const percents = this.x.ticks.map((v) => [this.x.to(v), written(v)]);
    const numbers = (this.y.ticks ?? rows).map((v) => [this.y.to(v), number(v)]);
    const across = { name: "share of tokens at which it fires, log scale", ticks: percents };
    const name = layered ? "layer" : "mean |h| where it fires, log scale";
    this.axes.replaceChildren(...axes(inner, across, { name, ticks: numbers }));
  }

  drawPoints(found) {
    const { wide, overview } = this;
    const { ramps } = this.host.state;
    const ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: Math.round(wide * ratio), height: HEIGHT * ratio });
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    const dot = (index) => {
      const [x, y] = this.place(index);
      if (overview.fires[index]) context.fillRect(Math.round(x) - 1, Math.round(y) - 1, 2, 2);
    };
    const matching = new Uint8Array(overview.fires.length);
    for (const index of found) matching[index] = 1;
    context.globalAlpha = 0.15;
    context.fillStyle = ramps.muted;
    for (let index = 0; index < overview.fires.length; index++)
      if (!matching[index]) dot(index);
    context.globalAlpha = 0.8;
    context.fillStyle = ramps.accent;
    for (const index of found) dot(index);
  }

  place(index) {
    return [this.places[2 * index], this.places[2 * index + 1]];
  }

  corners([left, right, low, high]) {
    return [this.x.to(left), this.y.to(high), this.x.to(right), this.y.to(low)];
  }

  showBrush(corners) {
    this.brush.hidden = !corners;
    if (!corners) return;
    const [left, top, right, bottom] = corners;
    const box = { left, top, width: right - left, height: bottom - top };
    for (const [name, size] of Object.entries(box)) this.brush.style[name] = `${size}px`;
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  pressed(event) {
    this.start = this.at(event);
    this.canvas.setPointerCapture(event.pointerId);
  }

  moved(event) {
    const [x, y] = this.at(event);
    if (!this.start) {
      const near = this.nearest(x, y);
      this.canvas.style.cursor = near === null ? "crosshair" : "pointer";
      this.canvas.title = near === null ? "" : this.describe(near);
      return;
    }
    const [left, top] = this.start;
    if (!this.drag && Math.hypot(x - left, y - top) < 5) return;
    this.drag = [Math.min(x, left), Math.min(y, top), Math.max(x, left), Math.max(y, top)];
    this.showBrush(this.drag);
  }

  released(event) {
    const near = this.nearest(...this.at(event));
    const { drag } = this;
    this.start = this.drag = null;
    if (drag) {
      const [left, top, right, bottom] = drag;
      const ends = [this.x.from(left), this.x.from(right), this.y.from(bottom), this.y.from(top)];
      this.brushed(ends.map((end) => Number(end.toPrecision(4))));
    } else if (near !== null) this.chosen(near);
    else this.brushed(null);
  }

  nearest(x, y) {
    let [best, least] = [null, REACH ** 2];
    for (let index = 0; index < this.overview.fires.length; index++) {
      if (!this.overview.fires[index]) continue;
      const [left, top] = this.place(index);
      const far = (left - x) ** 2 + (top - y) ** 2;
      if (far < least) [best, least] = [index, far];
    }
    return best;
  }

  describe(index) {
    const { N, fires, about } = this.overview;
    const name = `layer ${Math.floor(index / N)}, neuron ${integer(index % N)}`;
    return `${name}: fires at ${percent(fires[index] / about.tokens)} of the tokens`;
  }
}

// A logarithmic axis that holds all neurons that fire, with powers of ten as ticks.
function axisOf(fires, valueOf, [from, to]) {
  let [low, high] = [Infinity, 0];
  for (let index = 0; index < fires.length; index++) {
    const value = fires[index] ? valueOf(index) : 0;
    if (value > 0 && value < low) low = value;
    if (value > high) high = value;
  }
  if (!high) [low, high] = [0.1, 1];
  const ticks = [];
  for (let power = Math.ceil(Math.log10(low)); 10 ** power <= high * 1.0001; power++)
    ticks.push(10 ** power);
  const ends = [Math.log(low / 1.2), Math.log(high * 1.2)];
  const { to: place, from: value } = linear(ends, [from, to]);
  return {
    ticks: ticks.length > 7 ? ticks.filter((_, n) => n % 2 === 0) : ticks,
    to: (v) => place(Math.log(v)),
    from: (at) => Math.exp(value(at)),
  };
}

function linear([low, high], [from, to]) {
  const share = (to - from) / (high - low);
  return { to: (value) => from + share * (value - low), from: (at) => low + (at - from) / share };
}
