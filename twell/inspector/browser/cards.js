// The cards: where to begin, the token, and the neuron (neuron_card.js).

import { changedCard } from "./compare.js";
import { button, element, fill } from "./elements.js";
import { NeuronCard } from "./neuron_card.js";
import { predictionList } from "./predictions.js";
import { closer, fact, help, pill, tokenPill } from "./parts.js";
import { ABOUT_H } from "./scales.js";
import { integer, number, percent, signed } from "./words.js";

const CHIPS = 3; // neurons of a closed layer
const ENTRIES = 12; // neurons of an opened one, until all are asked for

const HOW =
  "Hover a token to peek, click to pin it. Then click a neuron to see where it fires.";

export class Cards {
  constructor(view) {
    this.view = view;
    this.state = view.state;
    this.neuron = new NeuronCard(this);
    this.open = false; // all neurons of the opened layer are listed
    this.kept = new WeakMap(); // the token card of each side, with what it shows
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
    if (!side.T) {
      this.box.replaceChildren();
      return;
    }
    const nodes = [];
    const peek = token === null && state.peek?.token !== undefined ? state.peek : null;
    const from = peek ?? { side, token };
    if (from.token === null) nodes.push(this.startCard(side));
    else {
      for (const one of state.header.aligned ? state.sides : [from.side]) {
        const opened = one === side || state.header.aligned ? layer : null;
        nodes.push(this.tokenCard(one, from.token, opened, peek !== null));
      }
    }
    const changed = state.sides.length === 2 && changedCard(state);
    if (changed) nodes.push(changed);
    const sharing = neuron !== null && layer !== null ? state.sharing(side) : [];
    if (sharing.length) nodes.push(...sharing.map((one) => this.neuron.build(one, layer, neuron)));
    this.box.classList.toggle("tw-pair", sharing.length === 2);
    const active = this.view.active();
    const focus = this.box.contains(active) ? active.dataset.focus : null;
    fill(this.box, nodes);
    if (focus && !this.box.contains(active))
      this.box.querySelector(`[data-focus="${focus}"]`)?.focus({ preventScroll: true });
    this.say(side, token, layer, neuron);
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
    return element(
      "section.tw-card.tw-begin",
      element("h4", "Where to begin"),
      element("p.tw-quiet", HOW),
      element("ul", items),
    );
  }

  tokenCard(side, token, layer, peeking) {
    const { state } = this;
    const [first, last] = state.range(side);
    const layers = Array.from({ length: last - first + 1 }, (_, n) => first + n);
    const shown = [token, peeking, first, last, state.capacity()].join();
    let card = this.kept.get(side);
    if (card?.shown !== shown) {
      const other = state.header.aligned && side.number ? state.sides[0] : null;
      const box = element("div.tw-layers");
      const node = element(
        `section.tw-card.tw-token${peeking ? ".tw-peek" : ""}`,
        { "aria-label": "token" },
        state.header.aligned && element("div.tw-of", side.about.name),
        this.tokenHead(side, token, peeking),
        this.tokenFacts(side, token),
        predictionList(side, token, other),
        box,
      );
      card = { shown, node, box, rows: [] };
      this.kept.set(side, card);
    }
    const most = Math.max(1, ...layers.map((n) => side.count(n, token)));
    card.rows = layers.map((n, at) => {
      const as = n === layer ? `opened ${this.open}` : "closed";
      const { [at]: row } = card.rows;
      return row?.as === as ? row : { as, node: this.layerRow(side, n, token, most, n === layer) };
    });
    fill(card.box, card.rows.map(({ node }) => node));
    this.press(side, card.box);
    return card.node;
  }

  // Only the selected neuron's buttons are pressed.
  press(side, box) {
    const selected = this.state.selected();
    const focus = [side.number, selected.layer, selected.neuron].join("-");
    for (const node of box.querySelectorAll("[aria-pressed]"))
      node.ariaPressed = String(selected.side === side && node.dataset.focus === focus);
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

  // A layer with the count of its active neurons: the strongest of them, or all where it is opened.
  layerRow(side, layer, token, most, opened) {
    const { state } = this;
    const count = side.count(layer, token);
    const capacity = state.capacity();
    const name = button(
      ".tw-layer-name",
      () => state.choose(side, { layer: opened ? null : layer, neuron: null }),
      {
        "aria-expanded": String(opened),
        data: { focus: `${side.number}-layer-${layer}` },
        title: opened ? "close the layer" : "open the layer",
      },
      `layer ${layer}`,
    );
    const bar = element(
      "span.tw-count",
      element("i", { style: { width: `${(100 * count) / most}%` } }),
      element("b", integer(count)),
      side.fullestTile(layer, token) > capacity &&
        element("em", { title: `a tile holds more than ${capacity}` }),
    );
    const strongest = opened ? [] : side.strongest(layer, token, CHIPS);
    const chips = strongest.map((one) => this.chip(side, layer, one, token));
    return element(
      `div.tw-layer-box${opened ? ".tw-opened" : ""}`,
      element("div.tw-layer", name, bar, !opened && element("span.tw-chips", chips)),
      opened && this.layerTable(side, layer, token),
    );
  }

  // Hovering a neuron colours the passage by it, clicking selects it.
  neuronButton(classes, side, layer, neuron, token, ...parts) {
    const choose = () => {
      this.state.peek = null;
      this.view.keepPlace = true;
      this.state.chooseNeuron(side, layer, neuron, { token });
    };
    const attributes = {
      data: { focus: `${side.number}-${layer}-${neuron}` },
      "aria-pressed": "false",
      onpointerenter: () => this.view.peekNeuron({ side, layer, neuron }),
      onpointerleave: () => this.view.peekNeuron(null),
    };
    return button(classes, choose, attributes, ...parts);
  }

  chip(side, layer, { neuron, value }, token) {
    return this.neuronButton(
      value < 0 ? ".tw-chip.tw-minus" : ".tw-chip",
      ...[side, layer, neuron, token],
      { title: `layer ${layer}, neuron ${neuron}` },
      element("span", String(neuron)),
      element("b", signed(value)),
    );
  }

  layerTable(side, layer, token) {
    const count = side.count(layer, token);
    if (!count) return element("p.tw-quiet.tw-none", "No neuron is active here.");
    const all = side.strongest(layer, token);
    const shown = this.open ? all : all.slice(0, ENTRIES);
    const most = Math.abs(shown[0].value) || 1;
    const among = { title: `of ${integer(side.about.aggregate ?? 0)} tokens` };
    const head = element(
      "div.tw-entry.tw-entry-head",
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
      element("div.tw-quiet.tw-under", under),
    );
  }

  entry(side, layer, { neuron, value, share }, token, most) {
    const width = `${(50 * Math.abs(value)) / most}%`;
    const style = value < 0 ? { right: "50%", width } : { left: "50%", width };
    return this.neuronButton(
      ".tw-entry",
      ...[side, layer, neuron, token],
      element("span", String(neuron)),
      element("span.tw-both", element(value < 0 ? "i.tw-minus" : "i", { style })),
      element(value < 0 ? "b.tw-minus" : "b", signed(value)),
      element("span", percent(share)),
      side.rate && element("span", percent(side.rate[layer * side.N + neuron])),
    );
  }
}
