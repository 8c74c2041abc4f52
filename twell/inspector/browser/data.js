// Packed blocks (twell/inspector/packing.py), unpacked into typed arrays, and the passage of one.

import { BYTES } from "./words.js";

const ARRAYS = {
  ...{ u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i1: Int8Array },
  ...{ f4: Float32Array },
};

export function fromBase64(text) {
  const letters = atob(text);
  const data = new Uint8Array(letters.length); // Uint8Array.from takes half a second
  for (let at = 0; at < data.length; at++) data[at] = letters.charCodeAt(at);
  return data;
}

// A block's header, and functions that return its arrays by name, and its floats of leading bytes.
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
    if (planes.length) arrays[name] ??= fromBytes(...planes);
    return arrays[name];
  };
  return { header, array, floats };
}

export async function unpack(bytes) {
  const { header, array, floats } = await readBlock(bytes);
  const sides = header.sides.map((about, number) => {
    const own = (read) => (name) => read(`${number}.${name}`);
    return new Side(number, about, own(array), own(floats));
  });
  // How alike a neuron is in two models, [L * N]; of one model nothing.
  header.alike = ["alike_in", "alike_out"].map(array).map((plane) => plane && fromBytes(plane));
  return { header, sides };
}

// float32 from its leading bytes, the first first; from bf16 where these are 16-bit numbers.
function fromBytes(...planes) {
  const bits = new Uint32Array(planes[0].length);
  planes.forEach((plane, place) => {
    const shift = 32 - 8 * (place + plane.BYTES_PER_ELEMENT);
    for (let n = 0; n < bits.length; n++) bits[n] |= plane[n] << shift;
  });
  return new Float32Array(bits.buffer);
}

// The value with the largest size; 0 where there is none. NaN is none.
export function strongestOf(values) {
  return values.reduce((most, value) => (Math.abs(value) > Math.abs(most) ? value : most), 0);
}

// One passage: T tokens under a model of L layers with N neurons each. Rows are (layer, token),
// layer * T + token; without layers, as for `included` and `rows(0, 0)`, a row is a token.
class Side {
  constructor(number, about, array, floats) {
    Object.assign(this, { number, about, T: about.tokens, L: about.layers, N: about.neurons });
    for (const name of ["token", "starts", "position", "logprob", "counts", "fires"])
      this[name] = array(name);
    this.tileMax = array("tile_max");
    this.total = fromBytes(array("total"));
    this.value = floats("value");
    this.rate = array("rate") && fromBytes(array("rate"));
    this.expected = array("expected");
    this.probability = array("probability") && fromBytes(array("probability"));
    this.surprise = this.logprob.map((logprob) => -logprob); // NaN at the first of a sequence
    this.special = new Set(about.special);
    this.memory = new Map();
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

  // Where these tokens stand in the passage: the number of the one at `here`, null if they do not.
  find(tokens, here) {
    for (let first = 0; first + tokens.length <= this.T; first++)
      if (tokens.every((text, n) => this.text(first + n) === text)) return first + here;
    return null;
  }

  // The characters that a token of bytes and its neighbours make together, if these are whole.
  characters(token) {
    if (!BYTES.test(this.text(token))) return "";
    const bytesOf = (at) => {
      const pairs = this.text(at).match(/[0-9A-F]{2}(?=>)/g);
      return pairs.map((hex) => parseInt(hex, 16));
    };
    const isBytes = (at) => BYTES.test(this.text(at));
    const goesOn = (at) => bytesOf(at)[0] >> 6 === 2;
    const sequence = this.sequenceOf(token);
    let from = token;
    let to = token + 1;
    while (from > this.starts[sequence] && goesOn(from) && isBytes(from - 1)) from--;
    while (to < this.starts[sequence + 1] && isBytes(to) && goesOn(to)) to++;
    const bytes = [];
    for (let at = from; at < to; at++) bytes.push(...bytesOf(at));
    const text = new TextDecoder().decode(new Uint8Array(bytes));
    return text.includes("\ufffd") ? "" : text;
  }

  // The likeliest next tokens after one, falling; null where no model ran.
  predictions(token) {
    if (!this.expected) return null;
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

  // Mean surprise of the tokens that are predicted; NaN where there is none.
  loss() {
    return this.remember("loss", () => {
      const known = this.surprise.filter((surprise) => !Number.isNaN(surprise));
      return known.reduce((sum, surprise) => sum + surprise, 0) / known.length;
    });
  }

  isSpecial(token) {
    return this.special.has(this.token[token]);
  }

  sequenceOf(token) {
    return this.starts.findLastIndex((start) => start <= token);
  }

  count(layer, token) {
    return this.counts[layer * this.T + token];
  }

  // How many more neurons are active than in another side; its layers may be fewer.
  change(left, layer, token) {
    return this.count(layer, token) - (layer < left.L ? left.count(layer, token) : 0);
  }

  largestChange(left, layer, skipFirst) {
    return this.remember(`change ${layer} ${skipFirst}`, () => {
      let largest = 0;
      for (const row of this.rows(layer, layer, skipFirst))
        largest = Math.max(largest, Math.abs(this.change(left, layer, row % this.T)));
      return largest;
    });
  }

  fullestTile(layer, token) {
    return this.tileMax[layer * this.T + token];
  }

  // Active neurons of a token and layer that were kept, strongest first.
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

  firings(layer, neuron) {
    if (this.fires) return this.fires[layer * this.N + neuron];
    return this.column(layer, neuron).tokens.length;
  }

  remember(key, compute) {
    if (!this.memory.has(key)) this.memory.set(key, compute());
    return this.memory.get(key);
  }

  // Whether a token counts for scales and is coloured.
  included(token, skipFirst) {
    return !skipFirst || this.position[token] > 0;
  }

  // The rows of these layers that count for scales.
  *rows(first, last, skipFirst) {
    for (let row = first * this.T; row < (last + 1) * this.T; row++)
      if (this.included(row % this.T, skipFirst)) yield row;
  }

  // Mean active neurons of each token over these layers.
  means(first, last) {
    return this.remember(`means ${first} ${last}`, () => {
      const means = new Float32Array(this.T);
      for (let layer = first; layer <= last; layer++)
        for (let token = 0; token < this.T; token++) means[token] += this.count(layer, token);
      return means.map((sum) => sum / (last - first + 1));
    });
  }

  // The least size above 0 and the largest, of one value a row.
  extent(name, values, first, last, skipFirst) {
    return this.remember(`extent ${name} ${first} ${last} ${skipFirst}`, () => {
      let least = Infinity;
      let largest = 0;
      for (const row of this.rows(first, last, skipFirst)) {
        const size = Math.abs(values[row]);
        if (size > 0 && size < least) least = size;
        if (size > largest) largest = size;
      }
      return [least, largest];
    });
  }

  largestSurprise(skipFirst) {
    return this.extent("surprise", this.surprise, 0, 0, skipFirst)[1];
  }

  meanRange(first, last, skipFirst) {
    return this.extent(`mean ${first} ${last}`, this.means(first, last), 0, 0, skipFirst);
  }

  countRange(first, last, skipFirst) {
    return this.extent("count", this.counts, first, last, skipFirst);
  }

  largestValue(first, last, skipFirst) {
    const peak = (_, row) =>
      strongestOf(this.value.subarray(this.pointer[row], this.pointer[row + 1]));
    const peaks = this.remember("peaks", () => Float32Array.from(this.counts, peak));
    return this.extent("value", peaks, first, last, skipFirst)[1];
  }

  // Mean active neurons of a layer.
  meanOf(layer, skipFirst) {
    return this.remember(`mean of ${layer} ${skipFirst}`, () => {
      const rows = [...this.rows(layer, layer, skipFirst)];
      const sum = rows.reduce((sum, row) => sum + this.counts[row], 0);
      return rows.length ? sum / rows.length : 0;
    });
  }

  // The fraction of rows in which a tile overflows.
  overflow(first, last, capacity, skipFirst) {
    return this.remember(`overflow ${first} ${last} ${capacity} ${skipFirst}`, () => {
      const rows = [...this.rows(first, last, skipFirst)];
      return rows.filter((row) => this.tileMax[row] > capacity).length / Math.max(rows.length, 1);
    });
  }
}
