// The map: active neurons of each token (column) and layer (row), and the colours of the passage
// below them. The canvas has one pixel a column; the browser stretches it to the width.

import { channels, pixel } from "./colours.js";
import { strongestOf } from "./data.js";
import { button, element, refill } from "./elements.js";
import { help } from "./parts.js";
import { mapColours, showLegend } from "./scales.js";
import { COLOURING } from "./state.js";
import { number, percent } from "./words.js";

const STRIP = 8; // height of the passage's colours, and the gap above it, in pixels
const GAP = 5;
const WIDEST = 32; // of a column, in pixels
const COLUMNS = 800; // the most of a map that is not zoomed
const LETTER = 11; // height of a row's number
const ABOUT_STRIP = "The colours of the text above, one column a token.";

export class ActivityMap {
  constructor(view, side) {
    this.view = view;
    this.state = view.state;
    this.side = side;
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
    const frame = (name) => element(`i.tw-frame.tw-${name}-frame`, { hidden: true });
    this.frames = { peek: frame("peek"), pinned: frame("pin"), cell: frame("cell") };
    this.space = element("div.tw-space", this.canvas, ...Object.values(this.frames));
    this.scroll = element("div.tw-scroll", this.space);
    this.labels = element("div.tw-labels");
    this.sums = element("div.tw-sums", { title: "mean of active neurons in each layer" });
    this.legend = element("div.tw-legend");
    const zoom = (steps, name, sign) =>
      button("", () => view.zoomBy(steps), { "aria-label": `${name} columns`, title: name }, sign);
    const zooms = element("span.tw-zoom", zoom(-1, "narrower", "\u2212"), zoom(1, "wider", "+"));
    this.nodes = [
      element("div.tw-heat-head", this.legend, zooms),
      element("div.tw-heat", this.labels, this.scroll, this.sums),
    ];
  }

  // The rows of the map: its layers, and the height of each.
  rows() {
    const [first, last] = this.state.range(this.side);
    const rows = last - first + 1;
    const height = Math.max(5, Math.min(22, Math.floor(190 / rows)));
    return { first, last, rows, height, tall: rows * height + GAP + STRIP };
  }

  placeOf(event) {
    const { first, last, height } = this.rows();
    const { left, top, width } = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - left) / width) * this.side.T);
    const layer = first + Math.floor((event.clientY - top) / height);
    const token = Math.max(0, Math.min(this.side.T - 1, column));
    return { token, layer: layer <= last ? layer : undefined };
  }

  clicked(event) {
    const { token, layer } = this.placeOf(event);
    this.state.chooseToken(this.side, token, layer === undefined ? {} : { layer, neuron: null });
    this.canvas.focus({ preventScroll: true });
  }

  draw() {
    const { T } = this.side;
    const place = this.rows();
    const { zoom } = this.view;
    const fit = `min(100%, ${WIDEST * T}px)`;
    this.space.style.width = zoom ? `max(${fit}, ${T * 2 ** zoom}px)` : fit;
    this.each = zoom ? 1 : Math.ceil(T / COLUMNS); // tokens of a column
    this.canvas.classList.toggle("tw-smooth", this.each > 1);
    this.canvas.ariaLabel =
      `active neurons of ${T} tokens in layers ${place.first} to ${place.last}; arrow keys move`;
    // A click on a token or a neuron changes the strip alone.
    const traits = COLOURING.map((trait) => this.state.get(trait));
    const shown = [...traits, zoom, this.state.ramps.dark].join();
    if (this.shown !== shown) {
      this.shown = shown;
      const { values, scales } = mapColours(this.state, this.side);
      this.drawCells(place, values, scales);
      this.means = this.meansOf(place);
      this.showLegend(place, scales[0]);
    }
    this.drawStrip(place);
    this.showRows(place);
    this.showFrames();
    this.reveal();
  }

  drawCells({ first, height, tall }, values, scales) {
    const width = Math.ceil(this.side.T / this.each);
    Object.assign(this.canvas, { width, height: tall });
    this.canvas.style.height = `${tall}px`;
    const over = pixel(channels(this.state.ramps.over));
    values.forEach((counts, row) => {
      const colours = this.coloursOf(counts, scales[row]);
      this.fill(colours, row * height, height > 8 ? height - 1 : height);
      const tiles = this.busiest(this.tiles(first + row));
      const marks = colours.map((colour, n) => (tiles[n] > this.state.capacity() ? over : colour));
      this.fill(marks, row * height, Math.max(2, Math.round(height / 7)));
    });
  }

  // The colours of the passage.
  drawStrip({ tall }) {
    const { values, scale } = this.view.passageOf(this.side).colours;
    this.fill(this.coloursOf(values, scale), tall - STRIP, STRIP);
  }

  // Fill lines of the canvas with a row of colours.
  fill(colours, from, lines) {
    const image = new ImageData(colours.length, lines);
    const pixels = new Uint32Array(image.data.buffer);
    for (let line = 0; line < lines; line++) pixels.set(colours, line * colours.length);
    this.canvas.getContext("2d").putImageData(image, 0, from);
  }

  // The fullest tile at each token of a layer; NaN for the tokens that are left out.
  tiles(layer) {
    const { side, state } = this;
    return side.included((token) => side.fullestTile(layer, token), state.get("skip_first"));
  }

  // Of each column the value with the largest size.
  busiest(values) {
    const { each } = this;
    if (each === 1) return values;
    const column = (_, n) => strongestOf(values.subarray(n * each, (n + 1) * each));
    return Float32Array.from({ length: Math.ceil(values.length / each) }, column);
  }

  coloursOf(values, scale) {
    const bare = pixel(channels(this.state.ramps.cell));
    const out = pixel(channels(this.state.ramps.out));
    return Uint32Array.from(this.busiest(values), (value) =>
      Number.isNaN(value) ? out : scale.ramp.pixel(scale.index(value), bare),
    );
  }

  // The frames around the token under the pointer, the selected token, and the selected cell.
  showFrames() {
    const { first, last, height, tall } = this.rows();
    const { side, layer } = this.state.selected();
    const { T } = this.side;
    const pinned = this.state.pinned(this.side);
    const inside = side === this.side && layer !== null && layer >= first && layer <= last;
    const show = (name, token, from = 0, size = tall) => {
      const { [name]: frame } = this.frames;
      frame.hidden = token === null;
      const [left, width] = [`${(100 * token) / T}%`, `${100 / T}%`];
      Object.assign(frame.style, { left, width, top: `${from}px`, height: `${size}px` });
    };
    show("peek", this.state.peeked(this.side));
    show("pinned", pinned);
    show("cell", inside ? pinned : null, (layer - first) * height, height);
  }

  // Scroll to the selected token if it has changed.
  reveal() {
    const pinned = this.state.pinned(this.side);
    if (!this.view.zoom || !this.view.reveal || pinned === null) return;
    const { scrollWidth, clientWidth } = this.scroll;
    if (scrollWidth > clientWidth)
      this.scroll.scrollLeft = ((pinned + 0.5) / this.side.T) * scrollWidth - clientWidth / 2;
  }

  // The mean of active neurons in each layer.
  meansOf({ first, rows }) {
    const { side, state } = this;
    const skip = state.get("skip_first");
    return Array.from({ length: rows }, (_, n) => {
      const counts = side.included((token) => side.count(first + n, token), skip);
      const known = counts.filter((count) => !Number.isNaN(count));
      return known.reduce((sum, count) => sum + count, 0) / Math.max(known.length, 1);
    });
  }

  // The number of each layer and its mean, as many as there is room for.
  showRows({ first, rows, height }) {
    const { side, state } = this;
    const { side: own, layer: selected } = state.selected();
    const every = Math.ceil(LETTER / height);
    const layers = Array.from({ length: rows }, (_, n) => first + n);
    const about = (layer) => ({ title: `layer ${layer}`, style: { height: `${height}px` } });
    const isHere = (layer) => own === side && layer === selected;
    const classes = (layer) => (isHere(layer) ? ".tw-row.tw-here" : ".tw-row");
    const shown = (layer, text) => ((layer - first) % every && !isHere(layer) ? "" : text);
    const label = (layer) => {
      const act = () => state.choose(side, { layer: isHere(layer) ? null : layer, neuron: null });
      const attributes = { ...about(layer), tabindex: "-1" };
      return button(classes(layer), act, attributes, shown(layer, String(layer)));
    };
    const mean = (layer) => {
      const text = shown(layer, number(this.means[layer - first]));
      return element(`div${classes(layer)}`, about(layer), text);
    };
    const strip = element("div.tw-row.tw-strip", "text", help(ABOUT_STRIP));
    refill(this.labels, layers.map(label), strip);
    refill(this.sums, layers.map(mean));
  }

  showLegend({ first, rows }, scale) {
    const { state, each } = this;
    const capacity = state.capacity();
    const notes = [];
    if (capacity < Infinity) {
      const tiles = Array.from({ length: rows }, (_, n) => [...this.tiles(first + n)]).flat();
      const known = tiles.filter((tile) => !Number.isNaN(tile));
      const over = known.filter((tile) => tile > capacity).length / Math.max(known.length, 1);
      const cells = over ? `${percent(over)} of cells` : "none";
      const text = `a tile of ${state.header.tile} with more than ${capacity}: ${cells}`;
      notes.push(element("span.tw-overs", element("i"), text));
    }
    if (each > 1) notes.push(element("span", `each column the busiest of ${each} tokens`));
    showLegend(this.legend, scale, { own: state.get("scale") === "layer" && rows > 1, notes });
  }
}
