// Packed blocks (twell/inspector/packing.py) as typed arrays, and the passage of one side.

import { Tokens } from "./classes.js";
import { range } from "./words.js";

const NUMBERS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };
const ARRAYS = { ...NUMBERS, i1: Int8Array, f4: Float32Array };
const FAINTEST = 1e-30; // stands for an active neuron whose value is 0

export function fromBase64(text) {
  const letters = atob(text);
  const data = new Uint8Array(letters.length); // Uint8Array.from takes half a second
  for (let at = 0; at < data.length; at++) data[at] = letters.charCodeAt(at);
  return data;
}

export async function readBlock(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  let at = 4 + new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, at - 4)));
  const arrays = {};
  for (const [name, type, length, planes] of header.arrays) {
    const array = new ARRAYS[type](length);
    const entries = new Uint8Array(array.buffer);
    const size = array.BYTES_PER_ELEMENT;
    for (const plane of planes) {
      const packed = new Uint8Array(buffer, at, length);
      for (let n = 0, to = plane; n < length; n++, to += size) entries[to] = packed[n];
      at += length;
    }
    arrays[name] = array;
  }
  return { header, arrays };
}

export async function unpack(bytes) {
  const { header, arrays } = await readBlock(bytes);
  const sides = header.sides.map((about, number) => new Side(number, about, arrays));
  return { header, sides };
}

// The value with the largest size; 0 if there is none. NaN does not count.
export function strongestOf(values) {
  return values.reduce((most, value) => (Math.abs(value) > Math.abs(most) ? value : most), 0);
}

// The mean of what is not NaN; NaN if there is nothing.
export function meanOf(values) {
  const known = values.filter((value) => !Number.isNaN(value));
  return known.reduce((sum, value) => sum + value, 0) / known.length;
}

// One passage: T tokens under a model of L layers with N neurons each. A row is a layer and a
// token, layer * T + token.
class Side {
  constructor(number, about, arrays) {
    Object.assign(this, { number, about, T: about.tokens, L: about.layers, N: about.neurons });
    for (const [name, array] of Object.entries(arrays))
      if (name.startsWith(`${number}.`)) this[name.slice(2)] = array;
    const follows = (token) => token > 0 && this.position[token] > 0;
    this.tokens = new Tokens(about.strings, this.token, this.position, follows);
    this.surprise = this.logprob.map((logprob) => -logprob); // NaN at the first of a sequence
    this.loss = meanOf(this.surprise); // NaN if no token is predicted
    this.means = new Float32Array(this.T); // of active neurons in a layer
    this.counts.forEach((count, row) => (this.means[row % this.T] += count / this.L));
    // The entries of a row are pointer[row] to pointer[row + 1] of `neuron` and `value`.
    const most = about.strongest ?? Infinity;
    this.pointer = new Uint32Array(this.counts.length + 1);
    this.neuron = new Uint32Array(this.gap.length);
    this.counts.forEach((count, row) => {
      const end = (this.pointer[row + 1] = this.pointer[row] + Math.min(count, most));
      let neuron = 0;
      for (let at = this.pointer[row]; at < end; at++)
        this.neuron[at] = neuron += this.gap[at];
    });
  }

  text(token) {
    return this.about.strings[this.token[token]];
  }

  isSpecial(token) {
    return this.about.special.includes(this.token[token]);
  }

  sequenceOf(token) {
    return this.starts.findLastIndex((start) => start <= token);
  }

  // The likeliest next tokens after one, falling; undefined if no model ran.
  predictions(token) {
    const each = this.expected?.length / this.T;
    const one = (_, n) => ({
      text: this.about.expected[this.expected[token * each + n]],
      probability: this.probability[token * each + n],
    });
    return this.expected && Array.from({ length: each }, one);
  }

  // The text of the token behind one; null at the end of a sequence.
  next(token) {
    return this.position[token + 1] > 0 ? this.text(token + 1) : null;
  }

  // Direct effects on the logits of two words, the likeliest after a token and the one that follows:
  // of parts (packing.py names them) and of the strongest neurons. undefined if no model ran.
  effects(token) {
    if (!this.parts) return undefined;
    const pairs = (values) => {
      const each = values.length / this.T;
      const from = (n) => token * each + 2 * n;
      return range(0, each / 2 - 1).map((n) => values.subarray(from(n), from(n) + 2));
    };
    const each = this.mover.length / this.T;
    const strongest = pairs(this.moved).map((pair, n) => {
      const index = this.mover[token * each + n] - 1;
      return { index, layer: Math.floor(index / this.N), neuron: index % this.N, pair };
    });
    return { parts: pairs(this.parts), strongest: strongest.filter(({ index }) => index >= 0) };
  }

  // How the surprise of each token rises without a neuron; undefined if that was not computed.
  rise(layer, neuron) {
    const row = this.silenced?.indexOf(layer * this.N + neuron) ?? -1;
    return row < 0 ? undefined : this.rises.subarray(row * this.T, (row + 1) * this.T);
  }

  // Of an array of rows those of a layer: a value a token.
  row(name, layer) {
    return this[name].subarray(layer * this.T, (layer + 1) * this.T);
  }

  count(layer, token) {
    return this.counts[layer * this.T + token];
  }

  strongest(layer, token, most = Infinity) {
    const row = layer * this.T + token;
    const entries = [];
    for (let at = this.pointer[row]; at < this.pointer[row + 1]; at++) {
      const value = this.value[at];
      const share = this.total[row] > 0 ? Math.abs(value) / this.total[row] : 0;
      entries.push({ neuron: this.neuron[at], value, share });
    }
    entries.sort((a, b) => Math.abs(b.value) - Math.abs(a.value) || a.neuron - b.neuron);
    return entries.slice(0, most);
  }

  // The strongest firing of all at some tokens.
  strongestOf(tokens) {
    let best = { value: 0 };
    for (let layer = 0; layer < this.L; layer++)
      for (const token of tokens) {
        const row = layer * this.T + token;
        for (let at = this.pointer[row]; at < this.pointer[row + 1]; at++)
          if (Math.abs(this.value[at]) > Math.abs(best.value))
            best = { layer, token, neuron: this.neuron[at], value: this.value[at] };
      }
    return best;
  }

  // The firings of a neuron: tokens ascending, with their values. The last answer is kept, since a
  // drawing asks for one neuron many times.
  column(layer, neuron) {
    if (this.last?.layer === layer && this.last.neuron === neuron) return this.last;
    const [tokens, values] = [[], []];
    for (let token = 0; token < this.T; token++) {
      const row = layer * this.T + token;
      const from = this.pointer[row];
      const at = this.neuron.subarray(from, this.pointer[row + 1]).indexOf(neuron);
      if (at < 0) continue;
      tokens.push(token);
      values.push(this.value[from + at]);
    }
    return (this.last = { layer, neuron, tokens, values });
  }

  // h of a neuron at each token: 0 where it is silent, never 0 where it fires.
  valuesOf(layer, neuron) {
    const values = new Float32Array(this.T);
    const { tokens, values: h } = this.column(layer, neuron);
    tokens.forEach((token, n) => (values[token] = h[n] || FAINTEST));
    return values;
  }

  firings(layer, neuron) {
    return this.fires?.[layer * this.N + neuron] ?? this.column(layer, neuron).tokens.length;
  }
}
