// The card of the selected neuron: its firings in the passage, and its statistics beyond it.

import { changeControls } from "./changes.js";
import { alikeness } from "./compare.js";
import { strongestOf } from "./data.js";
import { button, element } from "./elements.js";
import { drawHistogram, histogramOf } from "./histogram.js";
import { closer, fact, pill } from "./parts.js";
import { direction, integer, number, percent, pieces, signed } from "./words.js";

const NEAR = 8; // places where a neuron fires
const FAR = 200; // when all are asked for
const NOT_KEPT =
  "Statistics beyond this passage are kept in this page for the neurons that carry most of it; " +
  "this is none of them.";

export class NeuronCard {
  constructor(cards) {
    this.cards = cards;
    this.state = cards.state;
    this.known = new Map(); // answers by "side:layer:neuron"
    this.places = "passage"; // the tab that is open
    this.far = false; // all places in the passage are listed
  }

  answered({ key, card }) {
    if (key !== undefined) this.known.set(key, card);
  }

  // What is known beyond the passage; undefined until the answer comes, null if there is nothing.
  ask(side, layer, neuron) {
    if (side.about.aggregate === null && !side.about.words) return null;
    const key = `${side.number}:${layer}:${neuron}`;
    if (!this.known.has(key)) {
      this.known.set(key, undefined);
      this.state.model.send({ ask: key });
    }
    return this.known.get(key);
  }

  build(side, layer, neuron) {
    const card = this.ask(side, layer, neuron);
    const known = card && !card.error && !card.missing ? card : null;
    const body = element(
      "div.tw-neuron-body",
      this.statistics(side, layer, neuron, card, known),
      element("div.tw-places", this.tabs(known), this.listPlaces(side, layer, neuron, known)),
    );
    const label = { "aria-label": "neuron" };
    const head = this.head(side, layer, neuron);
    const controls = changeControls(this.state, layer, neuron);
    const alike = alikeness(this.state, layer, neuron);
    const of = this.state.sides.length === 2 && element("div.tw-of", side.about.name);
    return element("section.tw-card.tw-neuron", label, of, head, alike, controls, body);
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

  statistics(side, layer, neuron, card, known) {
    const { tokens, values } = side.column(layer, neuron);
    const fires = side.firings(layer, neuron);
    const here = `${percent(fires / side.T)}, ${integer(fires)} of ${integer(side.T)}`;
    const facts = [fact("fires here", here)];
    if (tokens.length) facts.push(fact("strongest here", signed(strongestOf(values))));
    const notes = [];
    const note = (text) => notes.push(element("p.tw-quiet", text));
    if (fires > tokens.length)
      note(`Shown are the ${integer(tokens.length)} of its firings that are kept.`);
    if (known?.tokens !== undefined) {
      const among = `of ${integer(known.tokens)} tokens`;
      const share = known.fires ? percent(known.fires / known.tokens) : "never: it is dead";
      facts.push(fact(among, share));
      if (known.fires) {
        facts.push(fact("mean", signed(known.mean)), fact("largest |h|", number(known.largest)));
        notes.push(drawHistogram(known));
      }
    } else if (tokens.length) notes.push(drawHistogram(histogramOf(values)));
    if (known?.promotes) notes.push(promoted(known));
    if (card === undefined) note("asking the kernel \u2026");
    else if (card?.error) note(card.error);
    else if (card?.missing) note(NOT_KEPT);
    return element("div", element("div.tw-factbox", facts), notes);
  }

  tabs(known) {
    const kinds = [["passage", "here"]];
    if (known?.top?.length) kinds.push(["top", "strongest of all"], ["quantiles", "typical"]);
    if (!kinds.some(([kind]) => kind === this.places)) this.places = "passage";
    const tab = ([kind, name]) => {
      const open = () => {
        this.places = kind;
        this.cards.show();
      };
      const selected = { "aria-selected": String(kind === this.places) };
      return button("", open, { role: "tab", ...selected, data: { focus: `tab-${kind}` } }, name);
    };
    return element("div.tw-tabs", { role: "tablist" }, kinds.map(tab));
  }

  listPlaces(side, layer, neuron, known) {
    if (this.places === "passage") return this.placesHere(side, layer, neuron);
    return known[this.places].map(([value, quantile, ...rest]) => {
      const [before, text, after, sequence, position] = rest;
      const about = { title: `sequence ${sequence}, position ${position}` };
      return element("div.tw-place", about, placeParts(value, quantile, before, text, after));
    });
  }

  // Where in the passage the neuron fires, strongest first; a click goes there.
  placesHere(side, layer, neuron) {
    const { tokens, values } = side.column(layer, neuron);
    if (!tokens.length) return element("p.tw-quiet", "It fires nowhere in this passage.");
    const order = Array.from(tokens, (_, n) => n);
    order.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]) || a - b);
    const rows = order
      .slice(0, this.far ? FAR : NEAR)
      .map((n) => this.placeHere(side, tokens[n], values[n]));
    const most = Math.min(order.length, FAR);
    if (most > rows.length) {
      const name = `show ${most === order.length ? "all " : ""}${most}`;
      const openAll = () => {
        this.far = true;
        this.cards.show();
      };
      rows.push(button(".tw-link.tw-more", openAll, name));
    }
    return rows;
  }

  placeHere(side, token, value) {
    const sequence = side.sequenceOf(token);
    const words = (from, to) => {
      const length = Math.max(0, to - from);
      return Array.from({ length }, (_, at) => side.text(from + at)).join("");
    };
    const before = words(Math.max(side.starts[sequence], token - 12), token);
    const after = words(token + 1, Math.min(side.starts[sequence + 1], token + 8));
    return button(
      ".tw-place",
      () => this.state.choose(side, { token }),
      { title: `go to token ${integer(token)}` },
      placeParts(value, null, before, side.text(token), after),
    );
  }
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

function promoted({ promotes, suppresses }) {
  const word = ([text, change]) =>
    element("span.tw-word", { title: `${signed(change)} a unit of h` }, pill(text));
  const list = (title, words) =>
    element("div", element("h5", title), element("div.tw-words", words.map(word)));
  const lists = [list("promotes (h > 0)", promotes), list("suppresses", suppresses)];
  return element("div.tw-both-words", lists);
}

function placeParts(value, quantile, before, text, after) {
  const context = (words) => (words ? pieces(words) : []);
  return [
    element(value < 0 ? "b.tw-minus" : "b.tw-plus", signed(value)),
    quantile !== null && element("small", percent(quantile)),
    element("span.tw-before", { dir: direction(before) }, element("span", context(before))),
    element("mark", { dir: "auto" }, pieces(text)),
    element("span.tw-after", { dir: direction(after) }, context(after)),
  ];
}
