// The map: active neurons of each token (column) and layer (row), and the colours of the passage
// below them.

import { channels, pixel } from "./colours.js";
import { button, element } from "./elements.js";
import { help } from "./parts.js";
import { mapScales, showLegend } from "./scales.js";
import { number, percent } from "./words.js";

const STRIP = 8; // height of the passage's colours, and GAP above it, in CSS pixels
const GAP = 5;
const ABOUT_STRIP = "The colours of the text above, one column a token.";
const LETTER = 11; // height of a row's number

export class ActivityMap {
  constructor(view, side) {
    this.view = view;
    this.state = view.state;
    this.side = side;
    this.left = 0; // scrolled so far
    this.sheet = element("canvas");
    this.canvas = element("canvas.tw-canvas", {
      tabindex: "0",
      role: "img",
      onpointermove: (event) => {
        const { token, layer } = this.placeOf(event);
        view.hover(side, token, event, layer);
      },
      onpointerleave: () => view.hover(side),
      onclick: (event) => this.clicked(event),
    });
    this.space = element("div.tw-space-x", this.canvas);
    this.scroll = element("div.tw-scroll", { onscroll: () => this.scrolled() }, this.space);
    this.labels = element("div.tw-labels");
    this.sums = element("div.tw-sums");
    this.legend = element("div.tw-legend");
    const narrower = { "aria-label": "narrower columns", title: "narrower" };
    const wider = { "aria-label": "wider columns", title: "wider" };
    const zoom = element(
      "span.tw-zoom",
      button("", () => view.zoomBy(-1), narrower, "\u2212"),
      button("", () => view.zoomBy(1), wider, "+"),
    );
    this.nodes = [
      element("div.tw-heat-head", this.legend, zoom),
      element("div.tw-heat", this.labels, this.scroll, this.sums),
    ];
  }

  clicked(event) {
    const { token, layer } = this.placeOf(event);
    this.state.chooseToken(this.side, token, layer === undefined ? {} : { layer, neuron: null });
    this.canvas.focus({ preventScroll: true });
  }

  scrolled() {
    if (this.left === this.scroll.scrollLeft) return;
    this.left = this.scroll.scrollLeft;
    this.view.drawMaps();
  }

  // How tokens and layers become columns and rows, in CSS pixels. The width comes from an observer:
  // to ask for it while drawing would lay out everything once more.
  geometry() {
    const [first, last] = this.state.range(this.side);
    const rows = last - first + 1;
    const height = Math.max(5, Math.min(22, Math.floor(190 / rows)));
    const available = this.scroll.wide ?? 0;
    const fit = available / this.side.T;
    const { zoom } = this.view;
    const cell = zoom ? Math.max(fit, 2 ** zoom) : Math.min(fit, 32);
    const total = cell * this.side.T;
    const width = Math.min(available, total);
    return { first, last, rows, height, width, cell, total, tall: rows * height + GAP + STRIP };
  }

  placeOf(event) {
    const { first, last, height, cell } = this.geometry();
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left + this.left) / cell);
    const layer = first + Math.floor((event.clientY - box.top) / height);
    const token = Math.max(0, Math.min(this.side.T - 1, column));
    return { token, layer: layer <= last ? layer : undefined };
  }

  draw() {
    const place = this.geometry();
    if (!place.width || !this.canvas.isConnected) return;
    const scales = mapScales(this.state, this.side);
    this.follow(place);
    const context = this.blank(place);
    const each = this.drawCells(context, place, scales);
    this.drawSelection(context, place);
    this.showRows(place);
    this.showLegend(place, scales, each);
    const { T } = this.side;
    const layers = `layers ${place.first} to ${place.last}`;
    const label = `active neurons of ${T} tokens in ${layers}; arrow keys move`;
    this.canvas.setAttribute("aria-label", label);
  }

  // Scroll to the selected token when it has changed.
  follow({ total, width, cell }) {
    const pinned = this.state.pinned(this.side);
    this.space.style.width = `${total}px`;
    if (total <= width) this.left = 0;
    else if (this.view.reveal && pinned !== null) {
      const middle = (pinned + 0.5) * cell - width / 2;
      this.left = Math.round(Math.max(0, Math.min(total - width, middle)));
      this.scroll.scrollLeft = this.left;
    }
  }

  blank({ width, tall }) {
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(tall * ratio);
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${tall}px` });
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    return context;
  }

  // Draws one pixel a cell, stretches them, and marks overflow. A column is one token, or the
  // busiest of `each` where they are narrower than a pixel; `each` is returned.
  drawCells(context, { first, rows, height, width, cell }, scales) {
    const { T } = this.side;
    const { ramps } = this.state;
    const ratio = devicePixelRatio || 1;
    const each = Math.max(1, Math.ceil(1 / (cell * ratio) - 1e-9));
    const from = Math.floor(this.left / cell / each);
    const to = Math.min(Math.ceil(T / each), Math.ceil((this.left + width) / cell / each) + 1);
    const number = to - from;
    const columns = Array.from({ length: number }, (_, column) => {
      const start = (from + column) * each;
      return [start, Math.min(T, start + each)];
    });
    const colours = { bare: pixel(channels(ramps.cell)), out: pixel(channels(ramps.out)) };
    const ends = scales.map(({ kind, ticks }) => `${kind} ${ticks}`);
    const left = [this.state.get("skip_first"), this.state.capacity(), colours.bare];
    const shown = [from, number, each, first, ...left, ...ends].join();
    // A click on a neuron changes the strip alone.
    if (this.cells?.shown !== shown)
      this.cells = { shown, ...this.fillRows(columns, first, scales, colours) };
    const { image, pixels, marks } = this.cells;
    this.fillStrip(pixels.subarray(rows * number), columns, colours);

    Object.assign(this.sheet, { width: number, height: rows + 1 });
    this.sheet.getContext("2d").putImageData(image, 0, 0);
    const x = from * each * cell - this.left;
    const wide = number * each * cell;
    const gap = height > 8 ? 1 : 0;
    const stretch = (row, y, tall) =>
      context.drawImage(this.sheet, 0, row, number, 1, x, y, wide, tall);
    for (let row = 0; row < rows; row++) stretch(row, row * height, height - gap);
    stretch(rows, rows * height + GAP, STRIP);
    context.fillStyle = ramps.over;
    const thick = Math.max(2, Math.round(height / 7));
    const broad = Math.max(each * cell, 1 / ratio);
    for (const [row, column] of marks)
      context.fillRect(x + column * each * cell, row * height, broad, thick);
    return each;
  }

  fillRows(columns, first, scales, colours) {
    const { length } = columns;
    const image = new ImageData(length, scales.length + 1);
    const pixels = new Uint32Array(image.data.buffer);
    const marks = [];
    scales.forEach((scale, row) => {
      const line = pixels.subarray(row * length, (row + 1) * length);
      const over = this.fillRow(line, columns, first + row, scale, colours);
      marks.push(...over.map((column) => [row, column]));
    });
    return { image, pixels, marks };
  }

  // The pixels of a layer; returns the columns in which a tile overflows.
  fillRow(pixels, columns, layer, scale, { bare, out }) {
    const { side } = this;
    const skip = this.state.get("skip_first");
    const capacity = this.state.capacity();
    const left = this.state.reference(side);
    const table = left ? null : tableOf(scale, bare);
    const colourOf = (value) =>
      table
        ? table[Math.min(value, table.length - 1)]
        : scale.ramp.pixel(scale.index(value), bare);
    const marks = [];
    columns.forEach(([start, stop], column) => {
      let most = NaN;
      let over = false;
      for (let token = start; token < stop; token++) {
        if (!side.included(token, skip)) continue;
        const value = left ? side.change(left, layer, token) : side.count(layer, token);
        if (!(Math.abs(value) <= Math.abs(most))) most = value;
        over ||= side.fullestTile(layer, token) > capacity;
      }
      pixels[column] = Number.isNaN(most) ? out : colourOf(most);
      if (over) marks.push(column);
    });
    return marks;
  }

  // The pixels of the passage's colours.
  fillStrip(pixels, columns, { bare, out }) {
    const { values, scale } = this.view.passageOf(this.side).colours;
    columns.forEach(([start, stop], column) => {
      let most = NaN;
      for (let token = start; token < stop; token++)
        if (Number.isNaN(most) || Math.abs(values[token]) > Math.abs(most)) most = values[token];
      pixels[column] = Number.isNaN(most) ? out : scale.ramp.pixel(scale.index(most), bare);
    });
  }

  drawSelection(context, { first, last, height, cell, tall }) {
    const { side: own, layer } = this.state.selected();
    const { muted, accent } = this.state.ramps;
    const middle = (token) => (token + 0.5) * cell - this.left;
    const frame = (token, colour) => {
      context.lineWidth = 1.5;
      context.strokeStyle = colour;
      const half = Math.max(cell / 2, 1.5);
      context.strokeRect(middle(token) - half, 0.75, 2 * half, tall - 1.5);
    };
    const peeked = this.state.peeked(this.side);
    if (peeked !== null) frame(peeked, muted);
    const pinned = this.state.pinned(this.side);
    if (pinned === null) return;
    frame(pinned, accent);
    if (own !== this.side || layer === null || layer < first || layer > last) return;
    const half = Math.max(cell / 2, 3);
    const gap = height > 8 ? 1 : 0;
    context.lineWidth = 3;
    context.strokeRect(middle(pinned) - half, (layer - first) * height, 2 * half, height - gap);
  }

  // Numbers of the layers and the mean of each, as many as there is room for.
  showRows({ first, rows, height }) {
    const { side, state } = this;
    const skip = state.get("skip_first");
    const { side: own, layer: selected } = state.selected();
    const here = own === side ? selected : null;
    const shown = [first, rows, height, here, skip].join();
    if (this.shown === shown) return;
    this.shown = shown;
    const every = Math.ceil(LETTER / height);
    const layers = Array.from({ length: rows }, (_, n) => first + n);
    const row = (make, layer, text) =>
      make(
        layer === here ? ".tw-row.tw-here" : ".tw-row",
        { style: { height: `${height}px` }, title: `layer ${layer}` },
        (layer - first) % every && layer !== here ? "" : text,
      );
    const choose = (layer) => (classes, ...parts) => {
      const act = () => state.choose(side, { layer: layer === here ? null : layer, neuron: null });
      return button(classes, act, { tabindex: "-1" }, ...parts);
    };
    const plain = (classes, ...parts) => element(`div${classes}`, ...parts);
    this.labels.replaceChildren(
      ...layers.map((layer) => row(choose(layer), layer, String(layer))),
      element("div.tw-row.tw-strip", { title: "the colours of the passage" }, "text", help(ABOUT_STRIP)),
    );
    const mean = (layer) => number(side.meanOf(layer, skip));
    this.sums.replaceChildren(...layers.map((layer) => row(plain, layer, mean(layer))));
    this.sums.title = "mean of active neurons in each layer";
  }

  showLegend({ first, last, rows }, scales, each) {
    const { state, side } = this;
    const capacity = state.capacity();
    const notes = [];
    if (capacity < Infinity) {
      const over = side.overflow(first, last, capacity, state.get("skip_first"));
      const cells = over ? `${percent(over)} of cells` : "none";
      const text = `a tile of ${state.header.tile} with more than ${capacity}: ${cells}`;
      notes.push(element("span.tw-overs", element("i"), text));
    }
    if (each > 1) notes.push(element("span.tw-overs", `each column the busiest of ${each} tokens`));
    showLegend(this.legend, scales[0], { own: state.get("scale") === "layer" && rows > 1, notes });
  }
}

// The colours of counts 0, 1, ... as pixels; layers may share a scale.
function tableOf(scale, bare) {
  const length = Math.min(65536, Math.ceil(scale.top) + 1);
  const colour = (_, count) => scale.ramp.pixel(scale.index(count), bare);
  return (scale.table ??= Uint32Array.from({ length }, colour));
}
