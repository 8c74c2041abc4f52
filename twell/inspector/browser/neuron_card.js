// The card of the selected neuron: its firings in the passage, and what is known of it beyond.

import { drawHistogram, histograms, pairsOf } from "./charts.js";
import { makeScale } from "./colours.js";
import { changeControls } from "./compare.js";
import { strongestOf } from "./data.js";
import { button, chip, closer, element, fact } from "./elements.js";
import { labelled, numberBox, pieces, quiet, select, signedText, wordWith } from "./elements.js";
import { labelOf } from "./search.js";
import { integer, number, percent, plural, range, signed } from "./words.js";

const NEAR = 50; // places in the passage where a neuron fires most
const BEFORE = 24; // tokens of the passage around a place
const AFTER = 12;
const PLACES = { passage: "here", top: "strongest of all", quantiles: "quantiles" };
const SHARED_AXES = "Both histograms have the same bins and the same axes.";
const ONLY_PLACES =
  "These statistics keep h at the marked token alone; `twell trace --aggregate` of this version " +
  "keeps it at all of them.";
// Neighbours: label and explanation of each kind.
const NEIGHBOURS = {
  together: ["fires together", "correlation (phi) of which tokens they fire for"],
  down: ["output alike", "cosine of what they add to the residual stream"],
  read: ["read it", "neurons of later layers: cosine of their gate rows with what this one adds"],
  written: ["it reads", "neurons of earlier layers: cosine of what they add with this gate row"],
};

export class NeuronCard {
  constructor(cards) {
    this.cards = cards;
    this.state = cards.state;
    this.places = "passage"; // which examples are shown
  }

  // Name of the card, what it shows as a text, and how it is built.
  part(side, layer, neuron) {
    const { state, cards } = this;
    const changes = [JSON.stringify(state.get("changes")), state.get("colour") === "effect"];
    const traits = [layer, neuron, ...changes, state.ramps.dark];
    const shown = [...traits, state.get("skip_first"), this.places, cards.view.chunks].join();
    return [`neuron${side.number}`, shown, () => this.build(side, layer, neuron)];
  }

  build(side, layer, neuron) {
    const card = side.catalog?.card(layer, neuron);
    const known = card && !card.error ? card : {};
    const choose = (...other) => this.state.chooseNeuron(side, ...other);
    return element(
      "section.tw-card.tw-neuron",
      { "aria-label": `neuron, ${side.about.name}` },
      this.state.sides.length === 2 && element("div.tw-of", side.about.name),
      this.head(side, layer, neuron),
      noteOf(side, layer, neuron, known),
      !known.note && automatic(side, layer, neuron, known),
      changeControls(this.state, side, layer, neuron),
      element(
        "div.tw-neuron-body",
        { data: { of: [layer, neuron].join() } },
        this.statistics(side, layer, neuron, known),
        this.examples(side, layer, neuron, known),
      ),
      neighbours(known, choose),
      this.missing(side, card),
    );
  }

  head(side, layer, neuron) {
    const { state } = this;
    const title = element(
      "h2",
      "Layer ",
      picker("layer", layer, side.L - 1, (n) => state.chooseNeuron(side, n, neuron)),
      " neuron ",
      picker("neuron", neuron, side.N - 1, (n) => state.chooseNeuron(side, layer, n)),
    );
    const close = closer("let go of the neuron", () => state.letGo());
    return element("div.tw-card-head", title, close);
  }

  statistics(side, layer, neuron, known) {
    const { tokens, values } = side.column(layer, neuron);
    const fires = side.firings(layer, neuron);
    const here = `${percent(fires / side.T)}, ${integer(fires)} of ${integer(side.T)}`;
    const share = known.fires ? percent(known.fires / known.tokens) : "never: it is dead";
    const facts = [
      side.T > 0 && fact("fires here", here),
      tokens.length > 0 && fact("strongest here", signed(strongestOf(values))),
      known.fires !== undefined && fact(`of ${integer(known.tokens)} tokens`, share),
      known.fires > 0 && fact("mean", signed(known.mean)),
      known.fires > 0 && fact("largest |h|", number(known.largest)),
    ];
    const first = tokens.filter((token) => !side.position[token]).length;
    const hidden = this.state.get("skip_first") && first > 0;
    const kept = `Shown are the ${integer(tokens.length)} of its firings that are kept.`;
    return element(
      "div",
      element("div.tw-factbox", facts),
      fires > tokens.length && quiet(kept),
      hidden && quiet(`Colours leave out ${plural(first, "firing")} at first tokens.`),
      this.histogram(side, layer, neuron),
      known.promotes && promoted(known),
    );
  }

  // Of the aggregate if there is one, else of the passage. Two sides show the same, so that they
  // share bins and axes.
  histogram(side, layer, neuron) {
    const sides = this.state.sharing(side);
    const cards = sides.map((one) => one.catalog?.card(layer, neuron));
    const counted = cards.every((card) => card?.histogram);
    const inside = (one) => one.column(layer, neuron).values.map((value) => [value, 1]);
    const innermost = ({ edges }) => edges[(edges.length + 1) / 2];
    const all = counted
      ? histograms(cards.map(pairsOf), Math.max(...cards.map(innermost)))
      : histograms(sides.map(inside));
    const at = sides.indexOf(side);
    const { fires, tokens } = counted ? cards[at] : {};
    const among = counted ? `over ${integer(tokens)} tokens` : "in this passage";
    const number = fires ?? side.column(layer, neuron).tokens.length;
    if (!number) return null;
    const chart = drawHistogram(all[at], all, `${among} (n = ${integer(number)})`);
    return [chart, all.length > 1 && quiet(SHARED_AXES)];
  }

  missing(side, card) {
    const loading = side.catalog && (!card || card.waiting) && "loading \u2026";
    const lines = new Set([...(card?.missing ?? []), loading, card?.error, this.unkept]);
    return [...lines].filter(Boolean).map((line) => quiet(line));
  }

  // Examples: those of the passage, the strongest of all, or those at quantiles.
  examples(side, layer, neuron, known) {
    const far = known.top?.length ? ["top", "quantiles"] : [];
    const kinds = [...(side.T ? ["passage"] : []), ...far];
    const kind = kinds.includes(this.places) ? this.places : kinds[0];
    const choose = (places) => {
      this.places = places;
      this.cards.view.schedule();
    };
    const names = kinds.map((one) => [one, PLACES[one]]);
    const here = kind === "passage";
    return element(
      "div.tw-places",
      kinds.length > 0 && labelled("Examples", select("examples", names, kind, choose)),
      element(
        "div.tw-scrolled",
        { tabindex: "0", data: { of: kind } },
        here && this.placesHere(side, layer, neuron),
        known[kind]?.map((example) => this.exampleLine(side, example, known.largest)),
      ),
      far.includes(kind) && !known.near && quiet(ONLY_PLACES),
    );
  }

  placesHere(side, layer, neuron) {
    const { tokens, values } = side.column(layer, neuron);
    if (!tokens.length) return quiet("It fires nowhere in this passage.");
    const order = tokens.map((_, n) => n);
    order.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]) || a - b);
    const largest = Math.abs(values[order[0]]);
    const shades = new Map(order.map((n) => [tokens[n], values[n]]));
    return order.slice(0, NEAR).map((n) => {
      const example = { value: values[n], quantile: null, ...around(side, tokens[n], shades) };
      return this.exampleLine(side, example, largest, tokens[n]);
    });
  }

  // An example with every token shaded by its h; a click goes to it, where it is of the passage.
  exampleLine(side, example, largest, token = null) {
    const { value, quantile, tokens, shades, here } = example;
    const scale = makeScale("signed", [0, largest], "", this.state.ramps);
    const { fill, ink } = scale.ramp;
    const line = element("span.tw-example", { dir: "auto" });
    tokens.forEach((text, n) => {
      if (!shades[n] && n !== here) return line.append(...pieces(text));
      const index = scale.index(shades[n] || 0);
      const style = { backgroundColor: fill[index], color: ink[index] };
      const tag = n === here ? "mark" : "span";
      line.append(element(tag, { style, title: `h ${signed(shades[n])}` }, pieces(text)));
    });
    line.normalize();
    const parts = [
      signedText(value),
      quantile !== null && element("small", percent(quantile)),
      line,
    ];
    if (token === null) {
      const title = `sequence ${integer(example.sequence)}, position ${example.position}`;
      return element("div.tw-place", { title }, parts);
    }
    const about = { title: `go to token ${integer(token)}` };
    return button(".tw-place", () => this.state.choose(side, { token }), about, parts);
  }
}

function around(side, token, values) {
  const sequence = side.sequenceOf(token);
  const first = Math.max(side.starts[sequence], token - BEFORE);
  const last = Math.min(side.starts[sequence + 1] - 1, token + AFTER);
  const numbers = range(first, last);
  return {
    tokens: numbers.map((n) => side.text(n)),
    shades: numbers.map((n) => values.get(n) ?? 0),
    here: token - first,
  };
}

function picker(label, value, most, choose) {
  const onchange = ({ target }) =>
    target.checkValidity() ? choose(target.valueAsNumber) : (target.value = String(value));
  const range = { min: "0", max: String(most), step: "1", required: true };
  return numberBox(label, value, null, { ...range, onchange });
}

// The automatic label, which a note of one's own replaces.
function automatic({ catalog }, layer, neuron, { promotes = [] }) {
  const label = labelOf(catalog, layer, neuron, promotes.map(([word]) => word));
  return label && element("p.tw-label", label);
}

// One's own note: a box if it can be kept, else its text.
function noteOf({ catalog }, layer, neuron, { note, overview }) {
  if (!overview?.about.keeps || !catalog.write) return note && element("p.tw-noted", note);
  return element("input.tw-noting", {
    ...{ type: "text", value: note, "aria-label": "note" },
    placeholder: "A note of your own, kept in notes.txt beside the model",
    onchange: ({ target }) => catalog.write(layer, neuron, target.value),
  });
}

// The words that a neuron promotes. A gated neuron's h has both signs: words that a positive one
// promotes a negative one suppresses.
function promoted({ promotes, suppresses, overview }) {
  const { gated } = overview.about;
  const [first, second, turned] = gated
    ? ["when positive it promotes", "when negative it promotes", -1]
    : ["promotes", "suppresses", 1];
  const list = (title, words, sign) => {
    const about = { title: "change of the logit at |h| = 1, against the mean over all words" };
    const word = ([text, change]) => wordWith(text, signed(sign * change), "", about);
    return element("div", element("h3", title), element("div.tw-words", words.map(word)));
  };
  const lists = [list(first, promotes, 1), list(second, suppresses, turned)];
  const swapped = "With the other sign of h it suppresses these words. Numbers: logits at |h| = 1.";
  return element("div", element("div.tw-both-words", lists), gated && quiet(swapped));
}

function neighbours({ like = [], together = [] }, choose) {
  const one = ([of, neuron, size]) => {
    const about = { onclick: () => choose(of, neuron), title: `layer ${of}, neuron ${neuron}` };
    return chip(`${of} \u00b7 ${neuron}`, size, 2, about);
  };
  const rows = [["together", together], ...like].filter(([, neurons]) => neurons.length);
  const line = ([kin, neurons]) => {
    const [label, title] = NEIGHBOURS[kin];
    const about = element("span.tw-quiet", { title }, label);
    return element("div.tw-kin", { data: { kin } }, about, neurons.map(one));
  };
  const heading = element("h3", "Neighbours: layer \u00b7 neuron");
  return rows.length > 0 && element("div.tw-kins", heading, rows.map(line));
}
