// Search over all neurons of a model: by the tokens at which they fire, by words of their examples,
// by words that they change, by numbers. What a query needs is in the passage and the catalog.

import { BEST, isList, SELECTIONS, tallyExamples, tallyPassage } from "./classes.js";
import { range } from "./words.js";

const CLEAR = 0.5; // phi of a class that is a label
const FEWEST = 3; // members of a class in a passage

// within: a layer; selected: tokens (classes.js), as whole words, with their case, over the passage
// or the examples of the aggregate; finding: whether the search is open.
export const QUERY = {
  words: "",
  selected: BEST,
  whole: false,
  cases: false,
  over: "passage",
  where: "all",
  within: null,
  sort: "match",
  finding: false,
};
const BEST_EXAMPLES = { selected: BEST, over: "examples" };
export const WHERE = {
  all: "all neurons",
  selected: "tell tokens apart",
  promotes: "promotes",
  suppresses: "suppresses",
  note: "label or note",
};
export const OVER = { passage: "over this text", examples: "over the examples" };
export const SORTS = {
  match: "match",
  rate: "fires",
  strength: "mean |h|",
  largest: "largest |h|",
  number: "number",
};

// Return { found, score, waiting, error }. found: indices layer * N + neuron in order; score: of
// each neuron, 0 for no match, null without words; waiting: true while chunks load. Of selected
// tokens also tallyOf and classOf a neuron. skip: whether first tokens are left out.
export function search(catalog, query, side, skip) {
  const overview = catalog.chunk("overview");
  if (!overview || overview.error) return { waiting: !overview, error: overview?.error, found: [] };
  const words = query.words.trim();
  let matched = { score: null };
  try {
    if (query.where === "selected") matched = ranked(catalog, overview, query, side, skip);
    else if (words && query.where !== "all") matched = matches(catalog, overview, query, words);
  } catch (error) {
    matched = { error: error.message }; // no pattern
  }
  if (matched.waiting || matched.error) return { ...matched, found: [] };
  const { score } = matched;
  const found = ordered(overview, query.sort).filter(
    (index) => (!score || score[index] > 0) && isInside(overview, query, index),
  );
  if (score && query.sort === "match") found.sort((a, b) => score[b] - score[a]); // is stable
  return { ...matched, found };
}

// Whether a neuron is in the layer of the query.
function isInside({ N, L }, { within }, index) {
  const exists = within !== null && within < L; // an address may ask for more
  return !exists || Math.floor(index / N) === within;
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
  const score = new Float32Array(overview.L * overview.N);
  words = words.toLowerCase();
  if (where === "note") {
    const none = { score: {}, classOf() {} };
    const ranks = overview.fires ? ranked(catalog, overview, BEST_EXAMPLES, {}, true) : none;
    const automatic = (at) => labelled(overview, at, ranks.score[at], ranks.classOf(at));
    const note = (at) => catalog.note(Math.floor(at / overview.N), at % overview.N);
    const label = (at) => note(at) || automatic(at);
    if (ranks.waiting || ranks.error) return ranks;
    return { score: score.map((_, at) => label(at).toLowerCase().includes(words)), label };
  }
  if (!overview.about.words)
    return { error: "Promoted words are known only where there is a model with its last norm." };
  const layers = chunksOf(catalog, overview, "words");
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

// How well each neuron tells the selected tokens from the others: phi, the tally behind it, and the
// class where each neuron has its own.
function ranked(catalog, overview, query, side, skip) {
  const { counts } = overview;
  const inPassage = side.T > 0 && query.over === "passage";
  const wrong = !inPassage && whyNoExamples(overview, query);
  if (wrong) return { error: wrong };
  const layers = inPassage ? [] : chunksOf(catalog, overview, "layer");
  const chunks = inPassage ? [] : [catalog.chunk("text"), ...layers];
  const broken = chunks.find((chunk) => chunk?.error);
  if (broken || chunks.includes(undefined)) return { waiting: !broken, error: broken?.error };
  const text = inPassage ? side.tokens : chunks[0];
  const every = range(0, overview.L * overview.N - 1);
  const tallied = (members) =>
    inPassage
      ? tallyPassage(side, members, skip)
      : tallyExamples(overview, text, layers, (token) => members[token], skip, every);
  if (query.selected !== BEST) {
    const tally = tallied(text.select(query.selected, query, counts));
    return { score: tally.tokens.map((_, index) => tally.phi(index)), tallyOf: () => tally };
  }
  const score = new Float64Array(overview.L * overview.N);
  const best = new Array(score.length);
  for (const name of SELECTIONS.slice(1)) {
    const tally = tallied(text.members(name, counts));
    if (inPassage && tally.members[0] < FEWEST) continue;
    score.forEach((highest, index) => {
      const phi = tally.phi(index);
      if (phi > highest) [score[index], best[index]] = [phi, { tally, name }];
    });
  }
  return { score, tallyOf: (index) => best[index].tally, classOf: (index) => best[index]?.name };
}

function whyNoExamples({ fires }, { selected }) {
  if (!fires) return "There are no examples without an aggregate.";
  if (isList(selected)) return "These tokens are of the passage; choose a class or a pattern.";
  return null;
}

// Automatic labels: the class that a neuron clearly tells apart over its examples, with its phi; the
// tokens where it fires most; and words that it promotes.
function labelled(overview, index, phi, name, promotes = []) {
  const quoted = (words) => words.map((word) => `\u201c${word.trim()}\u201d`).join(" ");
  const parts = [
    phi >= CLEAR && `${name}, phi ${phi.toFixed(2)}`,
    overview.fires?.[index] > 0 && `fires at ${quoted(overview.peaksOf(index).slice(0, 3))}`,
    promotes.length > 0 && `promotes ${quoted(promotes.slice(0, 3))}`,
  ];
  return parts.filter(Boolean).join("; ");
}

// promotes: words. Undefined while chunks load, or where there is no aggregate.
export function labelOf(catalog, layer, neuron, promotes) {
  const { overview, text } = { overview: catalog.chunk("overview"), text: catalog.chunk("text") };
  const layers = { [layer]: catalog.chunk(`layer-${layer}`) };
  if (!overview?.fires || !text?.token || !layers[layer]?.arrays) return undefined;
  const index = layer * overview.N + neuron;
  const phiOf = (name) => {
    const isMember = text.test(name, overview.counts);
    return tallyExamples(overview, text, layers, isMember, true, [index]).phi(0);
  };
  const phis = SELECTIONS.slice(1).map((name) => [phiOf(name), name]);
  const best = phis.reduce((one, other) => (other[0] > one[0] ? other : one));
  return labelled(overview, index, ...best, promotes);
}

function chunksOf(catalog, { L }, kind) {
  return range(0, L - 1).map((layer) => catalog.chunk(`${kind}-${layer}`));
}
