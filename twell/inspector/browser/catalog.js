// All neurons of a model (twell/inspector/catalog.py): chunks, loaded when they are needed, and the
// cards that they make.

import { readBlock } from "./data.js";

export class Catalog {
  // load(name): a promise of a chunk's bytes; changed(): a chunk has come, or could not.
  constructor(load, changed) {
    Object.assign(this, { load, changed });
    this.chunks = new Map(); // by name: what was read, undefined until it comes, { error }
    this.noted = new Map(); // one's own notes since
  }

  // A chunk, or undefined while it loads; { error } where there is none.
  chunk(name) {
    if (!this.chunks.has(name)) {
      this.chunks.set(name, undefined);
      this.fetch(name);
    }
    return this.chunks.get(name);
  }

  async fetch(name) {
    let read;
    try {
      read = await readBlock(await this.load(name));
      if (name === "overview") read = new Overview(read);
      if (name === "text") read = new Text(read, await this.overview());
    } catch (error) {
      read = { error: error.message };
    }
    this.chunks.set(name, read);
    this.changed();
  }

  async overview() {
    while (!this.chunk("overview")) await new Promise((done) => setTimeout(done));
    return this.chunk("overview");
  }

  // What is known of a neuron: undefined until the overview is there.
  card(layer, neuron) {
    const overview = this.chunk("overview");
    if (!overview || overview.error) return overview;
    const card = { overview, note: this.note(layer, neuron), missing: [], waiting: false };
    const use = (name, read) => {
      const chunk = this.chunk(name);
      if (chunk === undefined) card.waiting = true;
      else if (chunk.error) card.missing.push(chunk.error);
      else read(chunk);
    };
    if (overview.fires) {
      Object.assign(card, overview.facts(layer, neuron));
      use(`layer-${layer}`, (chunk) => readLayer(card, chunk, overview, neuron));
      use("text", (text) => readExamples(card, text, overview, layer, neuron));
    }
    if (overview.about.weights) use(`words-${layer}`, (chunk) => readWords(card, chunk, neuron));
    return card;
  }

  note(layer, neuron) {
    const key = `${layer}:${neuron}`;
    return this.noted.get(key) ?? this.chunk("overview").about.notes[key] ?? "";
  }
}

class Overview {
  constructor({ header, array, floats }) {
    this.about = header;
    this.N = header.neurons;
    this.L = header.layers;
    this.fires = array("fires"); // undefined without an aggregate
    this.peaks = array("peaks");
    for (const name of ["mean", "strength", "largest"]) this[name] = floats(name);
    this.places = this.fires ? header.top + header.quantiles.length : 0; // of each neuron
    this.width = this.fires ? header.before + 1 + header.after : 0; // tokens of an example
  }

  facts(layer, neuron) {
    const at = layer * this.N + neuron;
    const { tokens, edges } = this.about;
    const { [at]: fires } = this.fires;
    return { tokens, edges, fires, mean: this.mean[at], largest: this.largest[at] };
  }

  // The tokens at which a neuron fires most, each once.
  peaksOf(index) {
    const each = this.peaks.length / this.fires.length;
    const found = this.peaks.subarray(index * each, (index + 1) * each).filter((token) => token);
    return Array.from(found, (token) => this.about.strings[token - 1]);
  }
}

// The text around all examples: tokens in the order of the text, with gaps.
export class Text {
  constructor({ array }, overview) {
    this.token = array("text"); // index of the overview's strings
    this.strings = overview.about.strings;
    const gap = array("gap");
    const lengths = array("lengths");
    this.number = new Uint32Array(gap.length); // of the token in the whole text
    this.sequence = new Uint32Array(gap.length);
    this.starts = new Float64Array(lengths.length); // of sequences
    for (let s = 1; s < lengths.length; s++) this.starts[s] = this.starts[s - 1] + lengths[s - 1];
    let number = 0;
    let sequence = 0;
    for (let at = 0; at < gap.length; at++) {
      number += gap[at];
      while (number >= this.starts[sequence + 1]) sequence++;
      this.number[at] = number;
      this.sequence[at] = sequence;
    }
    this.at = array("at"); // of each place: its index here, from 1
  }

  // First and last index of the tokens around one, of those before and after it that are its own.
  around(at, before, after) {
    const same = (to) =>
      this.sequence[to] === this.sequence[at] && this.number[to] - this.number[at] === to - at;
    let first = at;
    let last = at;
    while (first > 0 && at - first < before && same(first - 1)) first--;
    while (last + 1 < this.number.length && last - at < after && same(last + 1)) last++;
    return [first, last];
  }

  position(at) {
    return this.number[at] - this.starts[this.sequence[at]];
  }
}

function readLayer(card, { array, floats }, overview, neuron) {
  const bins = card.edges.length - 1;
  const { together } = overview.about;
  card.histogram = Array.from(array("histogram").subarray(neuron * bins, (neuron + 1) * bins));
  card.values = floats("value").subarray(neuron * overview.places, (neuron + 1) * overview.places);
  const size = overview.places * overview.width;
  const near = overview.about.near && array("near").subarray(neuron * size, (neuron + 1) * size);
  card.near = near || null;
  const phi = floats("phi");
  card.together = [];
  for (let at = neuron * together; at < (neuron + 1) * together; at++)
    if (array("together")[at]) card.together.push([array("together")[at] - 1, phi[at]]);
}

// Examples: { value, quantile, tokens, shades, here, sequence, position }; shades: h of each token,
// null where it is not kept.
function readExamples(card, text, overview, layer, neuron) {
  if (!card.values) return;
  const { top, quantiles, before, after } = overview.about;
  const from = (layer * overview.N + neuron) * overview.places;
  const examples = [];
  for (let place = 0; place < overview.places; place++) {
    const at = text.at[from + place] - 1;
    if (at < 0) continue;
    const [first, last] = text.around(at, before, after);
    const value = card.values[place];
    const shade = (_, n) => {
      if (first + n === at) return value;
      if (!card.near) return null;
      const code = card.near[place * overview.width + before + first + n - at];
      return (code * card.largest) / 127;
    };
    const tokens = Array.from(text.token.subarray(first, last + 1), (token) => text.strings[token]);
    examples.push({
      ...{ value, tokens, here: at - first, shades: tokens.map(shade) },
      quantile: place < top ? null : quantiles[place - top],
      ...{ sequence: text.sequence[at], position: text.position(at), number: text.number[at] },
    });
  }
  card.top = examples.filter(({ quantile }) => quantile === null);
  card.quantiles = examples.filter(({ quantile }) => quantile !== null);
}

function readWords(card, { header, array, floats }, neuron) {
  const each = (array("word")?.length ?? 0) / card.overview.N;
  const change = floats("change");
  const words = Array.from({ length: each }, (_, n) => {
    const at = neuron * each + n;
    return [header.strings[array("word")[at]], change[at]];
  });
  if (each) {
    card.promotes = words.slice(0, each / 2);
    card.suppresses = words.slice(each / 2);
  }
  const { N } = card.overview;
  card.like = header.like.map((name) => {
    const count = array(name).length / N;
    const cosine = floats(`${name}_cosine`);
    const row = Array.from({ length: count }, (_, n) => neuron * count + n);
    const pair = (at) => [Math.floor(array(name)[at] / N), array(name)[at] % N, cosine[at]];
    return [name, row.map(pair)];
  });
}
