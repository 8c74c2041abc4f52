// The neuron inspector: one script for the widget in JupyterLab and for exported pages.
//
// twell/inspector.py packs a passage and its active neurons into one compressed block (`pack`); here it is unpacked into typed
// arrays and drawn. What is selected lives in the model's traits (side, token, layer, neuron, colour, ...), which Python
// shares; hovering only peeks. Text of tokens becomes text nodes, never HTML. In an exported page a small stand-in takes the
// place of the widget's model (`openPage`).

// --- data -------------------------------------------------------------------------------------------

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };

async function unpack(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const start = 4 + new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, start - 4)));
  const arrays = {};
  for (const [name, type, length, at] of header.arrays) arrays[name] = new ARRAYS[type](buffer, start + at, length);
  const sides = header.sides.map((about, number) => new Side(number, about, (name) => arrays[`${number}.${name}`]));
  return { header, sides, cards: arrays.cards };
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

// One passage: T tokens under a model of L layers with N neurons each. Rows are (layer, token), layer * T + token.
class Side {
  constructor(number, about, array) {
    Object.assign(this, { number, about, T: about.tokens, L: about.layers, N: about.neurons });
    this.token = array("token");
    this.starts = array("starts");
    this.position = array("position");
    this.logprob = array("logprob");
    this.counts = array("counts");
    this.tileMax = array("tile_max");
    this.total = fromBytes(array("total"));
    this.value = fromBytes(...[0, 1, 2].map((byte) => array(`value_${byte}`)).filter(Boolean));
    this.fires = array("fires");
    this.rate = array("rate") && fromBytes(array("rate"));
    this.special = new Set(about.special);
    const most = about.strongest ?? Infinity;
    this.pointer = new Uint32Array(this.counts.length + 1);
    for (let row = 0; row < this.counts.length; row++) {
      this.pointer[row + 1] = this.pointer[row] + Math.min(this.counts[row], most);
    }
    const low = array("gap_low");
    const high = array("gap_high");
    this.neuron = new Uint16Array(low.length);
    for (let row = 0; row < this.counts.length; row++) {
      let neuron = 0;
      for (let at = this.pointer[row]; at < this.pointer[row + 1]; at++) {
        neuron += low[at] | (high[at] << 8);
        this.neuron[at] = neuron;
      }
    }
    this.columns = [];
    this.memory = new Map();
  }

  text(token) {
    return this.about.strings[this.token[token]];
  }

  // Of a token that is bytes only: the characters that it and its neighbours make together, if these are whole.
  characters(token) {
    if (!BYTES.test(this.text(token))) return "";
    const bytesOf = (at) =>
      this.text(at)
        .match(/[0-9A-F]{2}(?=>)/g)
        .map((hex) => parseInt(hex, 16));
    const sequence = this.sequenceOf(token);
    const first = this.starts[sequence];
    const last = this.starts[sequence + 1];
    let from = token;
    let to = token + 1;
    while (from > first && bytesOf(from)[0] >> 6 === 2 && BYTES.test(this.text(from - 1))) from--;
    const bytes = [];
    for (let at = from; at < to; at++) bytes.push(...bytesOf(at));
    const next = () => to < last && BYTES.test(this.text(to)) && bytesOf(to)[0] >> 6 === 2;
    while (next()) bytes.push(...bytesOf(to++));
    const text = new TextDecoder().decode(new Uint8Array(bytes));
    return text.includes("\ufffd") ? "" : text;
  }

  isSpecial(token) {
    return this.special.has(this.token[token]);
  }

  surprise(token) {
    return -this.logprob[token]; // NaN at the first of a sequence
  }

  count(layer, token) {
    return this.counts[layer * this.T + token];
  }

  // Active neurons of a token and layer that were kept, strongest first.
  strongest(layer, token, most = Infinity) {
    const row = layer * this.T + token;
    const found = [];
    for (let at = this.pointer[row]; at < this.pointer[row + 1]; at++) {
      const value = this.value[at];
      found.push({
        neuron: this.neuron[at],
        value,
        share: this.total[row] > 0 ? Math.abs(value) / this.total[row] : 0,
      });
    }
    found.sort((a, b) => Math.abs(b.value) - Math.abs(a.value) || a.neuron - b.neuron);
    return found.slice(0, most);
  }

  // Where a neuron fires: tokens ascending, with their values. Each layer is turned around when it is first asked for.
  column(layer, neuron) {
    if (!this.columns[layer]) {
      const from = this.pointer[layer * this.T];
      const to = this.pointer[(layer + 1) * this.T];
      const start = new Uint32Array(this.N + 1);
      const tokens = new Uint32Array(to - from);
      const values = new Float32Array(to - from);
      for (let at = from; at < to; at++) start[this.neuron[at] + 1]++;
      for (let n = 0; n < this.N; n++) start[n + 1] += start[n];
      const next = start.slice();
      for (let token = 0; token < this.T; token++) {
        const row = layer * this.T + token;
        for (let at = this.pointer[row]; at < this.pointer[row + 1]; at++) {
          const place = next[this.neuron[at]]++;
          tokens[place] = token;
          values[place] = this.value[at];
        }
      }
      this.columns[layer] = { start, tokens, values };
    }
    const { start, tokens, values } = this.columns[layer];
    const inside = [start[neuron], start[neuron + 1]];
    return { tokens: tokens.subarray(...inside), values: values.subarray(...inside) };
  }

  firings(layer, neuron) {
    return this.fires ? this.fires[layer * this.N + neuron] : this.column(layer, neuron).tokens.length;
  }

  remember(key, compute) {
    if (!this.memory.has(key)) this.memory.set(key, compute());
    return this.memory.get(key);
  }

  // Whether a token counts for scales and is coloured.
  included(token, skipFirst) {
    return !skipFirst || this.position[token] > 0;
  }

  // Mean active neurons of each token over these layers.
  means(first, last) {
    return this.remember(`means ${first} ${last}`, () => {
      const means = new Float32Array(this.T);
      for (let layer = first; layer <= last; layer++) {
        for (let token = 0; token < this.T; token++) means[token] += this.count(layer, token);
      }
      return means.map((sum) => sum / (last - first + 1));
    });
  }

  // The least of them above 0.
  leastMean(first, last, skipFirst) {
    return this.remember(`least ${first} ${last} ${skipFirst}`, () => {
      let least = Infinity;
      this.means(first, last).forEach((mean, token) => {
        if (mean > 0 && mean < least && this.included(token, skipFirst)) least = mean;
      });
      return least;
    });
  }

  // The least count above 0 and the largest.
  countRange(first, last, skipFirst) {
    return this.remember(`count ${first} ${last} ${skipFirst}`, () => {
      let least = Infinity;
      let largest = 0;
      for (let row = first * this.T; row < (last + 1) * this.T; row++) {
        const count = this.counts[row];
        if (!count || !this.included(row % this.T, skipFirst)) continue;
        if (count < least) least = count;
        if (count > largest) largest = count;
      }
      return [least, largest];
    });
  }

  largestValue(first, last, skipFirst) {
    return this.remember(`value ${first} ${last} ${skipFirst}`, () => {
      let largest = 0;
      for (let row = first * this.T; row < (last + 1) * this.T; row++) {
        if (!this.included(row % this.T, skipFirst)) continue;
        for (let at = this.pointer[row]; at < this.pointer[row + 1]; at++) {
          const size = Math.abs(this.value[at]);
          if (size > largest) largest = size;
        }
      }
      return largest;
    });
  }

  sequenceOf(token) {
    let low = 0;
    let high = this.starts.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= token) low = middle;
      else high = middle;
    }
    return low;
  }
}

// --- words and numbers ------------------------------------------------------------------------------

const integer = (value) => value.toLocaleString("en");

function number(value) {
  if (Number.isNaN(value)) return "NaN";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1000) return size < 1e7 ? integer(Math.round(value)) : value.toExponential(2);
  if (size < 0.001) return value.toExponential(2);
  return String(Number(value.toPrecision(3)));
}

// The same number of digits everywhere in a column, with a sign that is as wide as a plus.
function signed(value) {
  const size = Math.abs(value);
  const text =
    size === 0 || Number.isNaN(size) ? number(size) : size >= 1000 || size < 0.001 ? number(size) : size.toPrecision(3);
  return size === 0 ? text : (value < 0 ? "\u2212" : "+") + text;
}

function percent(fraction) {
  const value = 100 * fraction;
  if (value === 0) return "0%";
  if (value < 0.01) return "<0.01%";
  return `${value >= 9.95 ? value.toFixed(0) : value >= 0.095 ? value.toFixed(1) : value.toFixed(2)}%`;
}

function plural(count, word) {
  return `${integer(count)} ${word}${count === 1 ? "" : "s"}`;
}

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function svg(tag, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  return node;
}

const PLAIN = /^ ?[\p{L}\p{N}\p{P}\p{S}]+$/u; // text that shows itself
const BYTES = /^(?:<0x[0-9A-F]{2}>)+$/;
// What would not be seen, or would move other text: controls, format characters, separators, white space but the space itself.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\p{Zl}\p{Zp}\uFEFF]|(?! )\p{Zs}/u;

// The text of a token as nodes in which everything can be seen. `breaks`: a line of text ends at a newline; the first space is
// left to the style of the token.
function pieces(text, breaks = false) {
  if (BYTES.test(text)) return [make("span", { class: "tw-bytes" }, text)];
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  const mark = (name, shown) => {
    flush();
    nodes.push(make("span", { class: name }, shown));
  };
  const characters = [...text];
  characters.forEach((character, at) => {
    if (character === " " && breaks && at === 0) plain += " ";
    else if (character === " ") mark("tw-space", " ");
    else if (character === "\n") {
      mark("tw-mark", "\u23ce");
      if (breaks && at < characters.length - 1) nodes.push(make("br"));
    } else if (character === "\t") mark("tw-mark", "\u21e5\u00a0\u00a0");
    else if (plain && /[\u200d\ufe0f]/.test(character))
      plain += character; // they join emoji and letters
    else if (HIDDEN.test(character))
      mark("tw-bytes", `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
    else plain += character;
  });
  flush();
  if (!nodes.length) mark("tw-bytes", "empty");
  return nodes;
}

const RIGHT_TO_LEFT = /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/gu;

function direction(text) {
  const right = (text.match(RIGHT_TO_LEFT) ?? []).length;
  return right && 2 * right > (text.match(/\p{L}/gu) ?? []).length ? "rtl" : "ltr";
}

// --- colours ----------------------------------------------------------------------------------------

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// 256 colours between anchors; `bare` is the one that stays transparent, which lets the page show through.
class Ramp {
  constructor(anchors, bare) {
    const stops = anchors.map(channels);
    this.rgb = Array.from({ length: 256 }, (_, n) => {
      const place = (n / 255) * (stops.length - 1);
      const left = Math.min(Math.floor(place), stops.length - 2);
      return stops[left].map((from, c) => Math.round(from + (stops[left + 1][c] - from) * (place - left)));
    });
    this.bare = bare;
    this.fill = this.rgb.map(([r, g, b], n) => (n === bare ? "" : `rgb(${r},${g},${b})`));
    this.ink = this.rgb.map(([r, g, b], n) =>
      n === bare ? "" : 0.299 * r + 0.587 * g + 0.114 * b < 140 ? "#fff" : "#16191d",
    );
  }

  gradient(of) {
    const stops = Array.from({ length: 33 }, (_, n) => this.fill[of(n / 32)] || "transparent");
    return `linear-gradient(to right, ${stops.join(", ")})`;
  }
}

// A scale gives every value its place in a ramp. Counts rise by their logarithm from the least to the largest, surprise evenly,
// signed values both ways from 0; what is not 0 is never as pale as 0.
const FAINT = 0.1;

function makeScale(kind, largest, label, ramps, least = 1) {
  const top = largest > 0 ? largest : 1;
  const low = Math.min(least, top);
  const span = Math.log(top / low);
  const rise = kind === "log" ? (v) => (span ? Math.log(v / low) / span : 1) : (v) => v / top;
  const share = (value) => FAINT + (1 - FAINT) * Math.min(Math.max(rise(Math.abs(value)), 0), 1);
  const scale = { kind, top, label, ramp: kind === "signed" ? ramps.diverging : ramps.sequential };
  if (kind === "signed") scale.index = (v) => (v === 0 ? 128 : Math.round(127.5 + 127.5 * Math.sign(v) * share(v)));
  else scale.index = (v) => (v === 0 ? 0 : Math.round(255 * share(v)));
  const signs = [-top, 0, top].map((v, n) => [n / 2, v]);
  const steps = kind === "log" ? ticksOfLog(low, top) : [0, top / 2, top];
  scale.ticks = kind === "signed" ? signs : steps.map((v) => [rise(v), v]);
  scale.at =
    kind === "signed" ? (t) => (2 * t - 1) * top : kind === "log" ? (t) => low * Math.exp(t * span) : (t) => t * top;
  return scale;
}

function ticksOfLog(low, top) {
  const ticks = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power < top; power *= 10)
    ticks.push(...[1, 2, 5].map((step) => step * power));
  const room = Math.log(top / low) / 7; // ticks stand apart, and from the ends
  const kept = [low];
  for (const tick of ticks) if (Math.log(tick / kept.at(-1)) > room && Math.log(top / tick) > room) kept.push(tick);
  return top > low ? [...kept, top] : [low];
}

// Light or dark, as whatever stands behind the element is: JupyterLab's theme, the page's, the system's.
function isDark(element) {
  for (let node = element; node; node = node.parentElement) {
    const found = getComputedStyle(node)
      .backgroundColor.match(/[\d.]+/g)
      ?.map(Number);
    if (found && (found.length < 4 || found[3] > 0.5))
      return 0.299 * found[0] + 0.587 * found[1] + 0.114 * found[2] < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

// --- the view ---------------------------------------------------------------------------------------

const TRAITS = [
  "side",
  "token",
  "layer",
  "neuron",
  "colour",
  "scale",
  "limit",
  "layers",
  "skip_first",
  "compression",
  "difference",
];
const NAMES = { count: "active neurons", neuron: "one neuron", surprise: "surprise" };
const KEYS = [
  ["\u2190 \u2192", "token"],
  ["\u2191 \u2193", "layer"],
  ["Enter", "its strongest neuron"],
  ["Esc", "let go"],
];
const CHIPS = 3; // neurons of a layer that is not opened
const NEAR = 8; // places where a neuron fires
const FAR = 200; // when all are asked for
const OPENED = 12; // of one that is
const OUT = 512; // the colour of a token that is left out
const WAIT = 350; // ms without a key before typed text is run
let views = 0;

class View {
  constructor(model, el) {
    this.model = model;
    this.prefix = `tw${++views}-`;
    this.sides = [];
    this.parts = []; // of each side: its elements
    this.known = new Map(); // cards by "side:layer:neuron"
    this.peek = null; // { side, token } or { side, layer, neuron } under the pointer
    this.places = "passage";
    this.zoom = 0;
    this.open = false; // all neurons of the opened layer are listed
    this.far = false; // all places in the passage where the neuron fires
    // JupyterLab leaves keys alone below this attribute.
    this.root = make("div", { class: "twell", "data-lm-suppress-shortcuts": "true" });
    el.append(this.root);
    this.tip = make("div", { class: "tw-tip", hidden: true });
    this.said = make("div", { class: "tw-said", "aria-live": "polite" });
    this.stops = [];
    const listen = (name, react) => {
      model.on(name, react);
      this.stops.push(() => model.off(name, react));
    };
    for (const trait of TRAITS) listen(`change:${trait}`, () => this.changed(trait));
    for (const trait of ["busy", "error"]) listen(`change:${trait}`, () => this.showState());
    listen("change:texts", () => this.showTexts());
    listen("change:data", () => this.load());
    listen("msg:custom", (message) => this.answered(message));
    const watch = new MutationObserver(() => this.themed());
    for (const node of [document.documentElement, document.body]) watch.observe(node, { attributes: true });
    const system = matchMedia("(prefers-color-scheme: dark)");
    const react = () => this.themed();
    system.addEventListener("change", react);
    // Widths come from here and are never asked for while drawing, which would lay out everything once more.
    const size = (this.sizes = new ResizeObserver((entries) => {
      for (const { target, contentRect } of entries) target.wide = contentRect.width;
      this.drawHeat();
    }));
    this.stops.push(
      () => watch.disconnect(),
      () => system.removeEventListener("change", react),
      () => size.disconnect(),
    );
    this.load();
  }

  close() {
    for (const stop of this.stops) stop();
    this.closed = true;
    cancelAnimationFrame(this.drawing);
    clearTimeout(this.typing);
    this.root.remove();
  }

  get(name) {
    return this.model.get(name);
  }

  // Without a neuron nothing can be coloured by one.
  put(changes) {
    if (changes.neuron === null && this.get("colour") === "neuron")
      changes = { colour: "count", scale: "all", ...changes };
    for (const [name, value] of Object.entries(changes)) this.model.set(name, value);
    this.model.save_changes();
  }

  async load() {
    const bytes = this.get("data");
    try {
      const found = await unpack(bytes);
      if (this.closed || bytes !== this.get("data")) return;
      Object.assign(this, found);
    } catch (error) {
      const why = typeof DecompressionStream === "undefined" ? "it needs a browser of 2023 or later" : error.message;
      this.root.replaceChildren(make("p", { class: "tw-empty" }, `The passage cannot be shown: ${why}.`));
      return;
    }
    this.build();
  }

  // --- state

  // The first and last of the layers that are shown.
  range(side) {
    const [first, last] = this.get("layers") ?? [0, side.L - 1];
    return [Math.min(first, side.L - 1), Math.min(last, side.L - 1)];
  }

  selected() {
    const side = this.sides[this.get("side")] ?? this.sides[0];
    // A page's address may ask for what is not there.
    const known = (name, number) => (this.get(name) >= 0 && this.get(name) < number ? this.get(name) : null);
    return { side, token: known("token", side.T), layer: known("layer", side.L), neuron: known("neuron", side.N) };
  }

  // Whether neurons of one side are those of the other: two texts under one model.
  shares(one, other) {
    return one === other || this.header.same;
  }

  // The neuron whose values colour a side's passage: the one under the pointer, else the chosen one.
  shownNeuron(side) {
    if (this.peek?.neuron !== undefined) return this.shares(this.peek.side, side) ? { ...this.peek, side } : null;
    const { side: own, layer, neuron } = this.selected();
    return this.shares(own, side) && layer !== null && neuron !== null ? { side, layer, neuron } : null;
  }

  colouring(side) {
    if (this.peek?.neuron !== undefined && this.shares(this.peek.side, side)) return "neuron";
    const colour = this.get("colour");
    if (colour !== "neuron") return colour;
    return this.shownNeuron(side) ? "neuron" : "count";
  }

  // A token of the other side that stands for this one.
  pinned(side) {
    const { side: own, token } = this.selected();
    return token !== null && (own === side || this.header.aligned) && token < side.T ? token : null;
  }

  changed(trait) {
    if (!this.header) return;
    if (["token", "side"].includes(trait)) this.reveal = true;
    if (["token", "layer", "side"].includes(trait)) this.open = false;
    if (["neuron", "layer", "side"].includes(trait)) this.far = false;
    this.schedule();
  }

  schedule() {
    cancelAnimationFrame(this.drawing);
    this.drawing = requestAnimationFrame(() => this.update());
  }

  choose(side, changes) {
    this.put({ side: side.number, ...changes });
  }

  chooseNeuron(side, layer, neuron, more = {}) {
    const scale = this.get("colour") === "neuron" ? {} : { scale: "neuron" };
    this.choose(side, { layer, neuron, colour: "neuron", ...scale, ...more });
  }

  // What the colours of a passage share a scale with: a neuron that is only peeked at has one of its own.
  scaling(how) {
    if (how !== "neuron") return this.get("scale") === "layer" ? "layer" : "all";
    return this.get("colour") === "neuron" ? this.get("scale") : "neuron";
  }

  letGo() {
    const { token, layer, neuron } = this.selected();
    if (neuron !== null) this.put({ neuron: null });
    else if (token !== null) this.put({ token: null });
    else if (layer !== null) this.put({ layer: null });
  }

  pressed(event, side) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { side: own, token, layer } = this.selected();
    const at = own === side || this.header.aligned ? token : null;
    const [first, last] = this.range(side);
    const go = (to) =>
      this.choose(side, {
        token: Math.max(0, Math.min(side.T - 1, to)),
        ...(this.shares(own, side) ? {} : { neuron: null }),
      });
    const climb = (by) =>
      this.choose(side, {
        layer: layer === null ? (by > 0 ? first : last) : Math.max(first, Math.min(last, layer + by)),
        neuron: null,
      });
    const moves = {
      ArrowRight: () => go(at === null ? 0 : at + 1),
      ArrowLeft: () => go(at === null ? side.T - 1 : at - 1),
      ArrowDown: () => climb(1),
      ArrowUp: () => climb(-1),
      Home: () => go(0),
      End: () => go(side.T - 1),
      Enter: () => {
        const best = at !== null && layer !== null && side.strongest(layer, at, 1)[0];
        if (best) this.chooseNeuron(side, layer, best.neuron, { token: at });
      },
      Escape: () => this.letGo(),
    };
    if (!moves[event.key] || !side.T) return;
    event.preventDefault();
    event.stopPropagation();
    this.peek = null;
    moves[event.key]();
  }

  // --- building

  // The frame stays when another text is shown, so that whoever types keeps the cursor.
  build() {
    this.theme();
    const two = this.sides.length === 2;
    if (this.frame?.sides.length !== this.sides.length) this.buildFrame(two);
    this.peek = null;
    this.tip.hidden = true;
    this.sizes.disconnect();
    this.root.classList.toggle("tw-aligned", this.header.aligned);
    this.root.classList.toggle("tw-nothing", !this.sides.some((side) => side.T));
    this.parts = this.sides.map((side) => this.buildSide(side));
    this.frame.head.replaceChildren(...this.buildHead());
    this.frame.bar.replaceChildren(this.buildBar());
    this.frame.sides.forEach(({ facts, passage }, n) => {
      facts.replaceChildren(...(two ? [this.facts(this.sides[n])] : []));
      passage.replaceChildren(...this.parts[n].nodes);
    });
    this.reveal = true;
    this.showTexts();
    this.showState();
    this.update();
    performance.mark("twell-painted");
  }

  buildFrame(two) {
    const typed = this.get("runs") ? this.get("texts").map((_, which) => this.buildText(which)) : [];
    const own = typed.length === this.sides.length;
    const box = (name) => make("div", { class: name });
    this.cardsBox = box("tw-cards");
    this.frame = {
      head: box("tw-head"),
      bar: box(""),
      sides: this.sides.map(() => ({ facts: box(""), passage: box("") })),
    };
    const sides = this.frame.sides.map(({ facts, passage }, n) =>
      make("section", { class: "tw-side" }, facts, own && typed[n], passage),
    );
    this.root.classList.toggle("tw-two", two);
    this.root.replaceChildren(
      this.frame.head,
      this.frame.bar,
      ...(own ? [] : typed),
      make("div", { class: "tw-main" }, make("div", { class: "tw-sides" }, ...sides), this.cardsBox),
      make(
        "div",
        { class: "tw-keys" },
        ...KEYS.map(([key, what]) => make("span", {}, make("kbd", {}, key), ` ${what}`)),
      ),
      this.tip,
      this.said,
    );
  }

  // Name and size of a side: above all, or above each of two.
  facts(side) {
    const { about } = side;
    const found = [];
    if (about.of > side.T)
      found.push(`tokens ${integer(about.start)}\u2013${integer(about.start + side.T - 1)} of ${integer(about.of)}`);
    else found.push(plural(side.T, "token"));
    found.push(`${plural(side.L, "layer")} of ${integer(side.N)} neurons`);
    if (side.T) {
      const mean = side.counts.reduce((sum, count) => sum + count, 0) / side.counts.length;
      found.push(`${number(mean)} active (${percent(mean / side.N)})`);
    }
    return make(
      "div",
      { class: "tw-name" },
      make("b", {}, about.name),
      make("span", { class: "tw-quiet" }, found.join(" \u00b7 ")),
    );
  }

  buildHead() {
    const notes = this.sides.every((side) => side.about.precise) ? [] : ["Values are rounded to bf16, within 0.4%."];
    const most = Math.min(...this.sides.map((side) => side.about.strongest ?? Infinity));
    if (most < Infinity)
      notes.unshift(
        `Of each token and layer the ${most} strongest neurons are kept here; counts, shares and marks are of all.`,
      );
    const note =
      notes.length > 0 && make("div", { class: most < Infinity ? "tw-note tw-strong" : "tw-note" }, notes.join(" "));
    return [this.sides.length === 1 && this.facts(this.sides[0]), note].filter(Boolean);
  }

  buildBar() {
    const choice = (trait, values, label, names) => {
      const select = make(
        "select",
        { "aria-label": label, onchange: (event) => this.put({ [trait]: values[event.target.selectedIndex] }) },
        ...values.map((value, n) => make("option", {}, names[n])),
      );
      return { select, show: () => (select.selectedIndex = values.findIndex((value) => value === this.get(trait))) };
    };
    const group = (label, ...nodes) => make("label", { class: "tw-group" }, make("span", {}, label), ...nodes);
    const colours = Object.keys(NAMES).map((name) =>
      make(
        "button",
        {
          type: "button",
          role: "radio",
          class: "tw-option",
          onclick: () => this.put({ colour: name }),
          data: { colour: name },
        },
        NAMES[name],
      ),
    );
    const layers = Array.from({ length: Math.max(...this.sides.map((side) => side.L)) }, (_, n) => n);
    const bound = (which, label) =>
      make(
        "select",
        {
          "aria-label": label,
          onchange: (event) => {
            const range = [...(this.get("layers") ?? [0, layers.length - 1])];
            range[which] = Number(event.target.value);
            if (range[0] > range[1]) range[1 - which] = range[which];
            this.put({ layers: range[0] === 0 && range[1] === layers.length - 1 ? null : range });
          },
        },
        ...layers.map((layer) => make("option", { value: String(layer) }, String(layer))),
      );
    const from = bound(0, "first layer");
    const to = bound(1, "last layer");
    const scale = choice("scale", ["all", "layer", "neuron"], "colour scale", [
      "the same for all",
      "each layer its own",
      "each neuron its own",
    ]);
    const limit = make("input", {
      type: "number",
      min: "0",
      step: "any",
      placeholder: "auto",
      class: "tw-number",
      "aria-label": "end of the colour scale",
      onchange: (event) => this.put({ limit: Number(event.target.value) > 0 ? Number(event.target.value) : null }),
    });
    const skip = make("input", {
      type: "checkbox",
      onchange: (event) => this.put({ skip_first: event.target.checked }),
    });
    const compressions = this.header.compressions;
    const marks = choice(
      "compression",
      compressions,
      "mark overflow of tiles at this compression",
      compressions.map((c) => (c ? `C = ${c}` : "off")),
    );
    const starts = this.sides[0].about.starts_with;
    const begin = make(
      "select",
      {
        "aria-label": "go to",
        onchange: (event) => {
          const chosen = starts[event.target.selectedIndex - 1];
          event.target.selectedIndex = 0;
          if (chosen) this.preset(chosen);
        },
      },
      make("option", {}, "Go to \u2026"),
      ...starts.map(({ name, note }) => make("option", { title: note }, name)),
    );
    const difference = make("input", {
      type: "checkbox",
      onchange: (event) => this.put({ difference: event.target.checked }),
    });
    this.controls = () => {
      const { neuron } = this.selected();
      const colour = neuron === null && this.get("colour") === "neuron" ? "count" : this.get("colour");
      for (const button of colours) {
        const name = button.dataset.colour;
        button.setAttribute("aria-checked", String(name === colour));
        button.disabled = name === "neuron" && neuron === null;
        button.title = button.disabled ? "click a neuron first" : "";
      }
      scale.show();
      scale.select.options[2].disabled = colour !== "neuron";
      scale.select.disabled = colour === "surprise";
      limit.parentElement.hidden = this.scaling(colour) !== "all";
      limit.value = this.get("limit") ?? "";
      marks.show();
      skip.checked = this.get("skip_first");
      const [first, last] = this.get("layers") ?? [0, layers.length - 1];
      from.value = String(first);
      to.value = String(last);
      difference.checked = this.get("difference");
    };
    return make(
      "div",
      { class: "tw-bar", role: "toolbar", "aria-label": "what is shown" },
      make(
        "div",
        { class: "tw-group", role: "radiogroup", "aria-label": "colour" },
        make("span", {}, "Colour"),
        make("span", { class: "tw-options" }, ...colours),
      ),
      group("Scale", scale.select),
      group("up to", limit),
      group("Layers", from, make("span", {}, "to"), to),
      group("Overflow", marks.select),
      make("label", { class: "tw-group" }, skip, make("span", {}, "without first tokens")),
      this.header.aligned &&
        make("label", { class: "tw-group" }, difference, make("span", {}, "right: difference to left")),
      begin,
    );
  }

  buildText(which) {
    const box = make("textarea", {
      class: "tw-type",
      rows: "2",
      spellcheck: "false",
      placeholder: "Type a text; it is run at once.",
      dir: "auto",
      "aria-label": "text to run",
      data: { focus: `text-${which}` },
      oninput: () => {
        clearTimeout(this.typing);
        this.typing = setTimeout(() => this.send(), WAIT);
      },
    });
    return make("div", { class: "tw-typing" }, box, make("span", { class: "tw-state", role: "status" }));
  }

  // One run at a time: what is typed meanwhile waits for its end.
  send() {
    const texts = [...this.root.querySelectorAll(".tw-type")].map((box) => box.value);
    if (JSON.stringify(texts) === JSON.stringify(this.get("texts"))) return;
    this.waiting = this.get("busy");
    if (!this.waiting) this.put({ texts, busy: true });
  }

  // What Python set; never over what is being typed.
  showTexts() {
    [...this.root.querySelectorAll(".tw-type")].forEach((box, n) => {
      if (box !== this.active()) box.value = this.get("texts")[n] ?? "";
    });
  }

  active() {
    return this.root.getRootNode().activeElement;
  }

  showState() {
    const busy = this.get("busy");
    const error = this.get("error");
    this.root.classList.toggle("tw-busy", busy);
    for (const state of this.root.querySelectorAll(".tw-state")) {
      state.textContent = busy ? "running \u2026" : error;
      state.classList.toggle("tw-error", !busy && error !== "");
    }
    if (!busy && this.waiting) {
      this.waiting = false;
      this.send();
    }
  }

  buildSide(side) {
    const part = { spans: [], painted: new Int16Array(side.T).fill(-1), left: 0 };
    const keys = (event) => this.pressed(event, side);
    part.text = make("div", {
      class: "tw-text",
      tabindex: "0",
      role: "listbox",
      "aria-label": `passage, ${side.about.name}`,
      onkeydown: keys,
    });
    part.legend = make("div", { class: "tw-legend" });
    part.heatLegend = make("div", { class: "tw-legend" });
    this.fillText(side, part);
    const tokenAt = (event) => event.target.closest?.(".tw-t")?.number;
    part.text.addEventListener("pointerover", (event) => this.hover(side, tokenAt(event), event));
    part.text.addEventListener("pointerleave", () => this.hover(side, undefined));
    part.text.addEventListener("click", (event) => {
      const token = tokenAt(event);
      if (token === undefined) return;
      const { side: own, token: before } = this.selected();
      this.keepPlace = true;
      if (own === side && before === token) this.put({ token: null });
      else this.choose(side, { token, ...(this.shares(own, side) ? {} : { neuron: null }) });
    });
    part.canvas = make("canvas", { class: "tw-canvas", tabindex: "0", role: "img", onkeydown: keys });
    part.space = make("div", { class: "tw-space-x" }, part.canvas);
    part.scroll = make("div", { class: "tw-scroll" }, part.space);
    part.scroll.addEventListener("scroll", () => {
      if (part.left === part.scroll.scrollLeft) return;
      part.left = part.scroll.scrollLeft;
      this.drawHeat();
    });
    this.sizes.observe(part.scroll);
    part.labels = make("div", { class: "tw-labels" });
    part.sums = make("div", { class: "tw-sums" });
    const place = (event) => this.heatPlace(side, part, event);
    part.canvas.addEventListener("pointermove", (event) => {
      const { token, layer } = place(event);
      this.hover(side, token, event, layer);
    });
    part.canvas.addEventListener("pointerleave", () => this.hover(side, undefined));
    part.canvas.addEventListener("click", (event) => {
      const { token, layer } = place(event);
      const { side: own } = this.selected();
      this.choose(side, {
        token,
        ...(layer === undefined ? {} : { layer, neuron: null }),
        ...(this.shares(own, side) ? {} : { neuron: null }),
      });
      part.canvas.focus({ preventScroll: true });
    });
    const bigger = (by) => {
      this.zoom = Math.max(0, Math.min(5, this.zoom + by));
      this.reveal = true;
      this.update();
    };
    const zoom = make(
      "span",
      { class: "tw-zoom" },
      make(
        "button",
        { type: "button", "aria-label": "narrower columns", title: "narrower", onclick: () => bigger(-1) },
        "\u2212",
      ),
      make("button", { type: "button", "aria-label": "wider columns", title: "wider", onclick: () => bigger(1) }, "+"),
    );
    const empty = this.get("runs")
      ? "There is no text yet: type one above."
      : "The text is empty: there is no token to show.";
    part.nodes = side.T
      ? [
          part.legend,
          part.text,
          make("div", { class: "tw-heat-head" }, part.heatLegend, zoom),
          make("div", { class: "tw-heat" }, part.labels, part.scroll, part.sums),
        ]
      : [make("p", { class: "tw-empty" }, empty)];
    return part;
  }

  // Tokens flow as text does: a line may break before a token that begins with white space, and wherever words are too long.
  // A line of the text is a block with a direction of its own; each token is isolated, so that it moves no other.
  fillText(side, part) {
    const fragment = document.createDocumentFragment();
    const whole = side.starts.length <= 2;
    let line = null;
    let said = "";
    const begin = () => {
      line = make("div", { class: "tw-line" });
      fragment.append(line);
      said = "";
    };
    const end = () => line && line.setAttribute("dir", direction(said));
    for (let sequence = 0; sequence + 1 < side.starts.length; sequence++) {
      end();
      if (!whole)
        fragment.append(
          make("div", { class: "tw-sequence", "aria-hidden": "true" }, `sequence ${integer(sequence + 1)}`),
        );
      begin();
      for (let token = side.starts[sequence]; token < side.starts[sequence + 1]; token++) {
        const text = side.text(token);
        const span = document.createElement("span");
        span.className = `tw-t${side.isSpecial(token) ? " tw-special" : ""}${text.startsWith(" ") ? " tw-lead" : ""}`;
        span.setAttribute("role", "option");
        span.id = `${this.prefix}${side.number}-${token}`;
        span.append(...(PLAIN.test(text) && !BYTES.test(text) ? [text] : pieces(text, true)));
        span.number = token;
        part.spans.push(span);
        if (/^\s/.test(text)) line.append(make("wbr"));
        line.append(span);
        said += text;
        if (text.endsWith("\n") && token + 1 < side.starts[sequence + 1]) {
          end();
          begin();
        }
      }
    }
    end();
    part.text.replaceChildren(fragment);
  }

  // --- colours and scales

  theme() {
    const dark = isDark(this.root.parentElement);
    this.root.classList.toggle("tw-dark", dark);
    const palette = this.header.palettes[dark ? "dark" : "light"];
    this.ramps = { sequential: new Ramp(palette.sequential, 0), diverging: new Ramp(palette.diverging, 128) };
  }

  themed() {
    if (!this.header || isDark(this.root.parentElement) === this.root.classList.contains("tw-dark")) return;
    this.theme();
    for (const part of this.parts) part.painted.fill(-1);
    this.update();
  }

  // The colour scale of a passage and the value of each of its tokens (NaN: none).
  passageColours(side) {
    const how = this.colouring(side);
    const skip = this.get("skip_first");
    const scale = this.scaling(how);
    const [first, last] = this.range(side);
    const values = new Float32Array(side.T);
    const layers =
      first === last
        ? `layer ${first}`
        : first === 0 && last === side.L - 1
          ? "mean over layers"
          : `mean over layers ${first}\u2013${last}`;
    const largest = (list, of) =>
      Math.max(
        0,
        ...list.map((one) =>
          one.remember(`${of.key} ${skip}`, () => {
            let most = 0;
            for (let token = 0; token < one.T; token++) {
              const value = Math.abs(of.value(one, token));
              if (one.included(token, skip) && value > most) most = value;
            }
            return most;
          }),
        ),
      );
    const fixed = scale === "all" && this.get("limit");
    const sharing = scale === "all" ? this.sides : [side];
    const [left, right] = this.sides;
    if (this.get("difference") && this.header.aligned && side === right && how !== "neuron") {
      const of =
        how === "surprise"
          ? (token) => right.surprise(token) - left.surprise(token)
          : (token) => right.means(...this.range(right))[token] - left.means(...this.range(left))[token];
      for (let token = 0; token < side.T; token++) values[token] = side.included(token, skip) ? of(token) : NaN;
      let most = 0;
      for (const value of values) if (Math.abs(value) > most) most = Math.abs(value);
      const what = how === "surprise" ? "surprise, nats" : `active neurons, ${layers}`;
      return {
        values,
        scale: makeScale("signed", fixed || most, `difference to ${left.about.name}: ${what}`, this.ramps),
      };
    }
    if (how === "neuron") {
      const { layer, neuron } = this.shownNeuron(side);
      values.fill(0);
      const { tokens, values: h } = side.column(layer, neuron);
      tokens.forEach((token, n) => (values[token] = side.included(token, skip) ? h[n] || 1e-30 : NaN));
      let own = 0;
      for (const value of values) if (Math.abs(value) > own) own = Math.abs(value);
      const most =
        scale === "neuron"
          ? own
          : scale === "layer"
            ? side.largestValue(layer, layer, skip)
            : Math.max(...this.sides.map((one) => one.largestValue(0, one.L - 1, skip)));
      return { values, scale: makeScale("signed", fixed || most, `h of layer ${layer}, neuron ${neuron}`, this.ramps) };
    }
    if (how === "surprise") {
      for (let token = 0; token < side.T; token++)
        values[token] = side.included(token, skip) ? side.surprise(token) : NaN;
      const most = largest(this.sides, { key: "surprise", value: (one, token) => one.surprise(token) });
      return {
        values,
        scale: makeScale("linear", this.get("limit") || most, "surprise, \u2212log p in nats", this.ramps),
      };
    }
    const means = side.means(first, last);
    for (let token = 0; token < side.T; token++) values[token] = side.included(token, skip) ? means[token] : NaN;
    const most = largest(sharing, {
      key: `mean ${this.range(side)}`,
      value: (one, token) => one.means(...this.range(one))[token],
    });
    const least = Math.min(...sharing.map((one) => one.leastMean(...this.range(one), skip)));
    return { values, scale: makeScale("log", fixed || most, `active neurons per token, ${layers}`, this.ramps, least) };
  }

  heatScales(side) {
    const skip = this.get("skip_first");
    const [first, last] = this.range(side);
    const label = "active neurons per token";
    const scale = ([least, largest], name) => makeScale("log", largest, name, this.ramps, least);
    if (this.get("scale") === "layer") {
      const own = (_, n) => scale(side.countRange(first + n, first + n, skip), `${label}, each layer on its own`);
      return Array.from({ length: last - first + 1 }, own);
    }
    const ranges = this.sides.filter((one) => one.T).map((one) => one.countRange(...this.range(one), skip));
    const least = Math.min(...ranges.map((range) => range[0]));
    const largest = Math.max(...ranges.map((range) => range[1]));
    const limit = this.get("colour") === "count" && this.get("limit");
    return Array(last - first + 1).fill(scale([least, limit || largest], label));
  }

  showLegend(box, scale, own, extra = []) {
    const state = [
      scale.label,
      scale.kind,
      scale.top,
      scale.ticks,
      own,
      this.root.className,
      ...extra.map((node) => node.textContent),
    ].join();
    if (box.state === state) return;
    box.state = state;
    const bar = make("span", {
      class: "tw-gradient",
      style: { background: scale.ramp.gradient((t) => scale.index(scale.at(t))) },
    });
    const ticks = make("span", { class: "tw-ticks" });
    for (const [place, value] of own
      ? [
          [0, NaN],
          [1, NaN],
        ]
      : scale.ticks) {
      const text = Number.isNaN(value)
        ? place
          ? "most"
          : "least"
        : scale.kind === "signed" && value
          ? signed(value)
          : number(value);
      ticks.append(make("span", { style: { left: `${100 * place}%` } }, text));
    }
    box.replaceChildren(
      make("span", { class: "tw-label" }, scale.label),
      make("span", { class: "tw-scale" }, bar, ticks),
      ...extra,
    );
  }

  // --- drawing

  update() {
    if (this.closed || !this.header) return;
    this.controls();
    this.paint();
    this.drawHeat();
    this.showCards();
    this.reveal = false;
    this.keepPlace = false;
  }

  paint() {
    for (const side of this.sides) {
      const part = this.parts[side.number];
      if (!side.T) continue;
      const { values, scale } = (part.colours = this.passageColours(side));
      const { fill, ink } = scale.ramp;
      const offset = scale.kind === "signed" ? 256 : 0;
      for (let token = 0; token < side.T; token++) {
        const value = values[token];
        const before = part.painted[token];
        const index = Number.isNaN(value) ? OUT : offset + scale.index(value);
        if (before === index) continue;
        part.painted[token] = index;
        const { style, classList } = part.spans[token];
        style.backgroundColor = fill[index - offset] ?? "";
        style.color = ink[index - offset] ?? "";
        if (index === OUT) classList.add("tw-out");
        else if (before === OUT) classList.remove("tw-out");
      }
      this.showLegend(part.legend, scale, false);
      const pinned = this.pinned(side);
      if (part.pinned !== pinned) {
        part.spans[part.pinned]?.classList.remove("tw-pinned");
        part.spans[part.pinned]?.removeAttribute("aria-selected");
        part.pinned = pinned;
        part.spans[pinned]?.classList.add("tw-pinned");
        part.spans[pinned]?.setAttribute("aria-selected", "true");
        if (pinned === null) part.text.removeAttribute("aria-activedescendant");
        else part.text.setAttribute("aria-activedescendant", part.spans[pinned].id);
      }
      if (this.reveal && pinned !== null && !this.keepPlace) this.bring(part, part.spans[pinned]);
    }
  }

  // Scroll within the passage only: the notebook around it stays where it is.
  bring(part, span) {
    const box = part.text.getBoundingClientRect();
    const at = span.getBoundingClientRect();
    const margin = 2 * at.height;
    if (at.top < box.top + margin / 2 || at.bottom > box.bottom - margin / 2) {
      part.text.scrollTop += at.top - box.top - (box.height - at.height) / 2;
    }
  }

  rowHeight(rows) {
    return Math.max(5, Math.min(22, Math.floor(190 / rows)));
  }

  // How the canvas maps tokens to columns: width of a token in CSS pixels, and the first one seen.
  heatGeometry(side, part) {
    const wide = part.scroll.wide ?? 0;
    const fit = wide / side.T;
    const cell = this.zoom ? Math.max(fit, 2 ** this.zoom) : Math.min(fit, 32);
    return { wide, cell, total: cell * side.T, left: part.left };
  }

  heatPlace(side, part, event) {
    const { cell, left } = this.heatGeometry(side, part);
    const [first, last] = this.range(side);
    const box = part.canvas.getBoundingClientRect();
    const token = Math.max(0, Math.min(side.T - 1, Math.floor((event.clientX - box.left + left) / cell)));
    const row = Math.floor((event.clientY - box.top) / this.rowHeight(last - first + 1));
    return { token, layer: row <= last - first ? first + row : undefined };
  }

  drawHeat() {
    if (!this.header) return;
    for (const side of this.sides)
      if (side.T && this.parts[side.number].canvas.isConnected) this.drawHeatOf(side, this.parts[side.number]);
  }

  drawHeatOf(side, part) {
    const [first, last] = this.range(side);
    const rows = last - first + 1;
    const height = this.rowHeight(rows);
    const strip = 8;
    const scales = this.heatScales(side);
    const skip = this.get("skip_first");
    const { wide, cell, total } = this.heatGeometry(side, part);
    if (!wide) return;
    const pinned = this.pinned(side);
    part.space.style.width = `${total}px`;
    if (total <= wide) part.left = 0;
    else if (this.reveal && pinned !== null) {
      part.left = Math.round(Math.max(0, Math.min(total - wide, (pinned + 0.5) * cell - wide / 2)));
      part.scroll.scrollLeft = part.left;
    }
    const left = part.left;
    const ratio = devicePixelRatio || 1;
    const width = Math.min(wide, total);
    const tall = rows * height + 5 + strip;
    part.canvas.width = Math.round(width * ratio);
    part.canvas.height = Math.round(tall * ratio);
    Object.assign(part.canvas.style, { width: `${width}px`, height: `${tall}px` });
    const context = part.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;

    // A column is one token, or the busiest of several where they are narrower than a pixel.
    const each = Math.max(1, Math.ceil(1 / (cell * ratio) - 1e-9));
    const from = Math.floor(left / cell / each);
    const to = Math.min(Math.ceil(side.T / each), Math.ceil((left + width) / cell / each) + 1);
    const columns = to - from;
    const image = new ImageData(columns, rows + 1);
    const pixels = new Uint32Array(image.data.buffer);
    const style = getComputedStyle(this.root);
    const out = style.getPropertyValue("--tw-out").trim();
    const bare = packed(channels(style.getPropertyValue("--tw-cell").trim()));
    const outside = packed(channels(out));
    const capacity = this.get("compression") ? Math.floor(this.header.tile / this.get("compression")) - 1 : Infinity;
    const marks = [];
    for (let row = 0; row < rows; row++) {
      const scale = scales[row];
      const base = (first + row) * side.T;
      const table = this.table(scale, bare);
      for (let column = 0; column < columns; column++) {
        let most = -1;
        let over = false;
        const stop = Math.min(side.T, (from + column + 1) * each);
        for (let token = (from + column) * each; token < stop; token++) {
          if (skip && side.position[token] === 0) continue;
          if (side.counts[base + token] > most) most = side.counts[base + token];
          if (side.tileMax[base + token] > capacity) over = true;
        }
        pixels[row * columns + column] = most < 0 ? outside : table[Math.min(most, table.length - 1)];
        if (over) marks.push(row, column);
      }
    }
    const { values, scale } = part.colours;
    for (let column = 0; column < columns; column++) {
      let most = NaN;
      const stop = Math.min(side.T, (from + column + 1) * each);
      for (let token = (from + column) * each; token < stop; token++) {
        if (Number.isNaN(most) || Math.abs(values[token]) > Math.abs(most)) most = values[token];
      }
      const index = Number.isNaN(most) ? -1 : scale.index(most);
      pixels[rows * columns + column] =
        index < 0 ? outside : index === scale.ramp.bare ? bare : packed(scale.ramp.rgb[index]);
    }
    const sheet = (part.sheet ??= document.createElement("canvas"));
    sheet.width = columns;
    sheet.height = rows + 1;
    sheet.getContext("2d").putImageData(image, 0, 0);
    const x = from * each * cell - left;
    const w = columns * each * cell;
    const gap = height > 8 ? 1 : 0;
    for (let row = 0; row < rows; row++) context.drawImage(sheet, 0, row, columns, 1, x, row * height, w, height - gap);
    context.drawImage(sheet, 0, rows, columns, 1, x, rows * height + 5, w, strip);
    context.fillStyle = style.getPropertyValue("--tw-over").trim();
    const thick = Math.max(2, Math.round(height / 7));
    for (let n = 0; n < marks.length; n += 2) {
      context.fillRect(x + marks[n + 1] * each * cell, marks[n] * height, Math.max(each * cell, 1 / ratio), thick);
    }

    const { side: own, layer } = this.selected();
    context.lineWidth = 1.5;
    context.strokeStyle = style.getPropertyValue("--tw-accent").trim();
    const box = (token, colour) => {
      context.strokeStyle = colour;
      const at = (token + 0.5) * cell - left;
      const half = Math.max(cell / 2, 1.5);
      context.strokeRect(at - half, 0.75, 2 * half, tall - 1.5);
    };
    if (this.peek?.token !== undefined && (this.peek.side === side || this.header.aligned) && this.peek.token < side.T)
      box(this.peek.token, style.getPropertyValue("--tw-muted").trim());
    if (pinned !== null) {
      box(pinned, style.getPropertyValue("--tw-accent").trim());
      if (own === side && layer !== null && layer >= first && layer <= last) {
        const half = Math.max(cell / 2, 3);
        context.lineWidth = 3;
        context.strokeRect((pinned + 0.5) * cell - left - half, (layer - first) * height, 2 * half, height - gap);
      }
    }

    // Layer numbers and the mean of each, as many as there is room for.
    const every = Math.ceil(11 / height);
    const skipped = (n) => n % every !== 0;
    const rowsOf = (text, choose) =>
      Array.from({ length: rows }, (_, n) => {
        const here = own === side && layer === first + n;
        return make(
          choose ? "button" : "div",
          {
            class: here ? "tw-row tw-here" : "tw-row",
            type: choose && "button",
            tabindex: choose && "-1",
            style: { height: `${height}px` },
            title: `layer ${first + n}`,
            onclick: choose && (() => this.choose(side, { layer: here ? null : first + n, neuron: null })),
          },
          skipped(n) && !here ? "" : text(first + n),
        );
      });
    const state = [first, last, height, own === side ? layer : null, skip].join();
    if (part.rows !== state) {
      part.rows = state;
      part.labels.replaceChildren(
        ...rowsOf((n) => String(n), true),
        make("div", { class: "tw-row tw-strip", title: "the colours of the passage" }, "text"),
      );
      part.sums.replaceChildren(...rowsOf((n) => number(this.meanOf(side, n, skip))));
      part.sums.title = "mean of active neurons in each layer";
    }

    const overs = capacity < Infinity ? this.overflows(side, first, last, capacity, skip) : null;
    const extra = [];
    if (overs) {
      extra.push(
        make(
          "span",
          { class: "tw-overs" },
          make("i"),
          `a tile of ${this.header.tile} with more than ${capacity}: ${overs.cells ? `${percent(overs.cells / overs.all)} of cells` : "none"}`,
        ),
      );
    }
    if (each > 1) extra.push(make("span", { class: "tw-overs" }, `each column the busiest of ${each} tokens`));
    this.showLegend(part.heatLegend, scales[0], this.get("scale") === "layer" && rows > 1, extra);
    part.canvas.setAttribute(
      "aria-label",
      `active neurons of ${side.T} tokens in layers ${first} to ${last}; arrow keys move`,
    );
  }

  // Of counts 0, 1, ... the colours of a scale as pixels.
  table(scale, bare) {
    if (scale.table?.bare !== bare) {
      const table = new Uint32Array(Math.min(65536, Math.ceil(scale.top) + 1));
      for (let count = 0; count < table.length; count++) {
        const index = scale.index(count);
        table[count] = index === scale.ramp.bare ? bare : packed(scale.ramp.rgb[index]);
      }
      table.bare = bare;
      scale.table = table;
    }
    return scale.table;
  }

  meanOf(side, layer, skip) {
    return side.remember(`mean of ${layer} ${skip}`, () => {
      let sum = 0;
      let n = 0;
      for (let token = 0; token < side.T; token++) {
        if (!side.included(token, skip)) continue;
        sum += side.count(layer, token);
        n++;
      }
      return n ? sum / n : 0;
    });
  }

  overflows(side, first, last, capacity, skip) {
    return side.remember(`overflow ${first} ${last} ${capacity} ${skip}`, () => {
      let cells = 0;
      let all = 0;
      for (let row = first * side.T; row < (last + 1) * side.T; row++) {
        if (!side.included(row % side.T, skip)) continue;
        all++;
        if (side.tileMax[row] > capacity) cells++;
      }
      return { cells, all };
    });
  }

  // --- peeking

  hover(side, token, event, layer) {
    const before = this.peek;
    this.peek = token === undefined ? null : { side, token, layer };
    if (before?.side !== this.peek?.side || before?.token !== this.peek?.token || before?.layer !== this.peek?.layer) {
      this.showTip(event);
      cancelAnimationFrame(this.peeking);
      this.peeking = requestAnimationFrame(() => {
        for (const one of this.sides) {
          const part = this.parts[one.number];
          const here =
            this.peek?.token !== undefined && (this.peek.side === one || this.header.aligned) ? this.peek.token : null;
          part.spans[part.peeked]?.classList.remove("tw-peeked");
          part.spans[here]?.classList.add("tw-peeked");
          part.peeked = here;
        }
        this.drawHeat();
        if (this.selected().token === null) this.showCards();
      });
    }
  }

  showTip(event) {
    const peek = this.peek;
    this.tip.hidden = !peek || peek.token === undefined || peek.token >= peek.side.T;
    if (this.tip.hidden) return;
    const { side, token, layer } = peek;
    const [first, last] = this.range(side);
    const lines = [make("div", { class: "tw-tip-token" }, this.pill(side, token), ` token ${integer(token)}`)];
    const add = (name, value) => lines.push(make("div", {}, make("span", {}, name), make("b", { dir: "auto" }, value)));
    if (side.characters(token)) add("bytes of", make("span", {}, ...pieces(side.characters(token))));
    if (layer === undefined)
      add(
        first === last ? `active in layer ${first}` : "active, mean over layers",
        number(side.means(first, last)[token]),
      );
    else {
      add(`active in layer ${layer}`, integer(side.count(layer, token)));
      add(`fullest tile of ${this.header.tile}`, integer(side.tileMax[layer * side.T + token]));
    }
    const surprise = side.surprise(token);
    add("surprise", Number.isNaN(surprise) ? "first token" : `${number(surprise)} nats`);
    const chosen = this.shownNeuron(side);
    if (chosen) {
      const { tokens, values } = side.column(chosen.layer, chosen.neuron);
      const at = tokens.indexOf(token);
      add(
        `h of ${chosen.layer} \u00b7 ${chosen.neuron}`,
        at < 0 ? (side.fires ? "not among those kept" : "silent") : signed(values[at]),
      );
    }
    this.tip.replaceChildren(...lines);
    const box = this.root.getBoundingClientRect();
    const wide = this.tip.offsetWidth;
    const x = event.clientX - box.left + 14;
    const y = event.clientY - box.top + 18;
    this.tip.style.left = `${Math.max(0, Math.min(x, box.width - wide - 4))}px`;
    this.tip.style.top = `${y}px`;
  }

  peekNeuron(side, layer, neuron) {
    this.peek = neuron === undefined ? null : { side, layer, neuron };
    cancelAnimationFrame(this.peeking);
    this.peeking = requestAnimationFrame(() => {
      this.paint();
      this.drawHeat();
    });
  }

  // --- cards

  pill(side, token) {
    return make(
      "span",
      { class: side.isSpecial(token) ? "tw-pill tw-special" : "tw-pill", dir: "auto" },
      ...pieces(side.text(token)),
    );
  }

  showCards() {
    const { side, token, layer, neuron } = this.selected();
    const nodes = [];
    if (!side.T) {
      this.cardsBox.replaceChildren();
      return;
    }
    const peeked = token === null && this.peek?.token !== undefined ? this.peek : null;
    const from = peeked ? peeked.side : side;
    const which = peeked ? peeked.token : token;
    if (which !== null) {
      const both = this.header.aligned ? this.sides : [from];
      for (const one of both)
        nodes.push(this.tokenCard(one, which, one === side || both.length > 1 ? layer : null, Boolean(peeked)));
    } else nodes.push(this.startCard(side));
    if (neuron !== null && layer !== null) nodes.push(this.neuronCard(side, layer, neuron, token));
    const active = this.active();
    const focus = this.cardsBox.contains(active) ? active.dataset.focus : null;
    this.cardsBox.replaceChildren(...nodes);
    if (focus) this.cardsBox.querySelector(`[data-focus="${focus}"]`)?.focus({ preventScroll: true });
    this.say(side, token, layer, neuron);
  }

  say(side, token, layer, neuron) {
    const parts = [];
    if (token !== null) parts.push(`token ${token}: ${side.text(token).trim() || "white space"}`);
    if (layer !== null) parts.push(`layer ${layer}`);
    if (token !== null && layer !== null) parts.push(`${side.count(layer, token)} active`);
    if (neuron !== null) parts.push(`neuron ${neuron}`);
    const text = parts.join(", ");
    if (this.said.textContent !== text) this.said.textContent = text;
  }

  preset({ view }) {
    this.put({ side: 0, token: null, layer: null, neuron: null, colour: "count", scale: "all", layers: null, ...view });
  }

  startCard(side) {
    const items = side.about.starts_with.slice(1).map((preset) =>
      make(
        "li",
        {},
        make(
          "button",
          {
            type: "button",
            class: "tw-start",
            onclick: () => (side.number ? this.put({ side: 1, ...preset.view }) : this.preset(preset)),
          },
          make("b", {}, preset.name),
          make("span", { dir: "auto" }, preset.note),
        ),
      ),
    );
    return make(
      "section",
      { class: "tw-card tw-begin" },
      make("h4", {}, "Where to begin"),
      make(
        "p",
        { class: "tw-quiet" },
        "Hover a token to peek, click to pin it. Then click a neuron to see where it fires.",
      ),
      make("ul", {}, ...items),
    );
  }

  tokenCard(side, token, layer, peeking) {
    const [first, last] = this.range(side);
    const surprise = side.surprise(token);
    const sequence = side.sequenceOf(token);
    const fact = (name, value) => make("div", { class: "tw-fact" }, make("span", {}, name), make("b", {}, value));
    const where =
      side.starts.length > 2
        ? `sequence ${integer(sequence + 1)}, position ${integer(side.position[token])}`
        : `position ${integer(side.position[token])}`;
    const head = make(
      "div",
      { class: "tw-card-head" },
      make("h4", {}, this.pill(side, token)),
      make(
        "span",
        { class: "tw-quiet" },
        `token ${integer(token)} \u00b7 ${where} \u00b7 id ${side.about.ids[side.token[token]]}`,
      ),
      peeking
        ? make("span", { class: "tw-peeking" }, "peek")
        : this.closer("let go of the token", () => this.put({ token: null })),
    );
    const facts = make(
      "div",
      { class: "tw-factbox" },
      fact("surprise", Number.isNaN(surprise) ? "\u2013" : `${number(surprise)} nats`),
      fact("probability", Number.isNaN(surprise) ? "first of its sequence" : percent(Math.exp(-surprise))),
      fact("active, mean", number(side.means(first, last)[token])),
      side.characters(token) &&
        fact("bytes of", make("span", { class: "tw-pill", dir: "auto" }, ...pieces(side.characters(token)))),
    );
    const shown = Array.from({ length: last - first + 1 }, (_, n) => first + n);
    const most = Math.max(1, ...shown.map((n) => side.count(n, token)));
    const capacity = this.get("compression") ? Math.floor(this.header.tile / this.get("compression")) - 1 : Infinity;
    const rows = shown.map((n) => {
      const opened = n === layer;
      const count = side.count(n, token);
      const over = side.tileMax[n * side.T + token] > capacity;
      const bar = make(
        "span",
        { class: "tw-count" },
        make("i", { style: { width: `${(100 * count) / most}%` } }),
        make("b", {}, integer(count)),
      );
      const name = make(
        "button",
        {
          type: "button",
          class: "tw-layer-name",
          "aria-expanded": String(opened),
          data: { focus: `${side.number}-layer-${n}` },
          title: opened ? "close the layer" : "open the layer",
          onclick: () => this.choose(side, { layer: opened ? null : n, neuron: null }),
        },
        `layer ${n}`,
      );
      const line = make("div", { class: "tw-layer" }, name, bar);
      if (over) bar.append(make("em", { title: `a tile holds more than ${capacity}` }));
      if (!opened)
        line.append(
          make(
            "span",
            { class: "tw-chips" },
            ...side.strongest(n, token, CHIPS).map((one) => this.chip(side, n, one, token)),
          ),
        );
      return make(
        "div",
        { class: opened ? "tw-layer-box tw-opened" : "tw-layer-box" },
        line,
        opened && this.layerTable(side, n, token),
      );
    });
    const two = this.sides.length === 2 && this.header.aligned;
    return make(
      "section",
      { class: peeking ? "tw-card tw-token tw-peek" : "tw-card tw-token", "aria-label": "token" },
      two && make("div", { class: "tw-of" }, side.about.name),
      head,
      facts,
      make("div", { class: "tw-layers" }, ...rows),
    );
  }

  closer(label, act) {
    return make(
      "button",
      { type: "button", class: "tw-close", "aria-label": label, title: label, onclick: act },
      "\u00d7",
    );
  }

  // What makes an element a neuron: hovering colours the passage by it, clicking chooses it.
  asNeuron(side, layer, neuron, token) {
    const { side: own, layer: l, neuron: n } = this.selected();
    const chosen = own === side && l === layer && n === neuron;
    return {
      type: "button",
      data: { focus: `${side.number}-${layer}-${neuron}`, neuron: String(neuron), layer: String(layer) },
      "aria-pressed": String(chosen),
      onpointerenter: () => this.peekNeuron(side, layer, neuron),
      onpointerleave: () => this.peekNeuron(side),
      onclick: () => {
        this.peek = null;
        this.keepPlace = true;
        this.chooseNeuron(side, layer, neuron, token === undefined ? {} : { token });
      },
    };
  }

  chip(side, layer, { neuron, value }, token) {
    return make(
      "button",
      {
        ...this.asNeuron(side, layer, neuron, token),
        class: value < 0 ? "tw-chip tw-minus" : "tw-chip",
        title: `layer ${layer}, neuron ${neuron}`,
      },
      make("span", {}, String(neuron)),
      make("b", {}, signed(value)),
    );
  }

  layerTable(side, layer, token) {
    const all = side.strongest(layer, token);
    const shown = this.open ? all : all.slice(0, OPENED);
    const count = side.count(layer, token);
    if (!count) return make("p", { class: "tw-quiet tw-none" }, "No neuron is active here.");
    const most = Math.abs(shown[0].value) || 1;
    const head = make(
      "div",
      { class: "tw-entry tw-entry-head" },
      make("span", {}, "neuron"),
      make("span", {}, ""),
      make("span", {}, "h"),
      make("span", { title: "of the sum of |h| in this layer" }, "share"),
      side.rate && make("span", { title: `of ${integer(side.about.aggregate)} tokens` }, "fires"),
    );
    const rows = shown.map(({ neuron, value, share }) => {
      const width = `${(50 * Math.abs(value)) / most}%`;
      const bar = make(
        "span",
        { class: "tw-both" },
        make("i", {
          class: value < 0 ? "tw-minus" : "",
          style: value < 0 ? { right: "50%", width } : { left: "50%", width },
        }),
      );
      return make(
        "button",
        { ...this.asNeuron(side, layer, neuron, token), class: "tw-entry" },
        make("span", {}, String(neuron)),
        bar,
        make("b", {}, signed(value)),
        make("span", {}, percent(share)),
        side.rate && make("span", {}, percent(side.rate[layer * side.N + neuron])),
      );
    });
    const covered = shown.reduce((sum, one) => sum + one.share, 0);
    const words = [`${shown.length} of ${count}, ${percent(Math.min(covered, 1))} of the sum of |h|`];
    const more =
      all.length > shown.length &&
      make(
        "button",
        {
          type: "button",
          class: "tw-link",
          onclick: () => {
            this.open = true;
            this.showCards();
          },
        },
        `show ${all.length === count ? "all" : `the ${all.length} kept`}`,
      );
    return make(
      "div",
      { class: side.rate ? "tw-table tw-rated" : "tw-table" },
      head,
      ...rows,
      make("div", { class: "tw-quiet tw-under" }, words.join(""), more && " \u00b7 ", more),
    );
  }

  neuronCard(side, layer, neuron, token) {
    const { tokens, values } = side.column(layer, neuron);
    const fires = side.firings(layer, neuron);
    const pick = (label, value, most, choose) =>
      make("input", {
        type: "number",
        class: "tw-pick",
        min: "0",
        max: String(most),
        value: String(value),
        "aria-label": label,
        data: { focus: label },
        onchange: (event) => {
          const wanted = Math.round(Number(event.target.value));
          if (event.target.value !== "" && wanted >= 0 && wanted <= most) choose(wanted);
          else event.target.value = String(value);
        },
      });
    const head = make(
      "div",
      { class: "tw-card-head" },
      make(
        "h4",
        {},
        "Layer ",
        pick("layer", layer, side.L - 1, (n) => this.chooseNeuron(side, n, neuron)),
        " neuron ",
        pick("neuron", neuron, side.N - 1, (n) => this.chooseNeuron(side, layer, n)),
      ),
      this.sides.length === 2 && make("span", { class: "tw-quiet" }, side.about.name),
      this.closer("let go of the neuron", () => this.letGo()),
    );
    let strongest = 0;
    for (const value of values) if (Math.abs(value) > Math.abs(strongest)) strongest = value;
    const fact = (name, value) => make("div", { class: "tw-fact" }, make("span", {}, name), make("b", {}, value));
    const facts = [fact("fires here", `${percent(fires / side.T)}, ${integer(fires)} of ${integer(side.T)}`)];
    if (tokens.length) facts.push(fact("strongest here", signed(strongest)));
    const note =
      fires > tokens.length &&
      make("p", { class: "tw-quiet" }, `Shown are the ${integer(tokens.length)} of its firings that are kept.`);
    const box = make("section", { class: "tw-card tw-neuron", "aria-label": "neuron" }, head);
    const body = make("div", { class: "tw-neuron-body" });
    box.append(body);
    const fill = (card) => {
      const known = card && !card.error && !card.missing ? card : null;
      const more = [];
      const wide = [];
      if (known?.tokens !== undefined) {
        const { tokens: n, fires: f, mean, largest } = known;
        wide.push(fact(`of ${integer(n)} tokens`, f ? percent(f / n) : "never: it is dead"));
        if (f) wide.push(fact("mean", signed(mean)), fact("largest |h|", number(largest)));
        if (f) more.push(this.histogram(known));
      } else if (fires && tokens.length) more.push(this.histogram(this.ownHistogram(values)));
      if (known?.promotes) more.push(this.words(known));
      if (card === undefined) more.push(make("p", { class: "tw-quiet" }, "asking the kernel \u2026"));
      else if (card?.error) more.push(make("p", { class: "tw-quiet" }, card.error));
      else if (card?.missing)
        more.push(
          make(
            "p",
            { class: "tw-quiet" },
            "Statistics beyond this passage are kept in this page for the neurons that carry most of it; this is none of them.",
          ),
        );
      body.replaceChildren(
        make("div", {}, make("div", { class: "tw-factbox" }, ...facts, ...wide), note, ...more),
        this.placesOf(side, layer, neuron, known, () => fill(card)),
      );
    };
    fill(this.card(side, layer, neuron));
    return box;
  }

  // What is known of a neuron beyond the passage; undefined while the answer is awaited, null where there is nothing to ask.
  card(side, layer, neuron) {
    if (side.about.aggregate === null && !side.about.words) return null;
    const key = `${side.number}:${layer}:${neuron}`;
    if (!this.known.has(key)) {
      this.known.set(key, undefined);
      this.model.send({ ask: key });
    }
    return this.known.get(key);
  }

  answered({ key, card }) {
    if (key === undefined) return;
    this.known.set(key, card);
    this.schedule();
  }

  // Where there is no aggregate: the values of the passage, in the same kind of bins.
  ownHistogram(values) {
    let largest = 0;
    for (const value of values) if (Math.abs(value) > largest) largest = Math.abs(value);
    const top = Math.floor(Math.log2(largest || 1)) + 1;
    const octaves = 12;
    const sizes = Array.from({ length: octaves }, (_, n) => 2 ** (top - octaves + 1 + n));
    const histogram = new Array(2 * octaves).fill(0);
    for (const value of values) {
      const bin = Math.max(0, Math.min(octaves - 1, Math.floor(Math.log2(Math.abs(value))) - top + octaves));
      histogram[value < 0 ? octaves - 1 - bin : octaves + bin]++;
    }
    return { edges: [...sizes.map((v) => -v).reverse(), 0, ...sizes], histogram, fires: values.length, own: true };
  }

  // How often h fell between powers of two, on a logarithmic axis of counts.
  histogram({ edges, histogram, fires, tokens, own }) {
    const wide = 340;
    const tall = 112;
    const left = 46;
    const bottom = 30;
    const top = 8;
    const inner = wide - left - 6;
    const high = tall - top - bottom;
    let low = histogram.findIndex((count) => count > 0);
    let last = histogram.findLastIndex((count) => count > 0);
    low = Math.max(0, Math.min(low, edges.length - 6));
    last = Math.min(histogram.length - 1, Math.max(last, low + 4));
    const bins = last - low + 1;
    const step = inner / bins;
    const most = Math.max(...histogram);
    const reach = Math.max(1, Math.log10(most) * 1.02);
    const y = (count) => top + high * (1 - Math.log10(Math.max(count, 0.8)) / reach);
    const label = own
      ? `h, in this passage (n = ${integer(fires)})`
      : `h, over ${integer(tokens)} tokens (n = ${integer(fires)})`;
    const plot = svg("svg", {
      viewBox: `0 0 ${wide} ${tall}`,
      class: "tw-histogram",
      role: "img",
      "aria-label": `histogram of h, ${fires} firings`,
    });
    for (let decade = 0; decade <= reach; decade += reach > 4 ? 2 : 1) {
      const at = y(10 ** decade);
      plot.append(svg("line", { x1: left, x2: wide - 6, y1: at, y2: at, class: "tw-grid" }));
      plot.append(
        svg(
          "text",
          { x: left - 4, y: at + 3, "text-anchor": "end" },
          decade > 3 ? `10${power(decade)}` : integer(10 ** decade),
        ),
      );
    }
    for (let bin = low; bin <= last; bin++) {
      if (!histogram[bin]) continue;
      const at = y(histogram[bin]);
      const bar = svg("rect", {
        x: left + (bin - low) * step + 0.75,
        width: Math.max(step - 1.5, 1),
        y: at,
        height: top + high - at,
        class: edges[bin] < 0 ? "tw-minus" : "tw-plus",
      });
      bar.append(
        svg(
          "title",
          {},
          `${axisNumber(edges[bin])} to ${axisNumber(edges[bin + 1])}: ${plural(histogram[bin], "token")}`,
        ),
      );
      plot.append(bar);
    }
    plot.append(svg("line", { x1: left, x2: wide - 6, y1: top + high, y2: top + high, class: "tw-axis" }));
    const every = Math.ceil((bins * 36) / inner);
    const zero = edges.indexOf(0);
    for (let edge = low; edge <= last + 1; edge++) {
      if ((edge - zero) % every) continue;
      const at = left + (edge - low) * step;
      plot.append(svg("line", { x1: at, x2: at, y1: top + high, y2: top + high + 3, class: "tw-axis" }));
      plot.append(svg("text", { x: at, y: top + high + 12, "text-anchor": "middle" }, axisNumber(edges[edge])));
    }
    plot.append(
      svg("text", { x: left + inner / 2, y: tall - 3, "text-anchor": "middle", class: "tw-axis-name" }, label),
    );
    plot.append(
      svg(
        "text",
        {
          x: 8,
          y: top + high / 2,
          "text-anchor": "middle",
          class: "tw-axis-name",
          transform: `rotate(-90 8 ${top + high / 2})`,
        },
        "tokens",
      ),
    );
    return plot;
  }

  words({ promotes, suppresses }) {
    const list = (title, words) =>
      make(
        "div",
        {},
        make("h5", {}, title),
        make(
          "div",
          { class: "tw-words" },
          ...words.map(([word, change]) =>
            make(
              "span",
              { class: "tw-word", title: `${signed(change)} a unit of h` },
              make("span", { class: "tw-pill", dir: "auto" }, ...pieces(word)),
              make("small", {}, signed(change)),
            ),
          ),
        ),
      );
    return make("div", { class: "tw-both-words" }, list("promotes (h > 0)", promotes), list("suppresses", suppresses));
  }

  placesOf(side, layer, neuron, known, again) {
    const kinds = [["passage", "here"]];
    if (known?.top?.length) kinds.push(["top", "strongest of all"], ["quantiles", "typical"]);
    if (!kinds.some(([kind]) => kind === this.places)) this.places = "passage";
    const tabs = make(
      "div",
      { class: "tw-tabs", role: "tablist" },
      ...kinds.map(([kind, name]) =>
        make(
          "button",
          {
            type: "button",
            role: "tab",
            "aria-selected": String(kind === this.places),
            data: { focus: `tab-${kind}` },
            onclick: () => {
              this.places = kind;
              again();
            },
          },
          name,
        ),
      ),
    );
    if (this.places === "passage")
      return make("div", { class: "tw-places" }, tabs, ...this.placesHere(side, layer, neuron, again));
    const rows = known[this.places].map(([value, quantile, before, text, after, sequence, position]) =>
      this.place(value, quantile, before, text, after, { title: `sequence ${sequence}, position ${position}` }),
    );
    return make("div", { class: "tw-places" }, tabs, ...rows);
  }

  // Where in the passage it fires, strongest first; a click goes there.
  placesHere(side, layer, neuron, again) {
    const { tokens, values } = side.column(layer, neuron);
    const order = Array.from(tokens, (_, n) => n).sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]) || a - b);
    const words = (from, to) =>
      Array.from({ length: Math.max(0, to - from) }, (_, at) => side.text(from + at)).join("");
    const shown = order.slice(0, this.far ? FAR : NEAR);
    const rows = shown.map((n) => {
      const token = tokens[n];
      const sequence = side.sequenceOf(token);
      const before = words(Math.max(side.starts[sequence], token - 12), token);
      const after = words(token + 1, Math.min(side.starts[sequence + 1], token + 8));
      return this.place(values[n], null, before, side.text(token), after, {
        onclick: () => this.choose(side, { token }),
        title: `go to token ${integer(token)}`,
      });
    });
    const more = () => {
      this.far = true;
      again();
    };
    const most = Math.min(order.length, FAR);
    if (!rows.length) rows.push(make("p", { class: "tw-quiet" }, "It fires nowhere in this passage."));
    if (most > shown.length)
      rows.push(
        make(
          "button",
          { type: "button", class: "tw-link tw-more", onclick: more },
          `show ${most === order.length ? "all " : ""}${most}`,
        ),
      );
    return rows;
  }

  place(value, quantile, before, text, after, properties) {
    return make(
      properties.onclick ? "button" : "div",
      { class: "tw-place", type: properties.onclick && "button", ...properties },
      make("b", { class: value < 0 ? "tw-minus" : "tw-plus" }, signed(value)),
      quantile !== null && make("small", {}, percent(quantile)),
      make("span", { class: "tw-before", dir: direction(before) }, make("span", {}, ...(before ? pieces(before) : []))),
      make("mark", { dir: "auto" }, ...pieces(text)),
      make("span", { class: "tw-after", dir: direction(after) }, ...(after ? pieces(after) : [])),
    );
  }
}

// Powers of two as one writes them: 1/16, 4, -32, 2 to the -12.
function axisNumber(value) {
  const size = Math.abs(value);
  const exponent = Math.log2(size);
  const text =
    size === 0
      ? "0"
      : exponent > 12 || exponent < -8
        ? `2${power(exponent)}`
        : size < 1
          ? `1/${1 / size}`
          : String(size);
  return (value < 0 ? "\u2212" : "") + text;
}

function power(exponent) {
  return String(exponent)
    .replace("-", "\u207b")
    .replace(/\d/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
}

function packed([r, g, b]) {
  return (255 << 24) | (b << 16) | (g << 8) | r;
}

// --- where it runs ----------------------------------------------------------------------------------

function render({ model, el }) {
  const view = new View(model, el);
  return () => view.close();
}

export default { render };

// Stands in for the widget's model in a page: traits, their changes, and the cards that the page has with it.
class PageModel {
  constructor(state) {
    this.state = state;
    this.listeners = new Map();
  }

  get(name) {
    return this.state[name];
  }

  set(name, value) {
    if (this.state[name] === value) return;
    this.state[name] = value;
    this.tell(`change:${name}`);
  }

  save_changes() {
    const chosen = Object.entries(this.state).filter(
      ([name, value]) => ["side", "token", "layer", "neuron", "colour"].includes(name) && value !== null,
    );
    history.replaceState(null, "", `#${chosen.map(([name, value]) => `${name}=${value}`).join("&")}`);
  }

  on(name, react) {
    this.listeners.set(name, [...(this.listeners.get(name) ?? []), react]);
  }

  off(name, react) {
    this.listeners.set(
      name,
      (this.listeners.get(name) ?? []).filter((one) => one !== react),
    );
  }

  tell(name, ...words) {
    for (const react of this.listeners.get(name) ?? []) react(...words);
  }

  async send({ ask }) {
    this.cards ??= unpack(this.state.data).then(({ cards }) => JSON.parse(new TextDecoder().decode(cards)));
    const card = (await this.cards)[ask] ?? { missing: true };
    this.tell("msg:custom", { key: ask, card });
  }
}

function openPage(el, text, view) {
  const letters = atob(text);
  const data = new Uint8Array(letters.length);
  for (let at = 0; at < data.length; at++) data[at] = letters.charCodeAt(at);
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (name in view) view[name] = name === "colour" ? value : Math.trunc(Number(value));
  }
  render({ model: new PageModel({ ...view, data, texts: [], runs: false, busy: false, error: "" }), el });
}
