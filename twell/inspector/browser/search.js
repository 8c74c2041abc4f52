// Search over all neurons of a model: by words of their examples, by words that they change, by
// numbers. Everything that a query needs is in the chunks of the catalog.

const WORDY = /[\p{L}\p{N}]/u;

// What a query says. within: a layer; box: what is brushed in the scatter, by its axes, as left,
// right, low, high; finding: whether the search is open.
export const QUERY = {
  ...{ words: "", where: "fires", within: null, state: "alive", sort: "match" },
  ...{ upright: "strength", box: null, finding: false },
};
export const WHERE = {
  fires: "fires at",
  around: "text around",
  promotes: "promotes",
  suppresses: "suppresses",
  note: "note",
};
export const STATES = { alive: "that fire", dead: "dead", all: "all" };
export const UPRIGHT = { strength: "mean |h|", layer: "layer" };
export const SORTS = {
  match: "match",
  rate: "fires",
  strength: "mean |h|",
  largest: "largest |h|",
  number: "number",
};

// { found, score, waiting, error }: indices layer * N + neuron in order, the score of each neuron
// (0: no match; null without words), whether chunks are still to come.
export function search(catalog, query) {
  const overview = catalog.chunk("overview");
  if (!overview || overview.error) return { waiting: !overview, error: overview?.error, found: [] };
  const words = query.words.trim().toLowerCase();
  const matched = words ? matches(catalog, overview, query, words) : { score: null };
  if (matched.waiting || matched.error) return { ...matched, found: [] };
  const { score } = matched;
  const within = query.within < overview.L ? query.within : null; // an address may ask for more
  const inside = (index) => {
    if (score && !score[index]) return false;
    const layer = Math.floor(index / overview.N);
    if (within !== null && layer !== within) return false;
    if (!overview.fires) return true;
    const alive = overview.fires[index] > 0;
    if (query.state !== "all" && alive !== (query.state === "alive")) return false;
    if (!query.box) return true;
    const [left, right, low, high] = query.box;
    const rate = overview.fires[index] / overview.about.tokens;
    const height = query.upright === "layer" ? layer : overview.strength[index];
    return rate >= left && rate <= right && height >= low && height <= high;
  };
  const found = ordered(overview, query.sort).filter(inside);
  if (score && query.sort === "match") found.sort((a, b) => score[b] - score[a]); // is stable
  return { found, score };
}

// All neurons by falling size, of equal ones the first first; each order is computed once.
function ordered(overview, sort) {
  const by = sort === "match" ? "strength" : sort;
  overview.orders ??= {};
  if (!overview.orders[by]) {
    const size = { ...overview, rate: overview.fires }[by];
    const every = Array.from({ length: overview.L * overview.N }, (_, index) => index);
    overview.orders[by] = size ? every.sort((a, b) => size[b] - size[a]) : every;
  }
  return overview.orders[by];
}

function matches(catalog, overview, { where }, words) {
  if (where === "fires" || where === "around") {
    if (!overview.fires) return { error: "There are no examples without an aggregate." };
    const text = catalog.chunk("text");
    if (!text || text.error) return { waiting: !text, error: text?.error };
    text.search ??= new TextSearch(text, overview);
    return { score: text.search.count(words, where === "fires") };
  }
  const score = new Float32Array(overview.L * overview.N);
  if (where === "note") {
    for (let index = 0; index < score.length; index++) {
      const note = catalog.note(Math.floor(index / overview.N), index % overview.N);
      if (note.toLowerCase().includes(words)) score[index] = 1;
    }
    return { score };
  }
  if (!overview.about.words)
    return { error: "Promoted words are known only where there is a model with its last norm." };
  const layers = Array.from({ length: overview.L }, (_, n) => catalog.chunk(`words-${n}`));
  const wrong = layers.find((chunk) => chunk?.error);
  if (wrong || layers.includes(undefined)) return { waiting: !wrong, error: wrong?.error };
  const exact = (text) => text === words;
  const begins = (text) => text.startsWith(words);
  for (const fits of [exact, begins]) {
    layers.forEach((chunk, layer) => {
      const part = score.subarray(layer * overview.N, (layer + 1) * overview.N);
      scoreWords(part, chunk, where === "promotes" ? 0 : 1, fits);
    });
    if (score.some((one) => one > 0)) break;
  }
  return { score };
}

// By how much each neuron of a layer changes the logit of a word. half: 0 raises, 1 lowers.
function scoreWords(score, { header, array, floats }, half, fits) {
  const known = header.strings.map((text) => fits(text.trim().toLowerCase()));
  if (!known.includes(true)) return;
  const word = array("word");
  const change = floats("change");
  const each = word.length / score.length;
  for (let at = 0; at < word.length; at++) {
    const neuron = Math.floor(at / each);
    if (known[word[at]] && Math.floor((2 * (at % each)) / each) === half)
      score[neuron] = Math.max(score[neuron], Math.abs(change[at]));
  }
}

// The text around all examples as one string of small letters, and which place is where.
class TextSearch {
  constructor(text, overview) {
    Object.assign(this, { text, overview });
    const small = text.strings.map((one) => one.toLowerCase());
    const size = text.token.length;
    const parts = new Array(size);
    this.offset = new Uint32Array(size + 1); // of each token in the string
    for (let at = 0; at < size; at++) {
      const goesOn =
        text.number[at + 1] === text.number[at] + 1 && text.sequence[at + 1] === text.sequence[at];
      parts[at] = goesOn ? small[text.token[at]] : `${small[text.token[at]]}\n\0`;
      this.offset[at + 1] = this.offset[at] + parts[at].length;
    }
    this.joined = parts.join("");
    this.first = new Uint32Array(size + 2); // places by their token: from first[at] of `places`
    for (const at of text.at) if (at) this.first[at]++;
    for (let at = 1; at < this.first.length; at++) this.first[at] += this.first[at - 1];
    this.places = new Uint32Array(text.at.length);
    for (let place = text.at.length - 1; place >= 0; place--)
      if (text.at[place]) this.places[--this.first[text.at[place]]] = place;
    this.seen = new Uint32Array(text.at.length);
    this.queries = 0;
  }

  // In how many of its examples each neuron has the words: where it fires, or anywhere in them.
  count(words, fires) {
    const score = new Float32Array(this.overview.L * this.overview.N);
    this.queries++;
    const whole = this.occurrences(words, true);
    for (const start of whole.length ? whole : this.occurrences(words, false)) {
      const from = this.tokenAt(start);
      const to = this.tokenAt(start + words.length - 1);
      this.countPlaces(score, from, to, fires);
    }
    return score;
  }

  // Where the words begin; whole: no letter or digit goes on before or after them.
  occurrences(words, whole) {
    const { joined } = this;
    const ends = [WORDY.test(words[0]), WORDY.test(words.at(-1))];
    const starts = [];
    for (let at = joined.indexOf(words); at >= 0; at = joined.indexOf(words, at + 1)) {
      const cut =
        (ends[0] && at > 0 && WORDY.test(joined[at - 1])) ||
        (ends[1] && WORDY.test(joined[at + words.length] ?? ""));
      if (!whole || !cut) starts.push(at);
    }
    return starts;
  }

  tokenAt(character) {
    let low = 0;
    let high = this.offset.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.offset[middle] <= character) low = middle;
      else high = middle;
    }
    return low;
  }

  countPlaces(score, from, to, fires) {
    const { number, sequence } = this.text;
    const { before, after } = this.overview.about;
    const low = fires ? from : Math.max(0, from - after);
    const high = fires ? to : Math.min(number.length - 1, to + before);
    const each = this.overview.places;
    for (let at = low; at <= high; at++) {
      if (number[at] - number[from] !== at - from || sequence[at] !== sequence[from]) continue;
      for (let n = this.first[at + 1]; n < this.first[at + 2]; n++) {
        const place = this.places[n];
        if (this.seen[place] === this.queries) continue;
        this.seen[place] = this.queries;
        score[Math.floor(place / each)]++;
      }
    }
  }
}
