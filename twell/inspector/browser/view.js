// The whole view: it builds the parts, and draws them again when the state changes. A view without
// a text shows the layers of the model and the search: an atlas.

import { isDark, themeOf } from "./colours.js";
import { bar } from "./bar.js";
import { Browse } from "./browse.js";
import { Cards, modelFacts } from "./cards.js";
import { Catalog } from "./catalog.js";
import { changeStrip } from "./compare.js";
import { meanOf, unpack } from "./data.js";
import { element, renew } from "./elements.js";
import { ActivityMap } from "./map.js";
import { Passage } from "./passage.js";
import { State, TRAITS } from "./state.js";
import { Typing } from "./typing.js";
import { integer, number, percent, plural } from "./words.js";

let views = 0;

export class View {
  constructor(model, parent) {
    this.state = new State(model);
    this.prefix = `tw${++views}-`;
    this.parts = []; // of each side with tokens: { passage, map }
    this.catalogs = new Map(); // by the number of a side
    this.asked = new Map(); // promises of chunks that Python computes
    this.built = 0; // passages so far
    this.chunks = 0; // answers of catalogs so far
    this.cards = new Cards(this);
    this.browse = new Browse(this);
    this.typing = new Typing(this);
    this.head = element("div");
    this.bar = element("div");
    this.sides = element("div.tw-sides");
    const left = element("div.tw-left", this.sides, this.browse.node);
    const right = element("div.tw-right", this.cards.box);
    this.body = [this.bar, ...this.typing.nodes, element("div.tw-body", left, right)];
    // JupyterLab leaves keys alone below this attribute.
    const about = { "data-lm-suppress-shortcuts": "true" };
    this.root = element("div.twell", about, this.head);
    parent.append(this.root);
    this.life = new AbortController();
    this.listen(model);
    this.load();
  }

  listen(model) {
    const { signal } = this.life;
    // What was clicked or typed is drawn before the reader can go on to the next control.
    for (const act of ["click", "change"])
      this.root.addEventListener(act, () => this.drawing && this.update(), { signal });
    const themed = () => this.themed();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themed, { signal });
    const page = new MutationObserver(themed);
    for (const node of [document.documentElement, document.body])
      page.observe(node, { attributes: true });
    signal.addEventListener("abort", () => page.disconnect());
    const on = (name, react) => {
      model.on(name, react);
      signal.addEventListener("abort", () => model.off(name, react));
    };
    for (const trait of TRAITS) on(`change:${trait}`, () => this.schedule());
    for (const trait of ["token", "side"]) on(`change:${trait}`, () => (this.reveal = true));
    for (const trait of ["busy", "error", "texts"]) on(`change:${trait}`, () => this.typing.show());
    on("change:data", () => this.load());
    on("msg:custom", (answer, buffers) => this.answered(answer, buffers));
  }

  close() {
    this.life.abort();
    cancelAnimationFrame(this.drawing);
    clearTimeout(this.typing.timer);
    this.root.remove();
  }

  async load() {
    const bytes = this.state.get("data");
    try {
      const { header, sides } = await unpack(bytes);
      if (this.life.signal.aborted || bytes !== this.state.get("data")) return;
      Object.assign(this.state, { header, sides });
      for (const side of sides) side.catalog = this.catalogOf(side);
    } catch (error) {
      const why = `The passage cannot be shown: ${error.message}.`;
      return this.root.replaceChildren(element("p.tw-empty", why));
    }
    this.build();
  }

  // It outlives the passage. Two texts under one model have one.
  catalogOf({ number }) {
    const of = this.state.header.same ? 0 : number;
    if (!this.catalogs.has(of)) {
      const { model } = this.state;
      const load = (key) => (model.chunk ? model.chunk(key) : this.ask(key));
      const catalog = new Catalog((name) => load(`${of}:${name}`), () => this.arrived());
      if (!model.chunk)
        catalog.write = (layer, neuron, text) => {
          catalog.noted.set(`${layer}:${neuron}`, text);
          model.send({ note: `${of}:${layer}:${neuron}`, text });
        };
      this.catalogs.set(of, catalog);
    }
    return this.catalogs.get(of);
  }

  ask(key) {
    return new Promise((done, refuse) => {
      this.asked.set(key, { done, refuse });
      this.state.model.send({ ask: key });
    });
  }

  answered({ key, error }, buffers) {
    const { done, refuse } = this.asked.get(key) ?? {};
    this.asked.delete(key);
    if (!done) this.cards.neuron.unkept = error;
    else if (error) refuse(new Error(error));
    else done(buffers[0]);
    this.arrived();
  }

  arrived() {
    this.chunks++;
    this.schedule();
  }

  // Cards and boxes stay when another text is shown, so that whoever types goes on.
  build() {
    const { state } = this;
    const { sides, header } = state;
    state.ramps = themeOf(this.root, header.palettes);
    state.peek = null;
    this.built++;
    const layout = sides.length === 2 ? "tw-two" : sides[0].T ? "tw-one" : "tw-nothing";
    this.root.className = `twell ${layout}`;
    if (!this.bar.isConnected) this.root.replaceChildren(this.head, ...this.body);
    this.parts = sides.map((side) =>
      side.T ? { passage: new Passage(this, side), map: new ActivityMap(this, side) } : null,
    );
    const sections = sides.map((side, n) => element("section", this.nodesOf(side, this.parts[n])));
    this.sides.replaceChildren(...sections);
    this.reveal = true;
    this.typing.show();
    this.update();
    performance.mark("twell-painted");
  }

  nodesOf(side, part) {
    const facts = this.state.sides.length === 2 && this.facts(side);
    if (part) return [facts, part.passage.nodes, part.map.nodes];
    const empty = "There is no text yet: type one above.";
    return [facts, this.state.get("runs") && element("p.tw-empty", empty)];
  }

  facts(side) {
    const { name, of, start } = side.about;
    const overview = !side.T && side.catalog?.chunk("overview");
    const shown = `tokens ${integer(start)}\u2013${integer(start + side.T - 1)} of ${integer(of)}`;
    const mean = meanOf(side.means);
    const facts = [
      side.T > 0 && (of > side.T ? shown : plural(side.T, "token")),
      `${plural(side.L, "layer")} of ${integer(side.N)} neurons`,
      side.T > 0 && `${number(mean)} active (${percent(mean / side.N)})`,
      side.loss === side.loss && `loss ${number(side.loss)} nats`,
      ...(overview?.about ? modelFacts(overview) : []),
    ];
    const quiet = element("span.tw-quiet", facts.filter(Boolean).join(" \u00b7 "));
    return element("div.tw-name", element("h1", name), quiet);
  }

  heading() {
    const { sides, header } = this.state;
    return element(
      "div.tw-head",
      sides.length === 1 && this.facts(sides[0]),
      changeStrip(this.state),
      header.reasons.length > 0 && element("div.tw-note", header.reasons.join(" ")),
    );
  }

  themed() {
    const { header, ramps } = this.state;
    if (!header || isDark(this.root.parentElement) === ramps.dark) return;
    this.state.ramps = themeOf(this.root, header.palettes);
    for (const part of this.parts) part?.passage.painted.fill(-1);
    this.update();
  }

  schedule() {
    this.drawing ??= requestAnimationFrame(() => this.update());
  }

  update() {
    cancelAnimationFrame(this.drawing);
    this.drawing = null;
    const { state } = this;
    if (this.life.signal.aborted || !state.header) return;
    // A box that leaves the page while it is drawn takes what was typed in it.
    if (this.updating) return this.schedule();
    this.updating = true;
    const known = state.sides.map((side) => side.catalog?.chunk("overview") !== undefined);
    const { side, layer, neuron } = state.selected();
    const silenced = neuron !== null && side.rise(layer, neuron) && [layer, neuron];
    const shown = [this.built, neuron === null, silenced, state.colours()].join();
    const changed = state.get("colour") === "effect" && silenced;
    const asked = [this.built, known, changed, JSON.stringify(state.query)].join();
    renew(this.head, [["head", asked, () => this.heading()]]);
    renew(this.bar, [["bar", shown, () => bar(state)]]);
    for (const part of this.parts) {
      part?.passage.paint();
      part?.map.draw(part.passage.colours);
    }
    this.cards.show();
    this.browse.show();
    this.updating = false;
    this.reveal = false; // the selected token comes into sight when it has changed,
    this.keepPlace = false; // unless it was selected there
  }

  active() {
    return this.root.getRootNode().activeElement;
  }

  // The pointer is on a token, and in the map in a layer; or it left.
  hover(side, token, layer) {
    const before = this.state.peek;
    const peek = token === undefined ? null : { side, token, layer };
    if (["side", "token", "layer"].every((name) => before?.[name] === peek?.[name])) return;
    this.peek(peek);
  }

  peek(peek) {
    this.state.peek = peek;
    this.schedule();
  }
}
