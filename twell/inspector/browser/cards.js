// The cards: where to begin, the token with its layers, and the neuron (neuron_card.js). An atlas
// begins with the layers of the model.

import { ABOUT_H } from "./colours.js";
import { changedCard } from "./compare.js";
import { button, chip, closer, countBar, element, fact } from "./elements.js";
import { help, pill, quiet, renew, signedBar, signedText, table, wordWith } from "./elements.js";
import { effectsOf } from "./effects.js";
import { NeuronCard } from "./neuron_card.js";
import { integer, number, percent, plural, range, signed } from "./words.js";

const CHIPS = 3; // neurons of a closed layer
const ENTRIES = 500; // neurons of an opened one
const HOW =
  "Hover a token to peek, click to pin it. Then click a neuron to see where it fires. Drag over " +
  "tokens to find neurons that tell them apart. Keys: arrows, Enter (strongest neuron), Esc.";
const ABOUT_NEXT =
  "The ten likeliest next tokens with their probabilities; the framed one is what follows in the " +
  "text.";

export class Cards {
  constructor(view) {
    this.view = view;
    this.state = view.state;
    this.neuron = new NeuronCard(this);
    this.box = element("div.tw-cards");
  }

  // A card is built again when what it shows has changed; a chosen neuron is only marked.
  show() {
    const { state, view } = this;
    const { side, token, layer, neuron } = state.selected();
    const chosen = neuron !== null && layer !== null;
    const parts = side.T ? this.passageCards(side, token, layer) : [];
    const known = [view.chunks, state.query.within].join();
    if (!side.T && !chosen) parts.push(["layers", known, () => layersCard(view, side)]);
    const neurons = chosen ? state.sharing(side) : [];
    parts.unshift(...neurons.map((one) => this.neuron.part(one, layer, neuron)));
    const picked = chosen || token !== null;
    const back = () => button(".tw-copy.tw-back", () => state.letGo(), "\u2190 back");
    if (picked) parts.unshift(["back", "", back]); // on a phone, where cards hide the passage
    view.root.classList.toggle("tw-picked", picked);
    for (const part of parts) part[1] = `${view.built} ${part[1]}`;
    renew(this.box, parts);
    const name = chosen ? state.nameOf(side, layer, neuron) : null;
    if (name !== this.name) queueMicrotask(() => (this.box.scrollTop = 0)); // it lays out
    this.name = name;
    for (const node of this.box.querySelectorAll("[data-neuron]"))
      node.ariaPressed = String(node.dataset.neuron === name);
  }

  // The selected token, or the one under the pointer; of two sides with the same tokens both.
  passageCards(side, token, layer) {
    const { state } = this;
    const peek = token === null && state.peek?.token !== undefined ? state.peek : null;
    const from = peek ?? { side, token };
    const changed = state.header.changed ? [["changed", "", () => changedCard(state)]] : [];
    const start = ["start", side.number, () => this.startCard(side)];
    if (from.token === null) return [...changed, start];
    const shown = state.header.aligned ? state.sides : [from.side];
    const traits = [from.token, peek !== null];
    const card = (one) => {
      const opened = one === side || state.header.aligned ? layer : null;
      const build = () => this.tokenCard(one, from.token, opened, peek !== null);
      return [`token${one.number}`, [opened, ...traits].join(), build];
    };
    return [...shown.map(card), ...changed, start];
  }

  startCard(side) {
    const rows = begin(side).map(([name, note, place]) =>
      button(
        ".tw-item",
        () => this.state.goTo({ side: side.number, ...place }),
        element("b", name),
        element("span", { dir: "auto" }, note),
      ),
    );
    const classes = () => this.view.browse.rankClasses();
    const note = element("span", "each with the class of tokens that it tells apart best");
    rows.push(button(".tw-item", classes, element("b", "Neurons that are a class"), note));
    const title = element("div.tw-card-head", element("h2", "Where to begin"));
    const places = table("repeat(2, minmax(0, 1fr))", [], rows);
    return element("section.tw-card.tw-begin", title, quiet(HOW), places);
  }

  tokenCard(side, token, layer, peeking) {
    const { state } = this;
    const layers = range(0, side.L - 1);
    const most = Math.max(1, ...layers.map((n) => side.count(n, token)));
    return element(
      `section.tw-card.tw-token${peeking ? ".tw-peek" : ""}`,
      { "aria-label": `token, ${side.about.name}` },
      state.header.aligned && element("div.tw-of", side.about.name),
      this.tokenHead(side, token, peeking),
      this.tokenFacts(side, token),
      predictions(side, token),
      element("div", layers.map((n) => this.layerBox(side, n, token, most, n === layer))),
      effectsOf(this, side, token),
    );
  }

  tokenHead(side, token, peeking) {
    const sequence = side.starts.length > 2 && `sequence ${integer(side.sequenceOf(token) + 1)}`;
    const position = `position ${integer(side.position[token])}`;
    const id = `id ${side.about.ids[side.token[token]]}`;
    const where = [`token ${integer(token)}`, sequence, position, id].filter(Boolean);
    return element(
      "div.tw-card-head",
      element("h2", pill(side.text(token), side.isSpecial(token))),
      element("span.tw-quiet", where.join(" \u00b7 ")),
      peeking
        ? element("span.tw-peeking", "peek")
        : closer("let go of the token", () => this.state.put({ token: null })),
    );
  }

  tokenFacts(side, token) {
    const surprise = side.surprise[token];
    const first = Number.isNaN(surprise);
    return element(
      "div.tw-factbox",
      fact("surprise", first ? "\u2013" : `${number(surprise)} nats`),
      fact("probability", first ? "first of its sequence" : percent(Math.exp(-surprise))),
      fact("active, mean", number(side.means[token])),
    );
  }

  // A layer with the count of its active neurons and the strongest of them, or all if it is opened.
  // A click on its name opens or closes it.
  layerBox(side, layer, token, most, opened) {
    const { state } = this;
    const act = () => state.choose(side, { layer: opened ? null : layer, neuron: null });
    const about = { "aria-expanded": String(opened), "aria-label": `layer ${layer}` };
    const count = side.count(layer, token);
    const strongest = () =>
      side.strongest(layer, token, CHIPS).map(({ neuron, value }) => {
        const title = `layer ${layer}, neuron ${neuron}`;
        return chip(neuron, value, 3, { title, ...this.choosing(side, layer, neuron, token) });
      });
    return element(
      `div.tw-layer-box${opened ? ".tw-opened" : ""}`,
      element(
        "div.tw-layer",
        button(".tw-layer-name", act, about, `layer ${layer}`),
        countBar(count / most, integer(count)),
        !opened && element("span.tw-chips", strongest()),
      ),
      opened && this.layerTable(side, layer, token),
    );
  }

  // Attributes of a neuron's button: hovering colours the passage by it, a click selects it.
  choosing(side, layer, neuron, token) {
    return {
      data: { neuron: this.state.nameOf(side, layer, neuron) },
      onpointerenter: () => this.view.peek({ side, layer, neuron }),
      onpointerleave: () => this.view.peek(null),
      onclick: () => {
        this.state.peek = null;
        this.view.keepPlace = true;
        this.state.chooseNeuron(side, layer, neuron, { token });
      },
    };
  }

  layerTable(side, layer, token) {
    const count = side.count(layer, token);
    if (!count) return quiet("No neuron is active here.");
    const shown = side.strongest(layer, token, ENTRIES);
    const most = Math.abs(shown[0].value) || 1;
    const among = { title: `of ${integer(side.about.aggregate ?? 0)} tokens` };
    const names = ["neuron", "", ["h", help(ABOUT_H)], "share"];
    if (side.rate) names.push(element("span", among, "fires"));
    const rows = shown.map((one) => this.entry(side, layer, one, token, most));
    const about = { data: { of: `${layer} ${token}` } };
    const columns = `auto minmax(40px, 1fr) 58px 44px${side.rate ? " 52px" : ""}`;
    return [
      element("div.tw-scrolled", about, table(columns, names, rows)),
      shown.length < count && quiet(`the strongest ${shown.length} of ${count}`),
    ];
  }

  entry(side, layer, { neuron, value, share }, token, most) {
    return element(
      "button.tw-item.tw-entry",
      { type: "button", ...this.choosing(side, layer, neuron, token) },
      element("span", String(neuron)),
      signedBar(value / most),
      signedText(value),
      element("span", percent(share)),
      side.rate && element("span", percent(side.rate[layer * side.N + neuron])),
    );
  }
}

// Where to begin: a name, a note, and the view that shows it. First tokens do not count.
function begin(side) {
  const later = range(0, side.T - 1).filter((token) => side.position[token]);
  if (!later.length) return [];
  const best = (values) => later.reduce((one, other) => (values[other] > values[one] ? other : one));
  const [busiest, surprising] = [best(side.means), best(side.surprise)];
  const active = ` ${number(side.means[busiest])} active a layer`;
  const nats = ` ${number(side.surprise[surprising])} nats`;
  const colour = { colour: "surprise" };
  const found = [
    ["Busiest token", [pill(side.text(busiest)), active], { token: busiest }],
    ["Most surprising token", [pill(side.text(surprising)), nats], { token: surprising, ...colour }],
  ];
  const { layer, token, neuron, value } = side.strongestOf(later);
  if (value) {
    const note = [`layer ${layer}, ${neuron}: ${signed(value)} at `, pill(side.text(token))];
    found.push(["Strongest neuron", note, { token, layer, neuron, colour: "neuron" }]);
  }
  return found;
}

function predictions(side, token) {
  const predicted = side.predictions(token);
  if (!predicted) return null;
  const comes = side.next(token);
  const listed = comes === null || predicted.some(({ text }) => text === comes);
  const word = ({ text, probability }) =>
    wordWith(text, percent(probability), text === comes ? ".tw-comes" : "");
  const actual = () => word({ text: comes, probability: Math.exp(-side.surprise[token + 1]) });
  return element(
    "div.tw-next",
    element("h3", "predicts next", help(ABOUT_NEXT)),
    element("div.tw-words", predicted.map(word), !listed && ["\u2026", actual()]),
  );
}

export function modelFacts({ about, fires }) {
  const { name, tokens, run } = about;
  const dead = fires ? fires.reduce((sum, count) => sum + (count === 0), 0) : 0;
  return [
    fires && `${percent(dead / fires.length)} dead`,
    tokens !== null && `counted over ${plural(tokens, "token")}`,
    run !== name && run,
    !about.weights && "no weights: no promoted words, no similar neurons",
  ];
}

// Of each layer: active neurons and dead ones. A click searches in it.
function layersCard(view, side) {
  const overview = side.catalog?.chunk("overview");
  if (!overview?.fires) return quiet(overview && "There are no statistics without an aggregate.");
  const { L, N, fires, about } = overview;
  const layers = range(0, L - 1).map((layer) => fires.subarray(layer * N, (layer + 1) * N));
  const active = layers.map((own) => own.reduce((sum, count) => sum + count, 0) / about.tokens);
  const { within } = view.state.query;
  const line = (own, layer) =>
    button(
      ".tw-item",
      () => view.browse.ask({ within: within === layer ? null : layer }),
      { "aria-pressed": String(within === layer), title: "search in it" },
      element("b", String(layer)),
      countBar(active[layer] / Math.max(...active), number(active[layer])),
      element("span", percent(own.filter((count) => !count).length / N)),
    );
  const names = ["layer", "active a token", "dead"];
  return element(
    "section.tw-card.tw-overview",
    { "aria-label": "layers" },
    element("div.tw-card-head", element("h2", "Layers")),
    table("auto minmax(60px, 1fr) auto", names, layers.map(line)),
    button(".tw-link", () => view.browse.rankClasses(), "Neurons that are a class of tokens"),
    quiet("A click on a layer searches in it, one on a neuron opens its card."),
  );
}
