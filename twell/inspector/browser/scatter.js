// All neurons of a model as points: how often they fire against how strongly. A drag brushes, a
// click takes the nearest.

import { range } from "./data.js";
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

  // found: the matching neurons, by index; box: what is brushed, or null.
  draw(overview, found, selected, box) {
    if (!this.wide || !overview.fires) return;
    const shown = [overview, found, this.wide, this.host.state.ramps];
    if (!shown.every((part, n) => part === this.shown?.[n])) {
      this.shown = shown;
      this.overview = overview;
      this.measure();
      this.drawPoints(found);
    }
    this.ring.hidden = selected === null || !overview.fires[selected];
    if (!this.ring.hidden) place(this.ring, { left: this.left[selected], top: this.top[selected] });
    this.brush.hidden = !box;
    if (!box) return;
    const [left, right, low, high] = box;
    this.showBrush(this.x.to(left), this.y.to(high), this.x.to(right), this.y.to(low));
  }

  measure() {
    const { fires, strength, about } = this.overview;
    const inner = {
      ...{ left: SPACE.left, right: this.wide - SPACE.right },
      ...{ top: SPACE.top, bottom: HEIGHT - SPACE.bottom },
    };
    const rate = Float32Array.from(fires, (count) => count / about.tokens);
    this.x = logAxis(rate, inner.left, inner.right);
    this.y = logAxis(strength, inner.bottom, inner.top);
    this.left = rate.map(this.x.to);
    this.top = strength.map(this.y.to);
    const share = (value) => `${Number((100 * value).toPrecision(2))}%`;
    const axis = ({ ticks, to }, name, written) => ({
      name: `${name}, log scale`,
      ticks: ticks.map((value) => [to(value), written(value)]),
    });
    const across = axis(this.x, "share of tokens at which it fires", share);
    const upright = axis(this.y, "mean |h| where it fires", number);
    this.axes.replaceChildren(...axes(inner, across, upright));
  }

  drawPoints(found) {
    const { ramps } = this.host.state;
    const ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: Math.round(this.wide * ratio), height: HEIGHT * ratio });
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    const matching = new Uint8Array(this.left.length);
    for (const index of found) matching[index] = 1;
    const dots = (which, colour, alpha) => {
      context.fillStyle = `rgb(${colour} / ${alpha})`;
      for (let index = 0; index < matching.length; index++)
        if (matching[index] === which)
          context.fillRect(Math.round(this.left[index]) - 1, Math.round(this.top[index]) - 1, 2, 2);
    };
    dots(0, ramps.muted.join(" "), 0.15);
    dots(1, ramps.accent.join(" "), 0.8);
  }

  showBrush(left, top, right, bottom) {
    this.brush.hidden = false;
    place(this.brush, { left, top, width: right - left, height: bottom - top });
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
    this.showBrush(...this.drag);
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
    for (let index = 0; index < this.left.length; index++) {
      const far = (this.left[index] - x) ** 2 + (this.top[index] - y) ** 2;
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

function place({ style }, sizes) {
  for (const [name, size] of Object.entries(sizes)) style[name] = `${size}px`;
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
    from: (at) => Math.exp(start + (at - from) / scale),
  };
}
