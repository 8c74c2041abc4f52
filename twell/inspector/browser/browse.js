// Finding neurons: a search, a scatter, and the list of what was found.

import { scatter } from "./charts.js";
import { range } from "./data.js";
import { button, element, labelled, pill, renew, select, table } from "./elements.js";
import { QUERY, search, SORTS, STATES, WHERE } from "./search.js";
import { integer, number, percent, plural } from "./words.js";

const ROWS = 50; // of the list, and so many more when asked for
const MORE = `show ${ROWS} more`;

export class Browse {
  constructor(view) {
    Object.assign(this, { view, state: view.state });
    this.bar = element("div");
    this.count = element("span.tw-quiet", { role: "status" });
    this.plot = element("div");
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
      element("div.tw-results", this.plot, this.list),
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
    const { state, view } = this;
    const { side, layer, neuron } = state.selected();
    const catalog = side?.catalog;
    this.node.hidden = !catalog;
    if (!catalog || !this.node.open) return;
    const query = Object.keys(QUERY).map((part) => state.query[part]);
    const asked = JSON.stringify([...query, side.number, view.built]);
    if (this.asked !== asked || this.answer.waiting)
      Object.assign(this, { asked, rows: ROWS, answer: search(catalog, state.query) });
    renew(this.bar, [["bar", `${query} ${side.L}`, () => this.controls(side)]]);
    const { found, waiting, error } = this.answer;
    const overview = catalog.chunk("overview");
    const size = overview?.N ? overview.N * overview.L : 0;
    const number = `${integer(found.length)} of ${plural(size, "neuron")}`;
    this.count.textContent = error ?? (waiting ? "loading \u2026" : number);
    const selected = layer === null || neuron === null ? null : layer * side.N + neuron;
    const shown = `${asked} ${this.rows} ${found.length} ${selected}`;
    const choose = (index) => this.choose(index);
    const drawn = overview?.fires; // without an aggregate there are no points
    const chart = () => scatter(overview, found, selected, choose);
    renew(this.plot, drawn ? [["chart", `${asked} ${selected}`, chart]] : []);
    const add = () => {
      this.rows += ROWS;
      view.schedule();
    };
    const more = found.length > this.rows;
    renew(this.list, [
      ...(found.length ? [["table", shown, () => this.table(overview, selected)]] : []),
      ...(more ? [["more", "", () => button(".tw-link.tw-more", add, MORE)]] : []),
    ]);
    const card = this.opened && view.root.querySelector(".tw-neuron");
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

  table(overview, selected) {
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
    const row = (index) => {
      const about = { "aria-current": index === selected && "true" };
      return button(".tw-item.tw-hit", () => this.choose(index), about, cells(index));
    };
    const names = ["neuron", ...(known ? ["fires", "mean |h|", "fires most at"] : [])];
    if (match) names.push("match");
    const columns = known ? "66px 48px 54px minmax(0, 1fr) 64px" : "66px 64px";
    return table(columns, names, found.slice(0, this.rows).map(row));
  }
}
