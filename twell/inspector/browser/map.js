// The map: active neurons of each token (column) and layer (row), and the colours of the passage
// below them. The canvas has one pixel a column; the browser stretches it to the width.

import { included, mapColours, pixel, showLegend } from "./colours.js";
import { meanOf } from "./data.js";
import { element, renew } from "./elements.js";
import { pressed } from "./keyboard.js";
import { number, range } from "./words.js";

const STRIP = 8; // height of the passage's colours, and the gap above it, in pixels
const GAP = 5;
const WIDEST = 32; // of a column, in pixels; the narrowest has one
const LETTER = 11; // height of a row's number

export class ActivityMap {
  constructor(view, side) {
    this.view = view;
    this.state = view.state;
    this.side = side;
    this.canvas = element("canvas.tw-canvas", {
      tabindex: "0",
      role: "application",
      onpointermove: (event) => {
        const { token, layer } = this.placeOf(event);
        view.hover(side, token, layer);
      },
      onpointerleave: () => view.hover(side),
      onclick: (event) => this.clicked(event),
      onkeydown: (event) => pressed(event, side, this.state),
    });
    const frame = () => element("i.tw-frame", { hidden: true });
    this.frames = { peek: frame(), pinned: frame(), cell: frame() };
    const width = `max(min(100%, ${WIDEST * side.T}px), ${side.T}px)`;
    const frames = Object.values(this.frames);
    this.scroll = element(
      "div.tw-scroll",
      element("div.tw-space", { style: { width } }, this.canvas, frames),
    );
    this.labels = element("div.tw-labels");
    this.legend = element("div");
    this.nodes = [this.legend, element("div.tw-heat", this.labels, this.scroll)];
  }

  rows() {
    const { L } = this.side;
    const height = Math.max(5, Math.min(22, Math.floor(190 / L)));
    return { layers: range(0, L - 1), height, tall: L * height + GAP + STRIP };
  }

  placeOf(event) {
    const { height } = this.rows();
    const { left, top, width } = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - left) / width) * this.side.T);
    const layer = Math.floor((event.clientY - top) / height);
    const token = Math.max(0, Math.min(this.side.T - 1, column));
    return { token, layer: layer < this.side.L ? layer : undefined };
  }

  clicked(event) {
    const { token, layer } = this.placeOf(event);
    this.state.chooseToken(this.side, token, layer === undefined ? {} : { layer, neuron: null });
    this.canvas.focus({ preventScroll: true });
  }

  // text: the colours of the passage. A click on a token or a neuron changes their strip alone.
  draw(text) {
    const { tall, layers, height } = this.rows();
    const { state } = this;
    const shown = [state.get("skip_first"), state.get("difference"), state.ramps.dark].join();
    if (this.shown !== shown) this.drawCells();
    this.shown = shown;
    this.fill(this.coloursOf(text.values, text.scale), tall - STRIP, STRIP);
    this.showRows(layers, height);
    this.showFrames();
    this.reveal();
  }

  drawCells() {
    const { side, state, canvas } = this;
    const { layers, height, tall } = this.rows();
    const { values, scale } = mapColours(state, side);
    this.means = layers.map((layer) => meanOf(included(state, side, side.row("counts", layer))));
    Object.assign(canvas, { width: side.T, height: tall });
    canvas.style.height = `${tall}px`;
    canvas.ariaLabel = `active neurons of ${side.T} tokens in ${side.L} layers; arrow keys move`;
    layers.forEach((_, row) => {
      const colours = this.coloursOf(values[row], scale);
      this.fill(colours, row * height, height > 8 ? height - 1 : height);
    });
    showLegend(this.legend, scale);
  }

  fill(colours, from, lines) {
    const image = new ImageData(colours.length, lines);
    const pixels = new Uint32Array(image.data.buffer);
    for (let line = 0; line < lines; line++) pixels.set(colours, line * colours.length);
    this.canvas.getContext("2d").putImageData(image, 0, from);
  }

  coloursOf(values, scale) {
    const bare = pixel(this.state.ramps.cell);
    const out = pixel(this.state.ramps.out);
    return Uint32Array.from(values, (value) =>
      Number.isNaN(value) ? out : scale.ramp.pixel(scale.index(value), bare),
    );
  }

  // The frames around the token under the pointer, the selected token, and the selected cell.
  showFrames() {
    const { height, tall } = this.rows();
    const { side, layer } = this.state.selected();
    const { T } = this.side;
    const pinned = this.state.pinned(this.side);
    const inside = side === this.side && layer !== null;
    const show = (name, token, from = 0, size = tall) => {
      const { [name]: frame } = this.frames;
      frame.hidden = token === null;
      const [left, width] = [`${(100 * token) / T}%`, `${100 / T}%`];
      Object.assign(frame.style, { left, width, top: `${from}px`, height: `${size}px` });
    };
    show("peek", this.state.peeked(this.side));
    show("pinned", pinned);
    show("cell", inside ? pinned : null, layer * height, height);
  }

  reveal() {
    const pinned = this.state.pinned(this.side);
    if (!this.view.reveal || pinned === null) return;
    const { scrollWidth, clientWidth } = this.scroll; // lays out
    if (scrollWidth > clientWidth)
      this.scroll.scrollLeft = ((pinned + 0.5) / this.side.T) * scrollWidth - clientWidth / 2;
  }

  // The number of each layer, as many as there is room for.
  showRows(layers, height) {
    const { side, state } = this;
    const { side: own, layer: selected } = state.selected();
    const every = Math.ceil(LETTER / height);
    const isHere = (layer) => own === side && layer === selected;
    const label = (layer) => {
      const here = isHere(layer);
      const shown = (here || layer % every === 0) && layer;
      const title = `layer ${layer}: ${number(this.means[layer])} active neurons a token`;
      const look = { title, type: "button", tabindex: "-1", style: { height: `${height}px` } };
      const onclick = () => state.choose(side, { layer: here ? null : layer, neuron: null });
      return element(`button.tw-row${here ? ".tw-here" : ""}`, { ...look, onclick }, shown);
    };
    const look = { style: { height: "18px" } };
    const strip = () => element("div.tw-row", look, "text");
    const shown = [layers.filter(isHere), this.means].join(";");
    renew(this.labels, [["labels", shown, () => element("div", layers.map(label), strip())]]);
  }
}
