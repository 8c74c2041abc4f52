// All neurons of a model (twell/inspector/catalog.py): chunks, which load when they are needed, and
// the cards that they make.

import { Tokens } from "./classes.js";
import { readBlock } from "./data.js";

export class Catalog {
  // load(name): a promise of a chunk's bytes; changed(): a chunk has come, or could not.
  constructor(load, changed) {
    Object.assign(this, { load, changed });
    this.chunks = new Map(); // by name: what was read, undefined until it comes, { error }
    this.noted = new Map(); // one's own notes since
  }

  // A chunk, or undefined while it loads; { error } if there is none.
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
      if (name === "text") read = new Text(read, this.chunk("overview"));
    } catch (error) {
      read = { error: error.message };
    }
    this.chunks.set(name, read);
    this.changed();
  }

  // What is known of a neuron: undefined until the overview is there.
  card(layer, neuron) {
    const overview = this.chunk("overview");
    if (!overview || overview.error) return overview;
    const { tokens, edges } = overview.about;
    const card = { overview, tokens, edges, note: this.note(layer, neuron), missing: [] };
    const use = (name, read) => {
      const chunk = this.chunk(name);
      if (chunk === undefined) card.waiting = true;
      else if (chunk.error) card.missing.push(chunk.error);
      else read(chunk);
    };
    if (overview.fires) {
      const at = layer * overview.N + neuron;
      for (const name of ["fires", "mean", "largest"]) card[name] = overview[name][at];
      use(`layer-${layer}`, (chunk) => readLayer(card, chunk, layer, neuron));
      use("text", (text) => readExamples(card, text, layer, neuron));
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
  // fires, peaks, mean, strength and largest: undefined without an aggregate.
  constructor({ header, arrays }) {
    Object.assign(this, arrays, { about: header, N: header.neurons, L: header.layers });
    const count = (text, n) => [text, this.occurrences[n]];
    this.counts = this.fires && new Map(header.strings.map(count)); // in the aggregate's text
    this.places = this.fires ? header.top + header.quantiles.length : 0; // of each neuron
    this.width = this.fires ? header.before + 1 + header.after : 0; // tokens of an example
  }

  peaksOf(index) {
    const found = rowOf(this.peaks, index, this.fires.length).filter((token) => token);
    return Array.from(found, (token) => this.about.strings[token - 1]);
  }
}

// The text around all examples: tokens in the order of the text, with gaps. at: of each place its
// index here, from 1; 0: none.
class Text extends Tokens {
  constructor({ arrays: { text, sequence, position, at } }, { about: { strings } }) {
    const follows = (n) => sequence[n] === sequence[n - 1] && position[n] === position[n - 1] + 1;
    super(strings, text, position, follows);
    Object.assign(this, { sequence, at });
    // The first and the last token of the run without gaps that a token is in.
    const size = text.length;
    this.first = new Uint32Array(size);
    this.last = new Uint32Array(size).fill(size - 1);
    for (let n = 1; n < size; n++) this.first[n] = follows(n) ? this.first[n - 1] : n;
    for (let n = size - 2; n >= 0; n--) this.last[n] = follows(n + 1) ? this.last[n + 1] : n;
  }

  around(at, before, after) {
    return [Math.max(this.first[at], at - before), Math.min(this.last[at], at + after)];
  }
}

// One of so many rows that an array has.
function rowOf(values, row, rows) {
  const each = values.length / rows;
  return values.subarray(row * each, (row + 1) * each);
}

function readLayer(card, { arrays }, layer, neuron) {
  const own = (name) => rowOf(arrays[name], neuron, card.overview.N);
  card.histogram = Array.from(own("histogram"));
  card.values = own("value");
  card.near = arrays.near.length ? own("near") : null;
  const phi = own("phi");
  const together = Array.from(own("together"), (other, n) => [layer, other - 1, phi[n]]);
  card.together = together.filter(([, other]) => other >= 0);
}

// Examples: { value, quantile, tokens, shades, here, sequence, position }; shades: h of each token,
// null if it is not kept.
function readExamples(card, text, layer, neuron) {
  if (!card.values) return;
  const { overview } = card;
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
      ...{ sequence: text.sequence[at], position: text.position[at] },
    });
  }
  card.top = examples.filter(({ quantile }) => quantile === null);
  card.quantiles = examples.filter(({ quantile }) => quantile !== null);
}

function readWords(card, { header, arrays }, neuron) {
  const { N } = card.overview;
  const own = (name) => rowOf(arrays[name], neuron, N);
  if (arrays.word) {
    const change = own("change");
    const words = Array.from(own("word"), (word, n) => [header.strings[word], change[n]]);
    card.promotes = words.slice(0, words.length / 2);
    card.suppresses = words.slice(words.length / 2);
  }
  card.like = header.like.map((name) => {
    const cosine = own(`${name}_cosine`);
    const pair = (at, n) => [Math.floor(at / N), at % N, cosine[n]];
    return [name, Array.from(own(name), pair)];
  });
}
