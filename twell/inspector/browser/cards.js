// The cards: where to begin, the token with its layers, and the neuron (neuron_card.js).

import { changedCard } from "./compare.js";
import { button, element, refill } from "./elements.js";
import { layersCard } from "./layers.js";
import { NeuronCard } from "./neuron_card.js";
import { closer, countBar, fact, help, pill, quiet, tokenPill, wordWith } from "./parts.js";
import { ABOUT_H } from "./scales.js";
import { integer, number, percent, signed } from "./words.js";

const CHIPS = 3; // neurons of a closed layer
const ENTRIES = 12; // neurons of an opened one, until all are asked for
const HOW =
  "Hover a token to peek, click to pin it. Then click a neuron to see where it fires.";
const ABOUT_NEXT =
  "The ten likeliest next tokens with their probabilities; the framed one is what follows in the " +
  "text.";

export class Cards {
  constructor(view) {
    this.view = view;
    this.state = view.state;
    this.neuron = new NeuronCard(this);
    this.open = false; // all neurons of the opened layer are listed
    this.box = element("div.tw-cards");
    this.spoken = element("div.tw-said", { "aria-live": "polite" });
  }

  // Lists that were opened belong to what was selected.
  changed(trait) {
    if (["token", "layer", "side"].includes(trait)) this.open = false;
    if (["neuron", "layer", "side"].includes(trait)) this.neuron.far = false;
  }

  show() {
    const { state } = this;
    const { side, token, layer, neuron } = state.selected();
    const chosen = neuron !== null && layer !== null;
    const sharing = chosen ? state.sharing(side) : [];
    const nodes = side.T ? this.passageCards(side, token, layer) : [];
    if (!side.T && !chosen) nodes.push(layersCard(this.view, side));
    nodes.push(sharing.map((one) => this.neuron.build(one, layer, neuron)));
    this.box.classList.toggle("tw-pair", sharing.length === 2);
    refill(this.box, nodes);
    this.say(side, token, layer, neuron);
  }

  // The selected token, or the one under the pointer; of two sides with the same tokens both.
  passageCards(side, token, layer) {
    const { state } = this;
    const peek = token === null && state.peek?.token !== undefined ? state.peek : null;
    const from = peek ?? { side, token };
    const shown = state.header.aligned ? state.sides : [from.side];
    const changed = state.sides.length === 2 && changedCard(state);
    if (from.token === null) return [this.startCard(side), changed];
    const opened = (one) => (one === side || state.header.aligned ? layer : null);
    const card = (one) => this.tokenCard(one, from.token, opened(one), peek !== null);
    return [...shown.map(card), changed];
  }

  // What screen readers read aloud.
  say(side, token, layer, neuron) {
    const parts = [];
    if (token !== null) parts.push(`token ${token}: ${side.text(token).trim() || "white space"}`);
    if (layer !== null) parts.push(`layer ${layer}`);
    if (token !== null && layer !== null) parts.push(`${side.count(layer, token)} active`);
    if (neuron !== null) parts.push(`neuron ${neuron}`);
    const text = parts.join(", ");
    if (this.spoken.textContent !== text) this.spoken.textContent = text;
  }

  startCard(side) {
    const { state } = this;
    const go = (preset) =>
      side.number ? state.put({ side: 1, ...preset.view }) : state.goTo(preset);
    const items = side.about.starts_with.slice(1).map((preset) => {
      const note = element("span", { dir: "auto" }, preset.note);
      return element("li", button(".tw-start", () => go(preset), element("b", preset.name), note));
    });
    const title = element("div.tw-card-head", element("h4", "Where to begin"));
    return element("section.tw-card.tw-begin", title, quiet(HOW), element("ul", items));
  }

  tokenCard(side, token, layer, peeking) {
    const { state } = this;
    const [first, last] = state.range(side);
    const layers = Array.from({ length: last - first + 1 }, (_, n) => first + n);
    const most = Math.max(1, ...layers.map((n) => side.count(n, token)));
    const rows = layers.map((n) =>
      n === layer ? this.openLayer(side, n, token, most) : this.closedLayer(side, n, token, most),
    );
    return element(
      `section.tw-card.tw-token${peeking ? ".tw-peek" : ""}`,
      { "aria-label": "token" },
      state.header.aligned && element("div.tw-of", side.about.name),
      this.tokenHead(side, token, peeking),
      this.tokenFacts(side, token),
      predictions(side, token, state.header.aligned && side.number ? state.sides[0] : null),
      element("div.tw-layers", rows),
    );
  }

  tokenHead(side, token, peeking) {
    const sequence = `sequence ${integer(side.sequenceOf(token) + 1)}, `;
    const position = `position ${integer(side.position[token])}`;
    const where = side.starts.length > 2 ? sequence + position : position;
    const id = side.about.ids[side.token[token]];
    return element(
      "div.tw-card-head",
      element("h4", tokenPill(side, token)),
      element("span.tw-quiet", `token ${integer(token)} \u00b7 ${where} \u00b7 id ${id}`),
      peeking
        ? element("span.tw-peeking", "peek")
        : closer("let go of the token", () => this.state.put({ token: null })),
    );
  }

  tokenFacts(side, token) {
    const surprise = side.surprise[token];
    const first = Number.isNaN(surprise);
    const characters = side.characters(token);
    const mean = side.means(...this.state.range(side))[token];
    return element(
      "div.tw-factbox",
      fact("surprise", first ? "\u2013" : `${number(surprise)} nats`),
      fact("probability", first ? "first of its sequence" : percent(Math.exp(-surprise))),
      fact("active, mean", number(mean)),
      characters && fact("bytes of", pill(characters)),
    );
  }

  // A layer with the count of its active neurons. A click on its name opens or closes it.
  layerRow(side, layer, token, most, opened, ...more) {
    const { state } = this;
    const act = () => state.choose(side, { layer: opened ? null : layer, neuron: null });
    const about = {
      "aria-expanded": String(opened),
      title: opened ? "close the layer" : "open the layer",
      "aria-label": `layer ${layer}`,
    };
    const capacity = state.capacity();
    const count = side.count(layer, token);
    const over =
      side.fullestTile(layer, token) > capacity &&
      element("em", { title: `a tile holds more than ${capacity}` });
    const name = button(".tw-layer-name", act, about, `layer ${layer}`);
    return element("div.tw-layer", name, countBar(count / most, integer(count), over), more);
  }

  // With the strongest of its neurons.
  closedLayer(side, layer, token, most) {
    const chip = ({ neuron, value }) =>
      this.neuronButton(
        value < 0 ? ".tw-chip.tw-minus" : ".tw-chip",
        ...[side, layer, neuron, token],
        { title: `layer ${layer}, neuron ${neuron}` },
        element("span", String(neuron)),
        element("b", signed(value)),
      );
    const chips = element("span.tw-chips", side.strongest(layer, token, CHIPS).map(chip));
    return element("div.tw-layer-box", this.layerRow(side, layer, token, most, false, chips));
  }

  openLayer(side, layer, token, most) {
    const row = this.layerRow(side, layer, token, most, true);
    return element("div.tw-layer-box.tw-opened", row, this.layerTable(side, layer, token));
  }

  // Hovering a neuron colours the passage by it, clicking selects it.
  neuronButton(classes, side, layer, neuron, token, ...parts) {
    const choose = () => {
      this.state.peek = null;
      this.view.keepPlace = true;
      this.state.chooseNeuron(side, layer, neuron, { token });
    };
    const { side: own, layer: of, neuron: chosen } = this.state.selected();
    const attributes = {
      "aria-pressed": String(own === side && of === layer && chosen === neuron),
      onpointerenter: () => this.view.peekNeuron({ side, layer, neuron }),
      onpointerleave: () => this.view.peekNeuron(null),
    };
    return button(classes, choose, attributes, ...parts);
  }

  layerTable(side, layer, token) {
    const count = side.count(layer, token);
    if (!count) return quiet("No neuron is active here.");
    const all = side.strongest(layer, token);
    const shown = this.open ? all : all.slice(0, ENTRIES);
    const most = Math.abs(shown[0].value) || 1;
    const among = { title: `of ${integer(side.about.aggregate ?? 0)} tokens` };
    const head = element(
      "div.tw-entry.tw-names",
      ["neuron", ""].map((name) => element("span", name)),
      element("span", "h", help(ABOUT_H)),
      element("span", { title: "of the sum of |h| in this layer" }, "share"),
      side.rate && element("span", among, "fires"),
    );
    const covered = shown.reduce((sum, one) => sum + one.share, 0);
    const under = [
      `${shown.length} of ${count}, ${percent(Math.min(covered, 1))} of the sum of |h|`,
    ];
    if (all.length > shown.length) {
      const which = all.length === count ? "all" : `the ${all.length} kept`;
      const openAll = () => {
        this.open = true;
        this.show();
      };
      under.push(" \u00b7 ", button(".tw-link", openAll, `show ${which}`));
    }
    return element(
      `div.tw-table${side.rate ? ".tw-rated" : ""}`,
      head,
      shown.map((one) => this.entry(side, layer, one, token, most)),
      quiet(under),
    );
  }

  entry(side, layer, { neuron, value, share }, token, most) {
    const width = `${(50 * Math.abs(value)) / most}%`;
    const style = value < 0 ? { right: "50%", width } : { left: "50%", width };
    const sign = value < 0 ? ".tw-minus" : ".tw-plus";
    return this.neuronButton(
      ".tw-entry",
      ...[side, layer, neuron, token],
      element("span", String(neuron)),
      element("span.tw-both", element(`i${sign}`, { style })),
      element(`b${sign}`, signed(value)),
      element("span", percent(share)),
      side.rate && element("span", percent(side.rate[layer * side.N + neuron])),
    );
  }
}

// The tokens that a model expects after a token, and what follows. other: a side with the same
// tokens, to whose probabilities these are compared.
function predictions(side, token, other) {
  const predicted = side.predictions(token);
  if (!predicted) return null;
  const following = side.following(token);
  const comes = following === null ? null : side.text(following);
  const before = other?.predictions(token) ?? [];
  const outside = (words) => comes !== null && !words.some(({ text }) => text === comes);
  const actual = (one) => ({ text: comes, probability: Math.exp(-one.surprise[following]) });
  const rest = predicted.length; // where what follows is listed if it is not among the likeliest
  if (outside(predicted)) predicted.push(actual(side));
  if (other && outside(before)) before.push(actual(other));
  const word = ({ text, probability }, n) => {
    const known = before.find((one) => one.text === text);
    const change = known && 100 * (probability - known.probability);
    const moved = known ? Math.abs(change) >= 0.1 && signed(change, 2) : other && "new";
    const title = "change in percentage points";
    const classes = `.tw-expected${text === comes ? ".tw-comes" : ""}`;
    return [n === rest && "\u2026", wordWith(classes, text, percent(probability), moved, title)];
  };
  return element(
    "div.tw-next",
    element("h5", "predicts next", help(ABOUT_NEXT)),
    element("div.tw-words", predicted.map(word)),
  );
}
