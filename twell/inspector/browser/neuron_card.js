// The card of the selected neuron: its firings in the passage, and what is known of it beyond.

import { makeScale } from "./colours.js";
import { alikeness, changeControls } from "./compare.js";
import { strongestOf } from "./data.js";
import { button, element } from "./elements.js";
import { drawHistogram, histograms, pairsOf } from "./histogram.js";
import { closer, fact, quiet, wordWith } from "./parts.js";
import { direction, integer, number, percent, pieces, signed } from "./words.js";

const NEAR = 8; // places where a neuron fires
const FAR = 200; // when all are asked for
const BEFORE = 24; // tokens of the passage around a place
const AFTER = 12;
const TABS = { passage: "here", top: "strongest of all", quantiles: "quantiles" };
const SHARED_AXES = "Both histograms have the same bins and the same axes.";
const ONLY_PLACES =
  "These statistics keep h at the marked token alone; `twell trace --aggregate` of this version " +
  "keeps it at all of them.";
// Neighbours in the neuron's own layer, and in all layers: label and explanation of each kind.
const IN_LAYER = {
  together: ["fires together", "correlation (phi) of which tokens they fire for"],
  gate: ["gate alike", "cosine of the rows of the gate projection, which decides when they fire"],
  up: ["up alike", "cosine of the rows of the up projection, which gives h its size and sign"],
};
const IN_ALL = {
  down: ["output alike", "cosine of what they add to the residual stream"],
  read: ["read it", "neurons of later layers: cosine of their gate rows with what this one adds"],
  written: ["it reads", "neurons of earlier layers: cosine of what they add with this gate row"],
};

export class NeuronCard {
  // cards: { state, show }.
  constructor(cards) {
    this.cards = cards;
    this.state = cards.state;
    this.places = "passage"; // the tab that is open
    this.far = false; // all places in the passage are listed
  }

  build(side, layer, neuron) {
    const card = side.catalog?.card(layer, neuron);
    const known = card && !card.error ? card : {};
    const choose = (...other) => this.state.chooseNeuron(side, ...other);
    const tab = this.openTab(side, known);
    return element(
      "section.tw-card.tw-neuron",
      { "aria-label": "neuron" },
      this.state.sides.length === 2 && element("div.tw-of", side.about.name),
      this.head(side, layer, neuron),
      alikeness(this.state, layer, neuron),
      noteOf(side, layer, neuron, known),
      changeControls(this.state, layer, neuron),
      element(
        "div.tw-neuron-body",
        this.statistics(side, layer, neuron, known),
        element("div.tw-places", this.tabs(tab), this.placesOf(tab, side, layer, neuron, known)),
      ),
      element("div.tw-kinds", neighbours(known, layer, choose)),
      this.missing(side, card),
    );
  }

  head(side, layer, neuron) {
    const { state } = this;
    const title = element(
      "h4",
      "Layer ",
      picker("layer", layer, side.L - 1, (n) => state.chooseNeuron(side, n, neuron)),
      " neuron ",
      picker("neuron", neuron, side.N - 1, (n) => state.chooseNeuron(side, layer, n)),
    );
    return element(
      "div.tw-card-head",
      title,
      closer("let go of the neuron", () => state.letGo()),
    );
  }

  statistics(side, layer, neuron, known) {
    const facts = [];
    const { tokens, values } = side.column(layer, neuron);
    const fires = side.firings(layer, neuron);
    if (side.T) {
      const here = `${percent(fires / side.T)}, ${integer(fires)} of ${integer(side.T)}`;
      facts.push(fact("fires here", here));
    }
    if (tokens.length) facts.push(fact("strongest here", signed(strongestOf(values))));
    if (known.fires !== undefined) {
      const among = `of ${integer(known.tokens)} tokens`;
      const share = known.fires ? percent(known.fires / known.tokens) : "never: it is dead";
      facts.push(fact(among, share));
      if (known.fires)
        facts.push(fact("mean", signed(known.mean)), fact("largest |h|", number(known.largest)));
    }
    const kept = `Shown are the ${integer(tokens.length)} of its firings that are kept.`;
    return element(
      "div",
      element("div.tw-factbox", facts),
      fires > tokens.length && quiet(kept),
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
    const { fires, tokens, quantiles } = counted ? cards[at] : {};
    const among = counted ? `over ${integer(tokens)} tokens` : "in this passage";
    const number = fires ?? side.column(layer, neuron).tokens.length;
    if (!number) return null;
    const chart = drawHistogram(all[at], all, `${among} (n = ${integer(number)})`, quantiles);
    return [chart, all.length > 1 && quiet(SHARED_AXES)];
  }

  // What is still to come, or could not.
  missing(side, card) {
    const lines = new Set(card?.missing ?? []);
    if (side.catalog && (!card || card.waiting)) lines.add("loading \u2026");
    if (card?.error) lines.add(card.error);
    if (this.unkept) lines.add(this.unkept);
    return [...lines].map((line) => quiet(line));
  }

  // The tab that is shown among those that there are.
  openTab(side, known) {
    const far = known.top?.length ? ["top", "quantiles"] : [];
    const kinds = [...(side.T ? ["passage"] : []), ...far];
    return { kinds, shown: kinds.includes(this.places) ? this.places : kinds[0] };
  }

  tabs({ kinds, shown }) {
    const tab = (kind) => {
      const open = () => {
        this.places = kind;
        this.cards.show();
      };
      return button("", open, { role: "tab", "aria-selected": String(kind === shown) }, TABS[kind]);
    };
    return element("div.tw-tabs", { role: "tablist" }, kinds.map(tab));
  }

  placesOf({ shown }, side, layer, neuron, known) {
    if (shown === "passage") return this.placesHere(side, layer, neuron);
    const examples = known[shown] ?? [];
    const lines = examples.map((example) => {
      const token = side.find(example.tokens, example.here);
      const where = `sequence ${integer(example.sequence)}, position ${example.position}`;
      const go = token !== null && (() => this.state.choose(side, { token }));
      const title = go ? `${where}; go to it in the passage` : where;
      return this.exampleLine(example, known.largest, title, go);
    });
    const plain = examples.length && examples.every(({ shades }) => shades.includes(null));
    return [...lines, plain ? quiet(ONLY_PLACES) : null];
  }

  // Where in the passage the neuron fires, strongest first; a click goes there.
  placesHere(side, layer, neuron) {
    const { tokens, values } = side.column(layer, neuron);
    if (!tokens.length) return quiet("It fires nowhere in this passage.");
    const order = Array.from(tokens, (_, n) => n);
    order.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]) || a - b);
    const largest = Math.abs(values[order[0]]);
    const shades = new Map(order.map((n) => [tokens[n], values[n]]));
    const rows = order.slice(0, this.far ? FAR : NEAR).map((n) => {
      const { [n]: token } = tokens;
      const go = () => this.state.choose(side, { token });
      const example = { value: values[n], quantile: null, ...around(side, token, shades) };
      return this.exampleLine(example, largest, `go to token ${integer(token)}`, go);
    });
    const most = Math.min(order.length, FAR);
    const openAll = () => {
      this.far = true;
      this.cards.show();
    };
    const name = `show ${most === order.length ? "all " : ""}${most}`;
    return [...rows, most > rows.length && button(".tw-link.tw-more", openAll, name)];
  }

  // An example with every token shaded by its h; tokens without a shade are one text node.
  exampleLine({ value, quantile, tokens, shades, here }, largest, title, go) {
    const scale = makeScale("signed", [0, largest], "", this.state.ramps);
    const shaded = (text, n) => {
      const { [n]: h } = shades;
      if (!h && n !== here) return pieces(text);
      const { fill, ink } = scale.ramp;
      const index = scale.index(h || 0);
      const style = { backgroundColor: fill[index], color: ink[index] };
      const tag = n === here ? "mark" : "span";
      return element(tag, { style, title: `h ${signed(h)}` }, pieces(text));
    };
    const dir = direction(tokens.join(""));
    const line = element("span.tw-example", { dir }, tokens.map(shaded));
    line.normalize();
    const parts = [
      element(value < 0 ? "b.tw-minus" : "b.tw-plus", signed(value)),
      quantile !== null && element("small", percent(quantile)),
      line,
    ];
    if (go) return button(".tw-place", go, { title }, parts);
    return element("div.tw-place", { title }, parts);
  }
}

// The tokens of the passage around one, with the values of a neuron.
function around(side, token, values) {
  const sequence = side.sequenceOf(token);
  const first = Math.max(side.starts[sequence], token - BEFORE);
  const last = Math.min(side.starts[sequence + 1] - 1, token + AFTER);
  const numbers = Array.from({ length: last - first + 1 }, (_, n) => first + n);
  return {
    tokens: numbers.map((n) => side.text(n)),
    shades: numbers.map((n) => values.get(n) ?? 0),
    here: token - first,
  };
}

function picker(label, value, most, choose) {
  return element("input.tw-number", {
    ...{ type: "number", min: "0", max: String(most), value: String(value), "aria-label": label },
    onchange: ({ target }) => {
      const number = Math.round(Number(target.value));
      if (target.value !== "" && number >= 0 && number <= most) choose(number);
      else target.value = String(value);
    },
  });
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
function promoted({ promotes, suppresses, overview, histogram, edges, fires }) {
  const { gated } = overview.about;
  const share = (sign) => {
    if (!histogram || !fires) return "";
    const inside = histogram.filter((_, bin) => (edges[bin] < 0 ? -1 : 1) === sign);
    return ` (${percent(inside.reduce((sum, count) => sum + count, 0) / fires)})`;
  };
  const list = (title, words, h, sign) => {
    const about = `logit at h = ${h}, against the mean over all words`;
    const word = ([text, change]) => wordWith("", text, "", signed(sign * change), about);
    return element("div", element("h5", title), element("div.tw-words", words.map(word)));
  };
  const lists = gated
    ? [
        list(`when positive${share(1)} it promotes`, promotes, "1", 1),
        list(`when negative${share(-1)} it promotes`, suppresses, "\u22121", -1),
      ]
    : [list("promotes", promotes, "1", 1), list("suppresses", suppresses, "1", 1)];
  const swapped = "With the other sign of h it suppresses these words. Numbers: logits at |h| = 1.";
  return element("div", element("div.tw-both-words", lists), gated && quiet(swapped));
}

// Neurons of the same layer, then of all; a click selects one.
function neighbours({ like = [], together = [] }, layer, choose) {
  const chip = ([of, neuron, size], named) =>
    button(
      size < 0 ? ".tw-chip.tw-minus" : ".tw-chip",
      () => choose(of, neuron),
      { title: `layer ${of}, neuron ${neuron}` },
      element("span", named ? `${of} \u00b7 ${neuron}` : String(neuron)),
      element("b", signed(size, 2)),
    );
  const here = together.map(([neuron, phi]) => [layer, neuron, phi]);
  const lists = [...(here.length ? [["together", here]] : []), ...like];
  const part = (heading, kinds, named) => {
    const rows = lists.filter(([name]) => kinds[name]).map(([name, neurons]) => {
      const [label, title] = kinds[name];
      const chips = neurons.map((one) => chip(one, named));
      const about = element("span", { title }, label);
      return element("div.tw-kin", { data: { kin: name } }, about, chips);
    });
    return rows.length > 0 && element("div.tw-kins", element("h5", heading), rows);
  };
  return [
    part(`In layer ${layer}`, IN_LAYER, false),
    part("In all layers: layer \u00b7 neuron", IN_ALL, true),
  ];
}
