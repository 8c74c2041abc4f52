// All neurons of a model as points: how often they fire against how strongly. A drag brushes, a
// click takes the nearest.

import { pixel } from "./colours.js";
import { range } from "./data.js";
import { element } from "./elements.js";
import { axes } from "./histogram.js";
import { number } from "./words.js";

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
    this.node.hidden = !overview.fires; // without an aggregate there are no points
    if (!this.wide || !overview.fires) return;
    const { ramps } = this.host.state;
    const scale = devicePixelRatio || 1;
    const measured = [overview, this.wide, scale].every((part, n) => part === this.measured?.[n]);
    if (!measured) this.measure(overview, scale);
    if (!measured || this.found !== found || this.ramps !== ramps) this.drawPoints(found, ramps);
    this.ring.hidden = selected === null || !overview.fires[selected];
    if (!this.ring.hidden) place(this.ring, { left: this.left[selected], top: this.top[selected] });
    this.brush.hidden = !box;
    if (!box) return;
    const [left, right, low, high] = box;
    this.showBrush(this.x.to(left), this.y.to(high), this.x.to(right), this.y.to(low));
  }

  measure(overview, scale) {
    this.measured = [overview, this.wide, scale];
    this.overview = overview;
    const { fires, strength, about } = overview;
    const [width, height] = [Math.round(this.wide * scale), Math.round(HEIGHT * scale)];
    Object.assign(this.canvas, { width, height });
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

  // Pixels are set one by one, since a rectangle of the canvas for each point takes ten times as
  // long. Faint points that overlap add up.
  drawPoints(found, ramps) {
    Object.assign(this, { found, ramps });
    const { width, height } = this.canvas;
    const [, , scale] = this.measured;
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
    const { fires } = this.overview;
    const matching = new Uint8Array(fires.length);
    for (const index of found) matching[index] = 1;
    for (let index = 0; index < fires.length; index++)
      if (fires[index] && !matching[index]) dot(index, faint, 40);
    for (const index of found) if (fires[index]) dot(index, strong, 200);
    this.canvas.getContext("2d").putImageData(image, 0, 0);
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
    if (!this.start) return;
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
