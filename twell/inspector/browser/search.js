// Search over all neurons of a model: by words of their examples, by words that they change, by
// numbers. Everything that a query needs is in the chunks of the catalog.

const WORDY = /[\p{L}\p{N}]/u;

// within: a layer; finding: whether the search is open.
export const QUERY = {
  words: "",
  where: "fires",
  within: null,
  state: "alive",
  sort: "match",
  finding: false,
};
export const WHERE = {
  fires: "fires at",
  around: "text around",
  promotes: "promotes",
  suppresses: "suppresses",
  note: "note",
};
export const STATES = { alive: "that fire", dead: "dead", all: "all" };
export const SORTS = {
  match: "match",
  rate: "fires",
  strength: "mean |h|",
  largest: "largest |h|",
  number: "number",
};

// Return { found, score, waiting, error }. found: indices layer * N + neuron in order; score: of
// each neuron, 0 for no match, null without words; waiting: true while chunks load.
export function search(catalog, query) {
  const overview = catalog.chunk("overview");
  if (!overview || overview.error) return { waiting: !overview, error: overview?.error, found: [] };
  const words = query.words.trim().toLowerCase();
  const matched = words ? matches(catalog, overview, query, words) : { score: null };
  if (matched.waiting || matched.error) return { ...matched, found: [] };
  const { score } = matched;
  const found = ordered(overview, query.sort).filter(
    (index) => (!score || score[index]) && isInside(overview, query, index),
  );
  if (score && query.sort === "match") found.sort((a, b) => score[b] - score[a]); // is stable
  return { found, score };
}

// Whether a neuron is in the layer, and alive or dead, as the query has it.
function isInside({ N, L, fires }, { within, state }, index) {
  const exists = within !== null && within < L; // an address may ask for more
  if (exists && Math.floor(index / N) !== within) return false;
  return !fires || state === "all" || fires[index] > 0 === (state === "alive");
}

// All neurons by falling size; equal ones by number. Each order is computed once.
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
    const note = (at) => catalog.note(Math.floor(at / overview.N), at % overview.N);
    return { score: score.map((_, at) => note(at).toLowerCase().includes(words)) };
  }
  if (!overview.about.words)
    return { error: "Promoted words are known only where there is a model with its last norm." };
  const layers = Array.from({ length: overview.L }, (_, n) => catalog.chunk(`words-${n}`));
  const wrong = layers.find((chunk) => chunk?.error);
  if (wrong || layers.includes(undefined)) return { waiting: !wrong, error: wrong?.error };
  const small = (text) => text.trim().toLowerCase();
  const exact = layers.some(({ header }) => header.strings.some((text) => small(text) === words));
  const fits = (text) => (exact ? small(text) === words : small(text).startsWith(words));
  layers.forEach((chunk, layer) => {
    const part = score.subarray(layer * overview.N, (layer + 1) * overview.N);
    scoreWords(part, chunk, where === "promotes" ? 0 : 1, fits);
  });
  return { score };
}

// Score the neurons of a layer by how much each changes the logit of a word. half: 0 raises it, 1
// lowers it.
function scoreWords(score, { header, arrays: { word, change } }, half, fits) {
  const known = header.strings.map(fits);
  const each = word.length / score.length;
  for (let at = 0; at < word.length; at++) {
    const neuron = Math.floor(at / each);
    if (known[word[at]] && Math.floor((2 * (at % each)) / each) === half)
      score[neuron] = Math.max(score[neuron], Math.abs(change[at]));
  }
}

// The text around all examples as one string of small letters.
class TextSearch {
  constructor(text, overview) {
    Object.assign(this, { text, overview });
    const small = text.strings.map((one) => one.toLowerCase());
    const size = text.token.length;
    const parts = new Array(size);
    this.offset = new Uint32Array(size + 1); // of each token in the string
    for (let at = 0; at < size; at++) {
      const end = text.last[at] === at ? "\n\0" : ""; // no words go on over a gap
      parts[at] = small[text.token[at]] + end;
      this.offset[at + 1] = this.offset[at] + parts[at].length;
    }
    this.joined = parts.join("");
  }

  // In how many of its examples each neuron has the words: where it fires, or anywhere in them.
  count(words, fires) {
    const { text, overview } = this;
    const whole = this.occurrences(words, true);
    const marked = this.mark(whole.length ? whole : this.occurrences(words, false), words.length);
    const { before, after } = fires ? { before: 0, after: 0 } : overview.about;
    const each = overview.places;
    const score = new Float32Array(overview.L * overview.N);
    for (let index = 0; index < score.length; index++)
      for (let place = index * each; place < (index + 1) * each; place++) {
        const at = text.at[place] - 1;
        if (at < 0) continue;
        const [from, to] = text.around(at, before, after);
        if (marked[to + 1] > marked[from]) score[index]++;
      }
    return score;
  }

  // How many tokens before each one have a part of the words.
  mark(starts, length) {
    const marked = new Uint32Array(this.offset.length);
    let token = 0;
    for (const start of starts) {
      while (this.offset[token + 1] <= start) token++;
      for (let at = token; this.offset[at] < start + length; at++) marked[at + 1] = 1;
    }
    for (let at = 1; at < marked.length; at++) marked[at] += marked[at - 1];
    return marked;
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
}
