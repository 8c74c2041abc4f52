// Finding neurons: a search, a scatter, and the list of what was found.

import { range } from "./data.js";
import { button, element, labelled, pill, refill, renew, select, table } from "./elements.js";
import { Scatter } from "./charts.js";
import { QUERY, search, SORTS, STATES, WHERE } from "./search.js";
import { integer, number, percent, plural } from "./words.js";

const ROWS = 50; // of the list, and so many more when asked for

export class Browse {
  constructor(view) {
    Object.assign(this, { view, state: view.state });
    this.scatter = new Scatter(view, (index) => this.choose(index));
    this.bar = element("div");
    this.count = element("span.tw-quiet", { role: "status" });
    this.list = element("div.tw-found.tw-scrolled");
    const toggled = () => {
      if (this.node.open !== this.state.query.finding) this.ask({ finding: this.node.open });
    };
    this.node = element(
      "details.tw-browse",
      { open: this.state.query.finding, ontoggle: toggled },
      element("summary", "Find neurons"),
      this.bar,
      this.count,
      element("div.tw-results", this.scatter.node, this.list),
    );
  }

  ask(changes) {
    this.state.ask(changes);
    this.view.schedule();
  }

  choose(index) {
    const { side } = this.state.selected();
    this.state.chooseNeuron(side, Math.floor(index / side.N), index % side.N);
    this.opened = true;
  }

  show() {
    const { state } = this;
    const { side, layer, neuron } = state.selected();
    const catalog = side?.catalog;
    this.node.hidden = !catalog;
    if (!catalog || !this.node.open) return;
    const asked = JSON.stringify(Object.keys(QUERY).map((part) => state.query[part]));
    if (this.catalog !== catalog || this.asked !== asked || this.answer.waiting) {
      Object.assign(this, { catalog, asked, rows: ROWS, answer: search(catalog, state.query) });
      renew(this.bar, [["bar", `${asked} ${side.L}`, () => this.controls(side)]]);
      this.showList();
    }
    const overview = catalog.chunk("overview");
    if (overview && !overview.error) {
      const selected = layer === null || neuron === null ? null : layer * overview.N + neuron;
      this.scatter.draw(overview, this.answer.found, selected);
      this.list.querySelector("[aria-current]")?.removeAttribute("aria-current");
      this.list.querySelector(`[data-index="${selected}"]`)?.setAttribute("aria-current", "true");
    }
    const card = this.opened && this.view.root.querySelector(".tw-neuron");
    if (card) card.scrollIntoView({ block: "nearest" });
    this.opened = false;
  }

  controls({ L }) {
    const { query } = this.state;
    const among = (part, names, label = part) =>
      select(label, Object.entries(names), query[part], (value) => this.ask({ [part]: value }));
    const layers = range(0, L - 1).map((layer) => [layer, `layer ${layer}`]);
    const inside = (within) => this.ask({ within });
    const typed = { type: "search", placeholder: "a word, or some", "aria-label": "words to find" };
    const oninput = ({ target }) => this.ask({ words: target.value });
    return element(
      "div.tw-bar.tw-finding",
      { role: "search" },
      among("where", WHERE),
      element("input.tw-query", { ...typed, value: query.words, oninput }),
      select("layer", [[null, "all layers"], ...layers], query.within, inside),
      among("state", STATES),
      labelled("sorted by", among("sort", SORTS)),
    );
  }

  showList() {
    const { found, waiting, error } = this.answer;
    const overview = this.catalog.chunk("overview");
    const all = overview?.N ? overview.N * overview.L : 0;
    const number = `${integer(found.length)} of ${plural(all, "neuron")}`;
    this.count.textContent = error ?? (waiting ? "loading \u2026" : number);
    const add = () => {
      this.rows += ROWS;
      this.showList();
    };
    const more = found.length > this.rows;
    refill(
      this.list,
      found.length > 0 && this.table(overview),
      more && button(".tw-link.tw-more", add, `show ${ROWS} more`),
    );
  }

  table(overview) {
    const { found, score } = this.answer;
    const { where } = this.state.query;
    const known = overview.fires;
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
    const names = ["neuron", ...(known ? ["fires", "mean |h|", "fires most at"] : [])];
    if (match) names.push("match");
    const columns = known ? "66px 48px 54px minmax(0, 1fr) 64px" : "66px 64px";
    return table(columns, names, found.slice(0, this.rows).map(row));
  }
}
