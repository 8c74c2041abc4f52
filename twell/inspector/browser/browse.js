// Finding neurons: a search, a scatter to brush, and the list of what was found.

import { button, element } from "./elements.js";
import { pill } from "./parts.js";
import { Scatter } from "./scatter.js";
import { QUERY, search, SORTS, STATES, UPRIGHT, WHERE } from "./search.js";
import { integer, number, percent, plural } from "./words.js";

const ROWS = 50; // of the list, and so many more when asked for

export class Browse {
  // host: { state, root, schedule }, of the inspector or of an atlas; state.query: a QUERY.
  constructor(host) {
    Object.assign(this, { host, state: host.state, stamp: 0 });
    this.begin();
    this.updates = [];
    this.scatter = new Scatter(
      host,
      (box) => this.ask({ box }),
      (index) => this.choose(index),
    );
    this.count = element("span.tw-quiet", { role: "status" });
    this.list = element("div.tw-found");
    const toggled = () => {
      if (this.node.open !== this.state.query.finding) this.ask({ finding: this.node.open });
    };
    this.node = element(
      "details.tw-browse",
      { open: this.state.query.finding, ontoggle: toggled },
      element("summary", "Find neurons"),
      this.controls(),
      this.count,
      element("div.tw-results", this.scatter.node, this.list),
    );
  }

  get side() {
    return this.state.selected().side;
  }

  controls() {
    const text = element("input.tw-query", {
      ...{ type: "search", placeholder: "a word, or some", "aria-label": "words to find" },
      oninput: () => this.ask({ words: text.value }),
    });
    this.updates.push(() => {
      if (text.value !== this.state.query.words) text.value = this.state.query.words;
    });
    const entries = (names) => () => Object.entries(names);
    const upright = this.select("upright", entries(UPRIGHT), "upright axis");
    return element(
      "div.tw-bar.tw-finding",
      { role: "search" },
      this.select("where", entries(WHERE)),
      text,
      this.select("within", () => [[null, "all layers"], ...this.layers()], "layer"),
      this.select("state", entries(STATES)),
      element("label.tw-group", element("span", "sorted by"), this.select("sort", entries(SORTS))),
      element("label.tw-group", element("span", "upright"), upright),
    );
  }

  layers() {
    const { L } = this.side ?? { L: 0 };
    return Array.from({ length: L }, (_, layer) => [layer, `layer ${layer}`]);
  }

  // A select of one part of the query; options() gives pairs of value and name. What was brushed
  // belongs to its axes.
  select(part, options, name = part) {
    const select = element("select", { "aria-label": name });
    const chosen = () => options()[select.selectedIndex][0];
    const clear = part === "upright" ? { box: null } : {};
    select.addEventListener("change", () => this.ask({ [part]: chosen(), ...clear }));
    this.updates.push(() => {
      const pairs = options();
      if (select.options.length !== pairs.length)
        select.replaceChildren(...pairs.map(([, name]) => element("option", name)));
      const at = pairs.findIndex(([value]) => value === this.state.query[part]);
      select.selectedIndex = Math.max(0, at); // there may be no such layer
    });
    return select;
  }

  ask(changes) {
    Object.assign(this.state.query, changes);
    this.state.keep();
    this.begin();
    cancelAnimationFrame(this.drawing); // nothing else of the view changes
    this.drawing = requestAnimationFrame(() => this.show());
  }

  begin() {
    this.rows = ROWS;
    this.answer = null;
  }

  // The address has another query.
  renew() {
    this.node.open = this.state.query.finding;
    this.begin();
    this.host.schedule();
  }

  choose(index) {
    const { N } = this.side.catalog.chunk("overview");
    this.state.chooseNeuron(this.side, Math.floor(index / N), index % N);
    this.opened = true;
  }

  show() {
    const catalog = this.side?.catalog;
    this.node.hidden = !catalog;
    if (!catalog || !this.node.open) return;
    for (const update of this.updates) update();
    if (!this.answer || this.answer.waiting || this.asked !== catalog) this.find(catalog);
    const overview = catalog.chunk("overview");
    if (overview && !overview.error) {
      const { layer, neuron } = this.state.selected();
      const selected = layer === null || neuron === null ? null : layer * overview.N + neuron;
      this.scatter.draw(overview, this.answer.found, selected, this.state.query);
      this.list.querySelector("[aria-current]")?.removeAttribute("aria-current");
      this.list.querySelector(`[data-index="${selected}"]`)?.setAttribute("aria-current", "true");
    }
    const card = this.opened && this.host.root.querySelector(".tw-neuron");
    if (card) card.scrollIntoView({ block: "nearest" });
    this.opened = false;
  }

  find(catalog) {
    this.asked = catalog;
    this.answer = search(catalog, this.state.query);
    const { found, waiting, error, score } = this.answer;
    found.stamp = ++this.stamp;
    const overview = catalog.chunk("overview");
    const all = overview?.N ? overview.N * overview.L : 0;
    const brushed = this.state.query.box && button(".tw-link", () => this.scatter.clear(), "clear brush");
    const number = `${integer(found.length)} of ${plural(all, "neuron")}`;
    const said = error ?? (waiting ? "loading \u2026" : number);
    this.count.replaceChildren(said, ...(brushed ? [" \u00b7 ", brushed] : []));
    this.fill(catalog, overview, found, score);
    if (!waiting && overview?.fires) this.prepare(catalog);
  }

  // The text is read before it is asked for.
  prepare(catalog) {
    if (!catalog.chunk("text")) return;
    setTimeout(() => search(catalog, { ...QUERY, words: "\0" }));
    this.prepare = () => {};
  }

  fill(catalog, overview, found, score) {
    const known = overview?.fires;
    const names = ["neuron", known && "fires", known && "mean |h|", known && "fires most at"];
    const match = score && (this.state.query.where === "note" ? null : WHERE[this.state.query.where]);
    names.push(match && "match");
    const shown = found.slice(0, this.rows);
    const cells = (index) => [
      element("b", `${Math.floor(index / overview.N)} \u00b7 ${index % overview.N}`),
      known && element("span", percent(known[index] / overview.about.tokens)),
      known && element("span", number(overview.strength[index])),
      known && element("span.tw-peaks", overview.peaksOf(index).map((text) => pill(text))),
      match && element("span", this.matched(score[index], overview)),
    ];
    const row = (index) =>
      button(".tw-hit", () => this.choose(index), { data: { index } }, cells(index));
    const more = found.length > shown.length && this.more(catalog);
    const titles = names.filter(Boolean).map((one) => element("span", one));
    const head = shown.length > 0 && element("div.tw-hit.tw-hit-head", titles);
    this.list.className = `tw-found${known ? " tw-known" : ""}${match ? " tw-matched" : ""}`;
    this.list.replaceChildren(...[head, ...shown.map(row), more].filter(Boolean));
  }

  matched(score, overview) {
    const { where } = this.state.query;
    if (where === "fires" || where === "around") return `${score} of ${overview.places}`;
    return number(score);
  }

  more(catalog) {
    const add = () => {
      this.rows += ROWS;
      this.find(catalog);
    };
    return button(".tw-link.tw-more", add, `show ${ROWS} more`);
  }
}
