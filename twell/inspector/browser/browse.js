// Finding neurons: a search, a scatter to brush, and the list of what was found.

import { range } from "./data.js";
import { button, element, labelled, pill, refill, select, table } from "./elements.js";
import { Scatter } from "./scatter.js";
import { search, SORTS, STATES, WHERE } from "./search.js";
import { integer, number, percent, plural } from "./words.js";

const ROWS = 50; // of the list, and so many more when asked for

export class Browse {
  // view: { state, root, schedule }.
  constructor(view) {
    Object.assign(this, { view, state: view.state });
    this.begin();
    this.scatter = new Scatter(
      view,
      (box) => this.ask({ box }),
      (index) => this.choose(index),
    );
    // It is never replaced: whoever types keeps the cursor.
    this.text = element("input.tw-query", {
      ...{ type: "search", placeholder: "a word, or some", "aria-label": "words to find" },
      oninput: () => this.ask({ words: this.text.value }),
    });
    this.left = element("span.tw-group");
    this.right = element("span.tw-group");
    this.count = element("span.tw-quiet", { role: "status" });
    this.list = element("div.tw-found.tw-scrolled");
    const toggled = () => {
      if (this.node.open !== this.state.query.finding) this.ask({ finding: this.node.open });
    };
    this.node = element(
      "details.tw-browse",
      { open: this.state.query.finding, ontoggle: toggled },
      element("summary", "Find neurons"),
      element("div.tw-bar.tw-finding", { role: "search" }, this.left, this.text, this.right),
      this.count,
      element("div.tw-results", this.scatter.node, this.list),
    );
  }

  showControls({ L }) {
    const { query } = this.state;
    const among = (part, names, label = part) =>
      select(label, Object.entries(names), query[part], (value) => this.ask({ [part]: value }));
    const layers = range(0, L - 1).map((layer) => [layer, `layer ${layer}`]);
    const inside = (within) => this.ask({ within });
    refill(this.left, among("where", WHERE));
    refill(
      this.right,
      select("layer", [[null, "all layers"], ...layers], query.within, inside),
      among("state", STATES),
      labelled("sorted by", among("sort", SORTS)),
    );
    if (this.text.value !== query.words) this.text.value = query.words;
  }

  // Search for something else; nothing but the layers of an atlas changes beside it.
  ask(changes) {
    this.state.ask(changes);
    this.begin();
    cancelAnimationFrame(this.drawing);
    this.drawing = requestAnimationFrame(() => {
      const { side, neuron } = this.state.selected();
      if (!side.T && neuron === null) this.view.cards.show();
      this.show();
    });
  }

  begin() {
    this.rows = ROWS;
    this.answer = null;
  }

  // The address has another query.
  renew() {
    this.node.open = this.state.query.finding;
    this.begin();
    this.view.schedule();
  }

  choose(index) {
    const { side } = this.state.selected();
    this.state.chooseNeuron(side, Math.floor(index / side.N), index % side.N);
    this.opened = true;
  }

  show() {
    const { side, layer, neuron } = this.state.selected();
    const catalog = side?.catalog;
    this.node.hidden = !catalog;
    if (!catalog || !this.node.open) return;
    this.showControls(side);
    const { query } = this.state;
    if (!this.answer || this.answer.waiting || this.asked !== catalog) {
      this.asked = catalog;
      this.answer = search(catalog, query);
      this.showList(catalog);
    }
    const overview = catalog.chunk("overview");
    if (overview && !overview.error) {
      const selected = layer === null || neuron === null ? null : layer * overview.N + neuron;
      this.scatter.draw(overview, this.answer.found, selected, query.box);
      this.list.querySelector("[aria-current]")?.removeAttribute("aria-current");
      this.list.querySelector(`[data-index="${selected}"]`)?.setAttribute("aria-current", "true");
    }
    const card = this.opened && this.view.root.querySelector(".tw-neuron");
    if (card) card.scrollIntoView({ block: "nearest" });
    this.opened = false;
  }

  showList(catalog) {
    const { found, waiting, error } = this.answer;
    const overview = catalog.chunk("overview");
    const all = overview?.N ? overview.N * overview.L : 0;
    const number = `${integer(found.length)} of ${plural(all, "neuron")}`;
    const clear = () => this.ask({ box: null });
    const brushed = this.state.query.box && button(".tw-link", clear, "clear brush");
    const status = error ?? (waiting ? "loading \u2026" : number);
    refill(this.count, status, brushed && [" \u00b7 ", brushed]);
    this.fill(catalog, overview);
  }

  fill(catalog, overview) {
    const { found, score } = this.answer;
    const { where } = this.state.query;
    const known = overview?.fires;
    const match = score && where !== "note";
    const matched = (size) =>
      ["fires", "around"].includes(where) ? `${size} of ${overview.places}` : number(size);
    const cells = (index) => [
      element("b", `${Math.floor(index / overview.N)} \u00b7 ${index % overview.N}`),
      known && element("span", percent(known[index] / overview.about.tokens)),
      known && element("span", number(overview.strength[index])),
      known && element("span.tw-chips", overview.peaksOf(index).map((text) => pill(text))),
      match && element("span", matched(score[index])),
    ];
    const row = (index) =>
      button(".tw-item.tw-hit", () => this.choose(index), { data: { index } }, cells(index));
    const shown = found.slice(0, this.rows);
    const add = () => {
      this.rows += ROWS;
      this.fill(catalog, overview);
    };
    const names = ["neuron", ...(known ? ["fires", "mean |h|", "fires most at"] : [])];
    if (match) names.push("match");
    const columns = known ? "66px 48px 54px minmax(0, 1fr) auto" : "66px auto";
    refill(
      this.list,
      shown.length > 0 && table(columns, names, shown.map(row)),
      found.length > shown.length && button(".tw-link.tw-more", add, `show ${ROWS} more`),
    );
  }
}
