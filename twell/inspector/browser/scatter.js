// All neurons of a model as points: how often they fire against how strongly, or their layer. A
// drag brushes, a click takes the nearest.

import { channels, pixel } from "./colours.js";
import { element } from "./elements.js";
import { integer, number, percent } from "./words.js";

const HEIGHT = 300;
const SPACE = { left: 58, right: 12, top: 8, bottom: 34 };
const POINT = 2.5;
const REACH = 12; // pixels between a click and its neuron

const powersOfTen = (low, high) => {
  const ticks = [];
  for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power++)
    ticks.push(10 ** power);
  return ticks.length > 7 ? ticks.filter((_, n) => n % 2 === 0) : ticks;
};

export class Scatter {
  // host: { state, root }; brushed(box): what a drag took, null: everything; chosen(index).
  constructor(host, brushed, chosen) {
    Object.assign(this, { host, brushed, chosen });
    this.drag = null; // the corners of a brush in pixels, while it is drawn
    this.sheet = element("canvas");
    this.canvas = element("canvas.tw-points", {
      role: "img",
      "aria-label": "all neurons: share of tokens that fire against mean |h|",
      onpointerdown: (event) => this.pressed(event),
      onpointermove: (event) => this.moved(event),
      onpointerup: (event) => this.released(event),
    });
    this.node = element("div.tw-scatter", this.canvas);
    // To ask for the width while drawing would lay out everything once more.
    new ResizeObserver(([{ contentRect }]) => {
      this.wide = contentRect.width;
      host.schedule();
    }).observe(this.node);
  }

  // found: which neurons match, by index; query: the search, which has the axes and the brush.
  draw(overview, found, selected, query) {
    if (!this.wide || !overview.fires) return;
    const { dark } = this.host.state.ramps;
    this.query = query;
    const frame = [this.wide, query.upright].join();
    if (this.overview !== overview || this.frame !== frame) {
      Object.assign(this, { overview, frame, key: null });
      this.measure();
    }
    const key = [frame, dark, found.stamp].join();
    if (this.key === key && this.selected === selected) return;
    if (this.key !== key) this.drawPoints(found);
    this.key = key;
    this.drawAbove(selected);
  }

  measure() {
    const { overview, wide } = this;
    const { tokens } = overview.about;
    this.x = this.axis((index) => overview.fires[index] / tokens, [SPACE.left, wide - SPACE.right]);
    const range = [HEIGHT - SPACE.bottom, SPACE.top];
    this.y =
      this.query.upright === "layer"
        ? { of: (at) => Math.floor(at / overview.N), ...linear([-0.5, overview.L - 0.5], range) }
        : this.axis((index) => overview.strength[index], range);
    this.places = Float32Array.from({ length: 2 * overview.fires.length }, (_, at) =>
      at % 2 ? this.heightOf(at >> 1) : this.x.to(this.x.of(at >> 1)),
    );
  }

  // A logarithmic axis that holds all neurons that fire.
  axis(of, range) {
    const { overview } = this;
    let [low, high] = [Infinity, 0];
    for (let index = 0; index < overview.fires.length; index++) {
      const value = overview.fires[index] ? of(index) : 0;
      if (value > 0 && value < low) low = value;
      if (value > high) high = value;
    }
    if (!high) [low, high] = [0.1, 1];
    const ticks = powersOfTen(low, high * 1.0001);
    return { of, ticks, ...logarithmic([low / 1.2, high * 1.2], range) };
  }

  context(canvas) {
    const ratio = devicePixelRatio || 1;
    const size = { width: Math.round(this.wide * ratio), height: Math.round(HEIGHT * ratio) };
    Object.assign(canvas, size);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    return context;
  }

  // Points are written as pixels: tens of thousands of rectangles would take too long.
  drawPoints(found) {
    const { overview } = this;
    const context = this.context(this.sheet);
    this.drawAxes(context);
    const { width, height } = this.sheet;
    const ratio = devicePixelRatio || 1;
    const size = Math.max(2, Math.round(POINT * ratio));
    const image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    const dot = (index, colour) => {
      const [x, y] = this.place(index);
      const from = Math.round(x * ratio - size / 2) + width * Math.round(y * ratio - size / 2);
      for (let at = from; at < from + size * width; at += width) pixels.fill(colour, at, at + size);
    };
    const faint = withAlpha(pixel(channels(this.host.state.ramps.muted)), 0.15);
    const { rgb } = this.host.state.ramps.sequential;
    const last = Math.max(1, overview.L - 1);
    const colours = Array.from({ length: overview.L }, (_, layer) =>
      withAlpha(pixel(rgb[Math.round(70 + (185 * layer) / last)]), 0.9),
    );
    const matching = new Uint8Array(overview.fires.length);
    for (const index of found) matching[index] = 1;
    for (const match of [0, 1])
      for (let index = 0; index < matching.length; index++)
        if (overview.fires[index] && matching[index] === match)
          dot(index, match ? colours[Math.floor(index / overview.N)] : faint);
    const points = element("canvas", { width, height });
    points.getContext("2d").putImageData(image, 0, 0);
    context.drawImage(points, 0, 0, width / ratio, height / ratio);
  }

  // Layers are rows: their neurons are spread over the row's height, by number.
  heightOf(index) {
    const { N } = this.overview;
    const shift = this.query.upright === "layer" ? 0.7 * ((index % N) / N - 0.5) : 0;
    return this.y.to(this.y.of(index) + shift);
  }

  place(index) {
    return [this.places[2 * index], this.places[2 * index + 1]];
  }

  drawAxes(context) {
    const { x, y, wide } = this;
    context.fillStyle = this.host.state.ramps.muted;
    context.strokeStyle = this.host.state.ramps.line;
    context.font = "10.5px system-ui, sans-serif";
    const bottom = HEIGHT - SPACE.bottom;
    const line = (...ends) => {
      context.beginPath();
      context.moveTo(ends[0], ends[1]);
      context.lineTo(ends[2], ends[3]);
      context.stroke();
    };
    context.textAlign = "center";
    for (const tick of x.ticks) {
      line(x.to(tick), SPACE.top, x.to(tick), bottom);
      context.fillText(`${Number((100 * tick).toPrecision(2))}%`, x.to(tick), bottom + 13);
    }
    const name = "share of tokens at which it fires, log scale";
    context.fillText(name, (SPACE.left + wide - SPACE.right) / 2, HEIGHT - 5);
    context.textAlign = "right";
    const layers = Array.from({ length: this.overview.L }, (_, layer) => layer);
    const every = Math.ceil(layers.length / 16);
    for (const tick of y.ticks ?? layers.filter((layer) => layer % every === 0)) {
      line(SPACE.left, y.to(tick), wide - SPACE.right, y.to(tick));
      context.fillText(y.ticks ? number(tick) : String(tick), SPACE.left - 6, y.to(tick) + 3.5);
    }
    context.save();
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    const upright = y.ticks ? "mean |h| where it fires, log scale" : "layer";
    context.fillText(upright, -(SPACE.top + bottom) / 2, 12);
    context.restore();
  }

  // The selected neuron and the brush, above the points.
  drawAbove(selected = this.selected) {
    this.selected = selected;
    const context = this.context(this.canvas);
    Object.assign(this.canvas.style, { width: `${this.wide}px`, height: `${HEIGHT}px` });
    context.drawImage(this.sheet, 0, 0, this.wide, HEIGHT);
    context.strokeStyle = this.host.state.ramps.accent;
    context.lineWidth = 2;
    if (selected !== null && this.overview.fires[selected]) {
      context.beginPath();
      context.arc(...this.place(selected), 6, 0, 7);
      context.stroke();
    }
    const corners = this.drag ?? this.brush();
    if (corners) {
      const [x, y, right, bottom] = corners;
      context.setLineDash([4, 3]);
      context.lineWidth = 1;
      context.strokeRect(x, y, right - x, bottom - y);
    }
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
    this.drawAbove();
  }

  released(event) {
    const [x, y] = this.at(event);
    const dragged = this.start && Math.hypot(x - this.start[0], y - this.start[1]) >= 5;
    const near = this.nearest(x, y);
    this.start = null;
    if (dragged) {
      const [left, top, right, bottom] = this.drag;
      const ends = [this.x.from(left), this.x.from(right), this.y.from(bottom), this.y.from(top)];
      this.drag = null;
      this.brushed(ends.map((end) => Number(end.toPrecision(4))));
    } else if (near !== null) this.chosen(near);
    else this.clear();
  }

  clear() {
    this.brushed(null);
  }

  // The brushed region in pixels.
  brush() {
    if (!this.query.box) return null;
    const [left, right, low, high] = this.query.box;
    return [this.x.to(left), this.y.to(high), this.x.to(right), this.y.to(low)];
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

const withAlpha = (colour, alpha) => (colour & 0xffffff) | (Math.round(255 * alpha) << 24);

function logarithmic([low, high], [from, to]) {
  const share = (to - from) / Math.log(high / low);
  return {
    to: (value) => from + share * Math.log(value / low),
    from: (at) => low * Math.exp((at - from) / share),
  };
}

function linear([low, high], [from, to]) {
  const share = (to - from) / (high - low);
  return { to: (value) => from + share * (value - low), from: (at) => low + (at - from) / share };
}
