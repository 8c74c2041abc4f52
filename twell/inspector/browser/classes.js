// Classes of tokens, and how well each neuron tells the tokens of a class from all others. Tokens
// are selected by the name of a class, by a pattern, or one by one: in the passage, or in the text
// around the examples of an aggregate.

import { BYTES, range } from "./words.js";

const RARE = 1 / 10_000; // of the aggregate's tokens
const WORD = "[\\p{L}\\p{N}]";
const INSIDE = /[\p{L}\p{N}]$/u;

// Tests of a token: its text, the text before it (null if unknown), whether it is the first of its
// sequence, and whether it is rare.
const CLASSES = {
  digits: (text) => /\d/.test(text),
  "digits after digits": (text, before) => /^\d/.test(text) && /\d$/.test(before),
  capitals: (text) => /^\s*\p{Lu}/u.test(text),
  punctuation: (text) => /^\s*[\p{P}\p{S}]+\s*$/u.test(text),
  "first token": (_, __, first) => first,
  "sentence start": (text, before) =>
    /^\s*\p{L}/u.test(text) && /([.!?]["')\]]*\s*|\n)$/.test(before) && apart(text, before),
  "line start": (text, before) => /\S/.test(text) && /\n$/.test(before),
  "word start": (text, before) =>
    /^\s*\p{L}/u.test(text) && before !== null && (apart(text, before) || !INSIDE.test(before)),
  "inside of a word": (text, before) => /^\p{L}/u.test(text) && INSIDE.test(before ?? ""),
  "rare words": (text, _, __, rare) => rare && /\p{L}{2}/u.test(text),
};
const apart = (text, before) => /^\s/.test(text) || /\s$/.test(before);

export const BEST = "the best class of each neuron";
export const SELECTIONS = [BEST, ...Object.keys(CLASSES)];

// Words, or a regular expression between slashes, as a pattern. whole: no letter or digit goes on
// before or after. Raises SyntaxError.
export function patternOf(words, whole, cases) {
  const escaped = words.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
  const source = words.match(/^\/(.+)\/$/)?.[1] ?? escaped;
  const [start, end] = [`(?:(?<!${WORD})|(?!${WORD}))`, `(?:(?!${WORD})|(?<!${WORD}))`];
  return new RegExp(whole ? `${start}(?:${source})${end}` : source, cases ? "gu" : "giu");
}

const GAP = "\0"; // no match crosses it

// Tokens as numbers of strings, with gaps. follows(n): token n comes right behind the one before.
export class Tokens {
  constructor(strings, token, position, follows) {
    Object.assign(this, { strings, token, position, follows, known: new Map() });
  }

  // Of each token whether it has a part of a match.
  mark(pattern) {
    this.joined ??= this.join();
    const { text, offset } = this.joined;
    const marked = new Uint8Array(this.token.length);
    let [token, start] = [0, 0];
    for (const run of text.split(GAP)) {
      for (const { index, 0: match } of run.matchAll(pattern)) {
        if (!match) continue;
        while (offset[token + 1] <= start + index) token++;
        for (let at = token; offset[at] < start + index + match.length; at++) marked[at] = 1;
      }
      start += run.length + GAP.length;
    }
    return marked;
  }

  join() {
    const size = this.token.length;
    const parts = new Array(size);
    const offset = new Uint32Array(size + 1);
    for (let at = 0; at < size; at++) {
      const string = this.strings[this.token[at]];
      const gap = at + 1 < size && !this.follows(at + 1) ? GAP : "";
      parts[at] = (BYTES.test(string) ? "\ufffd" : string) + gap;
      offset[at + 1] = offset[at] + parts[at].length;
    }
    return { text: parts.join(""), offset };
  }

  // Of each token whether it is of a class. counts: of the strings in an aggregate's text.
  members(name, counts) {
    const key = `${name} ${Boolean(counts)}`;
    if (!this.known.has(key)) {
      const isMember = this.test(name, counts);
      this.known.set(key, this.token.map((_, n) => isMember(n)));
    }
    return this.known.get(key);
  }

  // A function that says whether a token is of a class.
  test(name, counts) {
    const { strings, token, position } = this;
    const total = counts ? [...counts.values()].reduce((sum, count) => sum + count, 0) : 0;
    const known = new Map();
    return (n) => {
      const first = position[n] === 0;
      const before = first ? 0 : this.follows(n) ? 1 + token[n - 1] : -1;
      const key = token[n] * (strings.length + 2) + before;
      if (known.has(key)) return known.get(key);
      const text = BYTES.test(strings[token[n]]) ? "" : strings[token[n]]; // bytes are no digits
      const prior = first ? "" : (strings[before - 1] ?? null);
      const is = CLASSES[name](text, prior, first, (counts?.get(text) ?? 0) < RARE * total);
      known.set(key, is);
      return is;
    };
  }

  // selected: the name of a class, tokens such as "#3,4,9", or a pattern. Raises SyntaxError.
  select(selected, { whole, cases }, counts) {
    if (Object.hasOwn(CLASSES, selected)) return this.members(selected, counts);
    if (!isList(selected)) return this.mark(patternOf(selected, whole, cases));
    const members = new Uint8Array(this.token.length);
    for (const token of listed(selected)) members[token] = 1;
    return members;
  }
}

export const isList = (selected) => /^#\d+(,\d+)*$/.test(selected);
export const listed = (selected) => (isList(selected) ? selected.slice(1).split(",") : []);

// Of each neuron: tokens and members that were looked at, its firings and those at members, and the
// sums of its h.
export class Tally {
  constructor(size) {
    for (const name of ["tokens", "members", "fires", "both", "inside", "sum"])
      this[name] = new Float64Array(size);
  }

  fire(index, member, h) {
    this.fires[index]++;
    this.sum[index] += h;
    if (!member) return;
    this.both[index]++;
    this.inside[index] += h;
  }

  // The correlation of "fires" with "is a member"; 0 where one of them is constant.
  phi(index) {
    const [n, p, f] = [this.tokens[index], this.members[index], this.fires[index]];
    return (this.both[index] * n - p * f) / Math.sqrt(p * (n - p) * f * (n - f)) || 0;
  }

  // Means of h are over tokens, 0 where the neuron is silent.
  measures(index) {
    const [n, p, f] = [this.tokens[index], this.members[index], this.fires[index]];
    const [both, inside] = [this.both[index], this.inside[index]];
    return {
      ...{ phi: this.phi(index), precision: both / f, recall: both / p, fires: f / n },
      ...{ "h inside": inside / p, outside: (this.sum[index] - inside) / (n - p) },
    };
  }
}

// A first token counts where it is a member, or where first tokens are not left out.
export function tallyPassage(side, members, skip) {
  const tally = new Tally(side.L * side.N);
  const counts = (token) => !skip || members[token] || side.position[token] > 0;
  const tokens = range(0, side.T - 1).filter(counts);
  tally.tokens.fill(tokens.length);
  tally.members.fill(tokens.filter((token) => members[token]).length);
  for (let layer = 0; layer < side.L; layer++)
    for (const token of tokens) {
      const row = layer * side.T + token;
      for (let at = side.pointer[row]; at < side.pointer[row + 1]; at++)
        tally.fire(layer * side.N + side.neuron[at], members[token], side.value[at]);
    }
  return tally;
}

// Over the tokens around each neuron's own examples, where h is kept. isMember: of a token.
export function tallyExamples(overview, text, layers, isMember, skip, indices) {
  const { N, places, width, largest } = overview;
  const { before, after } = overview.about;
  const tally = new Tally(indices.length);
  indices.forEach((index, row) => {
    const { near } = layers[Math.floor(index / N)].arrays;
    for (let place = 0; place < places; place++) {
      const at = text.at[index * places + place] - 1;
      if (at < 0) continue;
      const [first, last] = text.around(at, before, after);
      const from = ((index % N) * places + place) * width + before - at;
      for (let token = first; token <= last; token++) {
        const member = isMember(token);
        if (skip && !member && !text.position[token]) continue;
        tally.tokens[row]++;
        tally.members[row] += member;
        const h = near[from + token];
        if (h) tally.fire(row, member, (h * largest[index]) / 127);
      }
    }
  });
  return tally;
}
