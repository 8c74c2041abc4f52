// The card of the selected neuron: its firings in the passage, and what is known of it beyond.

import { changeControls } from "./changes.js";
import { makeScale } from "./colours.js";
import { alikeness } from "./compare.js";
import { strongestOf } from "./data.js";
import { button, element } from "./elements.js";
import { drawHistogram, histogramOf, shareBins } from "./histogram.js";
import { neighbours, promoted } from "./neighbours.js";
import { closer, fact } from "./parts.js";
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

export class NeuronCard {
  // host: { state, show }, of the inspector or of an atlas.
  constructor(host) {
    this.host = host;
    this.state = host.state;
    this.places = "passage"; // the tab that is open
    this.far = false; // all places in the passage are listed
  }

  build(side, layer, neuron) {
    const card = side.catalog?.card(layer, neuron);
    const known = card && !card.error ? card : {};
    const choose = (...other) => this.state.chooseNeuron(side, ...other);
    const body = element(
      "div.tw-neuron-body",
      this.statistics(side, layer, neuron, known),
      element("div.tw-places", this.tabs(side, known), this.listPlaces(side, layer, neuron, known)),
    );
    return element(
      "section.tw-card.tw-neuron",
      { "aria-label": "neuron" },
      this.state.sides.length === 2 && element("div.tw-of", side.about.name),
      this.head(side, layer, neuron),
      alikeness(this.state, layer, neuron),
      this.notes(side, layer, neuron, known),
      changeControls(this.state, layer, neuron),
      body,
      element("div.tw-kinds", neighbours(known, layer, choose)),
      this.state_(side, card),
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

  // One's own note: a box where it can be kept, else its text.
  notes(side, layer, neuron, { note, overview }) {
    const { catalog } = side;
    if (!overview?.about.keeps || !catalog.write) return note && element("p.tw-noted", note);
    return element("input.tw-noting", {
      ...{ type: "text", value: note, "aria-label": "note", data: { focus: "note" } },
      placeholder: "A note of your own, kept in notes.txt beside the model",
      onchange: ({ target }) => catalog.write(layer, neuron, target.value),
    });
  }

  statistics(side, layer, neuron, known) {
    const facts = [];
    const notes = [];
    const { tokens, values } = side.column(layer, neuron);
    const fires = side.firings(layer, neuron);
    if (side.T) {
      const here = `${percent(fires / side.T)}, ${integer(fires)} of ${integer(side.T)}`;
      facts.push(fact("fires here", here));
    }
    if (tokens.length) facts.push(fact("strongest here", signed(strongestOf(values))));
    if (fires > tokens.length) {
      const kept = `Shown are the ${integer(tokens.length)} of its firings that are kept.`;
      notes.push(element("p.tw-quiet", kept));
    }
    if (known.fires !== undefined) {
      const among = `of ${integer(known.tokens)} tokens`;
      const share = known.fires ? percent(known.fires / known.tokens) : "never: it is dead";
      facts.push(fact(among, share));
      if (known.fires)
        facts.push(fact("mean", signed(known.mean)), fact("largest |h|", number(known.largest)));
    }
    notes.push(...this.histogram(side, layer, neuron));
    if (known.promotes) notes.push(promoted(known));
    return element("div", element("div.tw-factbox", facts), notes);
  }

  // Of the aggregate where there is one, else of the passage. Two sides show the same, so that they
  // share bins and axes.
  histogram(side, layer, neuron) {
    const sides = this.state.sharing(side);
    const cards = sides.map((one) => one.catalog?.card(layer, neuron));
    const here = (one) => histogramOf(one.column(layer, neuron).values);
    const all = shareBins(cards.every((card) => card?.histogram) ? cards : sides.map(here));
    const own = all[sides.indexOf(side)];
    if (!own.fires) return [];
    const shared = all.length > 1 && element("p.tw-quiet", SHARED_AXES);
    return [drawHistogram(own, all), shared];
  }

  // What is still to come, or could not.
  state_(side, card) {
    const lines = [];
    if (side.catalog && (!card || card.waiting)) lines.push("loading \u2026");
    if (card?.error) lines.push(card.error);
    lines.push(...new Set(card?.missing ?? []), this.unkept ?? "");
    return lines.filter(Boolean).map((line) => element("p.tw-quiet", line));
  }

  tabs(side, known) {
    const far = known.top?.length ? ["top", "quantiles"] : [];
    const kinds = [side.T && "passage", ...far];
    this.shown = kinds.includes(this.places) ? this.places : kinds.find(Boolean);
    const tab = (kind) => {
      const open = () => {
        this.places = kind;
        this.host.show();
      };
      const selected = { "aria-selected": String(kind === this.shown) };
      const about = { role: "tab", ...selected, data: { focus: `tab-${kind}` } };
      return button("", open, about, TABS[kind]);
    };
    return element("div.tw-tabs", { role: "tablist" }, kinds.filter(Boolean).map(tab));
  }

  listPlaces(side, layer, neuron, known) {
    if (this.shown === "passage") return this.placesHere(side, layer, neuron);
    const examples = known[this.shown] ?? [];
    const scale = this.scale(known.largest);
    const lines = examples.map((example) => {
      const token = side.find(example.tokens, example.here);
      const where = `sequence ${integer(example.sequence)}, position ${example.position}`;
      const go = token !== null && (() => this.state.choose(side, { token }));
      return exampleLine(example, scale, go ? `${where}; go to it in the passage` : where, go);
    });
    const plain = examples.length && examples.every(({ shades }) => shades.includes(null));
    return [...lines, plain && element("p.tw-quiet", ONLY_PLACES)];
  }

  scale(largest) {
    return makeScale("signed", largest, "", this.state.ramps);
  }

  // Where in the passage the neuron fires, strongest first; a click goes there.
  placesHere(side, layer, neuron) {
    const { tokens, values } = side.column(layer, neuron);
    if (!tokens.length) return element("p.tw-quiet", "It fires nowhere in this passage.");
    const order = Array.from(tokens, (_, n) => n);
    order.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]) || a - b);
    const scale = this.scale(Math.abs(values[order[0]]));
    const shades = new Map(order.map((n) => [tokens[n], values[n]]));
    const rows = order.slice(0, this.far ? FAR : NEAR).map((n) => {
      const { [n]: token } = tokens;
      const go = () => this.state.choose(side, { token });
      const example = { value: values[n], quantile: null, ...around(side, token, shades) };
      return exampleLine(example, scale, `go to token ${integer(token)}`, go);
    });
    const most = Math.min(order.length, FAR);
    if (most > rows.length) {
      const name = `show ${most === order.length ? "all " : ""}${most}`;
      const openAll = () => {
        this.far = true;
        this.host.show();
      };
      rows.push(button(".tw-link.tw-more", openAll, name));
    }
    return rows;
  }
}

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
  return element("input.tw-pick", {
    type: "number",
    min: "0",
    max: String(most),
    value: String(value),
    "aria-label": label,
    data: { focus: label },
    onchange: ({ target }) => {
      const number = Math.round(Number(target.value));
      if (target.value !== "" && number >= 0 && number <= most) choose(number);
      else target.value = String(value);
    },
  });
}

// An example with every token shaded by its h; where it is 0, the text is one node.
function exampleLine({ value, quantile, tokens, shades, here }, scale, title, go) {
  const shaded = (text, n) => {
    const { [n]: h } = shades;
    if (!h && n !== here) return pieces(text);
    const span = element(n === here ? "mark" : "span", pieces(text));
    if (h) {
      const index = scale.index(h);
      const fill = scale.ramp.fill[index];
      Object.assign(span.style, { backgroundColor: fill, color: scale.ramp.ink[index] });
      span.title = `h ${signed(h)}`;
    }
    return span;
  };
  const line = element("span.tw-example", { dir: direction(tokens.join("")) });
  line.append(...tokens.flatMap(shaded));
  line.normalize();
  const parts = [
    element(value < 0 ? "b.tw-minus" : "b.tw-plus", signed(value)),
    quantile !== null && element("small", percent(quantile)),
    line,
  ];
  if (go) return button(".tw-place", go, { title }, parts);
  return element("div.tw-place", { title }, parts);
}
