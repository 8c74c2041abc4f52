// Packed blocks (twell/inspector/packing.py) as typed arrays, and the passage of one side.

import { BYTES } from "./words.js";

const ARRAYS = {
  ...{ u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i1: Int8Array },
  ...{ f4: Float32Array },
};
const FAINTEST = 1e-30; // stands for an active neuron whose value is 0

export function fromBase64(text) {
  const letters = atob(text);
  const data = new Uint8Array(letters.length); // Uint8Array.from takes half a second
  for (let at = 0; at < data.length; at++) data[at] = letters.charCodeAt(at);
  return data;
}

// Return a block's header, and functions that return an array, or floats of which the leading bytes
// were packed, by name; undefined if the block has no such array.
export async function readBlock(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const start = 4 + new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, start - 4)));
  const arrays = {};
  for (const [name, type, length, at] of header.arrays)
    arrays[name] = new ARRAYS[type](buffer, start + at, length);
  const array = (name) => arrays[name];
  const floats = (name) => {
    const planes = [0, 1, 2].map((byte) => arrays[`${name}_${byte}`]).filter(Boolean);
    if (planes.length) arrays[name] ??= fromBytes(planes);
    return arrays[name];
  };
  return { header, array, floats };
}

// float32 from its leading bytes, the first first.
function fromBytes(planes) {
  const bits = new Uint32Array(planes[0].length);
  planes.forEach((plane, place) => {
    for (let n = 0; n < bits.length; n++) bits[n] |= plane[n] << (24 - 8 * place);
  });
  return new Float32Array(bits.buffer);
}

export async function unpack(bytes) {
  const { header, array, floats } = await readBlock(bytes);
  const sides = header.sides.map((about, number) => {
    const own = (read) => (name) => read(`${number}.${name}`);
    return new Side(number, about, own(array), own(floats));
  });
  header.alike = ["alike_in", "alike_out"].map(floats); // cosines [L * N], of two models
  return { header, sides };
}

// The value with the largest size; 0 if there is none. NaN does not count.
export function strongestOf(values) {
  return values.reduce((most, value) => (Math.abs(value) > Math.abs(most) ? value : most), 0);
}

// One passage: T tokens under a model of L layers with N neurons each. A row is a layer and a
// token, layer * T + token.
class Side {
  constructor(number, about, array, floats) {
    Object.assign(this, { number, about, T: about.tokens, L: about.layers, N: about.neurons });
    for (const name of ["token", "starts", "position", "logprob", "counts", "fires", "expected"])
      this[name] = array(name);
    for (const name of ["total", "value", "rate", "probability"]) this[name] = floats(name);
    this.tileMax = array("tile_max");
    this.surprise = this.logprob.map((logprob) => -logprob); // NaN at the first of a sequence
    this.special = new Set(about.special);
    this.unpackNeurons([0, 1, 2].map((n) => array(`gap_${n}`)), about.strongest ?? Infinity);
  }

  // The entries of a row are pointer[row] to pointer[row + 1] of `neuron` and `value`.
  unpackNeurons([low, middle, high], most) {
    this.pointer = new Uint32Array(this.counts.length + 1);
    this.neuron = new Uint32Array(low.length);
    for (let row = 0; row < this.counts.length; row++) {
      this.pointer[row + 1] = this.pointer[row] + Math.min(this.counts[row], most);
      let neuron = 0;
      for (let at = this.pointer[row]; at < this.pointer[row + 1]; at++) {
        neuron += low[at] | (middle[at] << 8) | (high[at] << 16);
        this.neuron[at] = neuron;
      }
    }
  }

  text(token) {
    return this.about.strings[this.token[token]];
  }

  isSpecial(token) {
    return this.special.has(this.token[token]);
  }

  sequenceOf(token) {
    return this.starts.findLastIndex((start) => start <= token);
  }

  // The number in the passage of the token at `here`, if these tokens are there; else null.
  find(tokens, here) {
    for (let first = 0; first + tokens.length <= this.T; first++)
      if (tokens.every((text, n) => this.text(first + n) === text)) return first + here;
    return null;
  }

  // The characters that a token of bytes makes with its neighbours; "" if they are not whole.
  characters(token) {
    if (!BYTES.test(this.text(token))) return "";
    const sequence = this.sequenceOf(token);
    const bytesOf = (at) =>
      at < this.starts[sequence] || at >= this.starts[sequence + 1] || !BYTES.test(this.text(at))
        ? []
        : this.text(at).match(/[0-9A-F]{2}(?=>)/g).map((hex) => parseInt(hex, 16));
    const goesOn = (at) => bytesOf(at)[0] >> 6 === 2;
    let from = token;
    let to = token + 1;
    while (goesOn(from) && bytesOf(from - 1).length) from--;
    while (goesOn(to)) to++;
    const bytes = Array.from({ length: to - from }, (_, n) => bytesOf(from + n)).flat();
    const text = new TextDecoder().decode(new Uint8Array(bytes));
    return text.includes("\ufffd") ? "" : text;
  }

  // The likeliest next tokens after one, falling; undefined if no model ran.
  predictions(token) {
    if (!this.expected) return undefined;
    const each = this.expected.length / this.T;
    return Array.from({ length: each }, (_, n) => ({
      text: this.about.expected[this.expected[token * each + n]],
      probability: this.probability[token * each + n],
    }));
  }

  // The token after one in its sequence, or null.
  following(token) {
    return token + 1 < this.T && this.position[token + 1] > 0 ? token + 1 : null;
  }

  // Mean surprise of the predicted tokens; NaN if there is none.
  loss() {
    const known = this.surprise.filter((surprise) => !Number.isNaN(surprise));
    return known.reduce((sum, surprise) => sum + surprise, 0) / known.length;
  }

  count(layer, token) {
    return this.counts[layer * this.T + token];
  }

  fullestTile(layer, token) {
    return this.tileMax[layer * this.T + token];
  }

  // The kept neurons of a token and layer, strongest first.
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

  // The firings of a neuron: tokens ascending, with their values. Neurons of a row ascend.
  column(layer, neuron) {
    const [tokens, values] = [[], []];
    for (let token = 0; token < this.T; token++) {
      let from = this.pointer[layer * this.T + token];
      const end = this.pointer[layer * this.T + token + 1];
      for (let to = end; from < to; ) {
        const middle = (from + to) >> 1;
        if (this.neuron[middle] < neuron) from = middle + 1;
        else to = middle;
      }
      if (from === end || this.neuron[from] !== neuron) continue;
      tokens.push(token);
      values.push(this.value[from]);
    }
    return { tokens, values };
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

  // One value a token as a row of numbers; NaN for the tokens that are left out.
  included(valueOf, skipFirst) {
    const value = (_, token) => (skipFirst && !this.position[token] ? NaN : valueOf(token));
    return Float32Array.from({ length: this.T }, value);
  }

  // Mean active neurons of each token over these layers.
  means(first, last) {
    const means = new Float32Array(this.T);
    for (let layer = first; layer <= last; layer++)
      for (let token = 0; token < this.T; token++) means[token] += this.count(layer, token);
    return means.map((sum) => sum / (last - first + 1));
  }

  // The value of the strongest neuron at each token of a layer.
  peaks(layer) {
    this.peak ??= Float32Array.from(this.counts, (_, row) =>
      strongestOf(this.value.subarray(this.pointer[row], this.pointer[row + 1])),
    );
    return this.peak.subarray(layer * this.T, (layer + 1) * this.T);
  }
}
