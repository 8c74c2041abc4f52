// An atlas: all neurons of a model without a passage. Chunks are scripts beside the page, loaded as
// they are needed; the address names the neuron.

import { addressOf, viewOf } from "./address.js";
import { Browse } from "./browse.js";
import { Catalog } from "./catalog.js";
import { themeOf } from "./colours.js";
import { fromBase64 } from "./data.js";
import { button, element } from "./elements.js";
import { NeuronCard } from "./neuron_card.js";
import { QUERY } from "./search.js";
import { integer, number, percent, plural } from "./words.js";

const BEGIN_ATLAS = { layer: null, neuron: null, ...QUERY, finding: true };
const NOTHING = { tokens: [], values: [] };

// A file of a chunk calls this with its name and its bytes.
const arriving = new Map();
globalThis.twellChunk = (name, text) => arriving.get(name)?.(fromBase64(text));

function loadChunk(name) {
  const inside = document.getElementById(name)?.textContent;
  if (inside !== undefined) return Promise.resolve(fromBase64(inside));
  return new Promise((done, refuse) => {
    arriving.set(name, done);
    const onerror = () => refuse(new Error(`chunks/${name}.js is missing beside this page.`));
    document.head.append(element("script", { src: `chunks/${name}.js`, onerror }));
  });
}

// What is selected and searched for, as the address has it.
class AtlasState {
  constructor(atlas) {
    this.atlas = atlas;
    this.sides = [];
    this.follow();
  }

  follow() {
    this.query = viewOf(location.hash.slice(1), BEGIN_ATLAS);
  }

  keep(write = "replaceState") {
    const address = addressOf(this.query, BEGIN_ATLAS);
    history[write](null, "", address ? `#${address}` : location.pathname + location.search);
  }

  get() {
    return undefined; // no traits: a model runs in a widget alone
  }

  selected() {
    const [side] = this.sides;
    const { layer, neuron } = this.query;
    const known = (value, count) => (value !== null && value < count ? value : null);
    return { side, layer: known(layer, side?.L), neuron: known(neuron, side?.N) };
  }

  go(layer, neuron) {
    Object.assign(this.query, { layer, neuron });
    this.keep("pushState");
    this.atlas.schedule();
  }

  sharing(side) {
    return [side];
  }

  chooseNeuron(_, layer, neuron) {
    this.go(layer, neuron);
  }

  letGo() {
    this.go(null, null);
  }
}

class Atlas {
  constructor(parent, palettes) {
    this.palettes = palettes;
    this.root = element("div.twell.tw-atlas");
    parent.append(this.root);
    this.state = new AtlasState(this);
    this.catalog = new Catalog(loadChunk, () => this.schedule());
    this.card = new NeuronCard(this);
    this.browse = new Browse(this);
    this.frame = { head: element("div.tw-head"), side: element("div.tw-atlas-side") };
    this.root.append(
      this.frame.head,
      element("div.tw-atlas-main", this.browse.node, this.frame.side),
    );
    for (const event of ["hashchange", "popstate"])
      addEventListener(event, () => {
        this.state.follow();
        this.browse.renew();
      });
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", () => this.theme());
    this.theme();
  }

  theme() {
    this.state.ramps = themeOf(this.root, this.palettes);
    this.schedule();
  }

  schedule() {
    cancelAnimationFrame(this.drawing);
    this.drawing = requestAnimationFrame(() => this.show());
  }

  show() {
    const overview = this.catalog.chunk("overview");
    if (!overview) return;
    if (!this.state.sides.length) this.state.sides = [this.side(overview)];
    const { side, layer, neuron } = this.state.selected();
    this.frame.head.replaceChildren(this.facts(overview));
    const { activeElement } = document;
    const focus = this.root.contains(activeElement) && activeElement.dataset.focus;
    const chosen = layer !== null && neuron !== null;
    const below = chosen ? this.card.build(side, layer, neuron) : this.layers(overview);
    this.frame.side.replaceChildren(below);
    if (focus) this.root.querySelector(`[data-focus="${focus}"]`)?.focus({ preventScroll: true });
    this.browse.show();
    performance.mark("twell-painted");
  }

  // A side without a passage.
  side({ about, L, N }) {
    const silent = { column: () => NOTHING, firings: () => 0, find: () => null };
    return { number: 0, T: 0, L, N, about, catalog: this.catalog, ...silent };
  }

  facts({ about, fires, L, N }) {
    const { name, tokens, source } = about;
    const dead = fires ? fires.reduce((sum, count) => sum + (count === 0), 0) : 0;
    const facts = [
      `${plural(L, "layer")} of ${integer(N)} neurons`,
      fires && `${percent(dead / fires.length)} dead`,
      tokens !== null && `counted over ${plural(tokens, "token")}`,
      source?.run && source.run !== name && source.run,
      !about.weights && "no weights: no promoted words, no similar neurons",
    ];
    const quiet = element("span.tw-quiet", facts.filter(Boolean).join(" \u00b7 "));
    return element("div.tw-name", element("b", name), quiet);
  }

  // Of each layer: active neurons, dead ones, and how strongly they fire; a click searches in it.
  layers(overview) {
    const { fires, strength, about, L, N } = overview;
    if (!fires) return element("p.tw-quiet", "There are no statistics without an aggregate.");
    const rows = Array.from({ length: L }, (_, layer) => {
      const own = fires.subarray(layer * N, (layer + 1) * N);
      const every = Array.from(own, (count, n) => [count, layer * N + n]);
      const alive = every.filter(([count]) => count);
      const rates = alive.map(([count]) => count).sort((a, b) => a - b);
      const sizes = alive.map(([, index]) => strength[index]).sort((a, b) => a - b);
      const middle = (sorted) => sorted[Math.floor(sorted.length / 2)] ?? 0;
      return {
        layer,
        active: rates.reduce((sum, count) => sum + count, 0) / about.tokens,
        cells: [
          percent(1 - alive.length / N),
          percent(middle(rates) / about.tokens),
          number(middle(sizes)),
        ],
      };
    });
    const most = Math.max(...rows.map(({ active }) => active));
    const names = ["layer", "active a token", "dead", "median rate", "median |h|"];
    const line = ({ layer, active, cells }) =>
      button(
        ".tw-layer-line",
        () => {
          this.browse.ask({ within: this.state.query.within === layer ? null : layer });
          this.schedule();
        },
        { "aria-pressed": String(this.state.query.within === layer), title: "search in it" },
        element("b", String(layer)),
        element(
          "span.tw-count",
          element("i", { style: { width: `${(100 * active) / most}%` } }),
          element("b", number(active)),
        ),
        cells.map((text) => element("span", text)),
      );
    const head = element("div.tw-layer-line.tw-hit-head", names.map((one) => element("span", one)));
    return element(
      "section.tw-card.tw-overview",
      { "aria-label": "layers" },
      element("div.tw-card-head", element("h4", "Layers")),
      head,
      rows.map(line),
      element("p.tw-quiet", "A click on a layer searches in it, one on a neuron opens its card."),
    );
  }
}

export function openAtlas(parent, palettes) {
  return new Atlas(parent, palettes);
}
