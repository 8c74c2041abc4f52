// Finding neurons: a search, and the list of what was found.

import { BEST, isList, listed, SELECTIONS } from "./classes.js";
import { canChange } from "./compare.js";
import { button, element, help, labelled, pill, renew, select, table } from "./elements.js";
import { OVER, QUERY, search, SORTS, WHERE } from "./search.js";
import { integer, number, percent, plural, range, signed } from "./words.js";

const ROWS = 50; // of the list, and so many more when asked for
const RANKING = { finding: true, where: "selected", over: "passage", sort: "match" };
const ABOUT_RANKS =
  "Phi: the correlation of firing with being a selected token. Precision: the share of its " +
  "firings at selected tokens. Recall: the share of these at which it fires. Fires: its share of " +
  "all tokens. H: its mean at selected tokens and at the others, 0 where it is silent. Over the " +
  "examples: over the tokens around each neuron\u2019s examples, where it fires more often.";
const MORE = `show ${ROWS} more`;

export class Browse {
  constructor(view) {
    Object.assign(this, { view, state: view.state });
    this.bar = element("div");
    this.count = element("span.tw-quiet", { role: "status" });
    this.about = element("span", help(ABOUT_RANKS));
    this.list = element("div.tw-found.tw-scrolled");
    this.chosen = new Set(); // neurons that are silenced together, by index
    const toggle = (event) => {
      event.preventDefault(); // the state opens it
      this.ask({ finding: !this.state.query.finding });
    };
    this.node = element(
      "details.tw-browse",
      element("summary", { onclick: toggle }, element("h2", "Find neurons")),
      this.bar,
      ...[this.count, this.about],
      this.list,
    );
  }

  ask(changes) {
    this.state.put(changes);
  }

  // Rank neurons by how well they tell these tokens of the passage from the others.
  selectTokens({ number }, tokens) {
    this.state.put({ side: number });
    this.ask({ ...RANKING, selected: `#${[...new Set(tokens)].join()}` });
  }

  // The preset "Neurons that are a class".
  rankClasses() {
    this.ask({ ...RANKING, selected: BEST });
  }

  addTokens(side, tokens) {
    this.selectTokens(side, [...listed(this.state.query.selected), ...tokens]);
  }

  show() {
    const { state, view } = this;
    const { side, layer, neuron } = state.selected();
    const catalog = side?.catalog;
    this.node.open = state.query.finding;
    if (!catalog || !this.node.open) return;
    const query = Object.keys(QUERY).map((part) => state.query[part]);
    const skip = state.get("skip_first");
    const asked = JSON.stringify([...query, side.number, skip, view.built]);
    if (this.asked !== asked || this.answer.waiting)
      Object.assign(this, { asked, rows: ROWS, answer: search(catalog, state.query, side, skip) });
    renew(this.bar, [["bar", `${query} ${side.L}`, () => this.controls(side)]]);
    const { found, waiting, error } = this.answer;
    const overview = catalog.chunk("overview");
    const size = overview?.N ? overview.N * overview.L : 0;
    const members = state.membersOf(side)?.reduce((sum, one) => sum + one, 0);
    const tokens = side.T && members >= 0 && state.query.over === "passage";
    const number =
      `${integer(found.length)} of ${plural(size, "neuron")}` +
      (tokens ? ` for ${integer(members)} of ${plural(side.T, "token")}` : "");
    this.count.textContent = error ?? (waiting ? "loading \u2026" : number);
    this.about.hidden = !this.answer.tallyOf;
    const selected = layer === null || neuron === null ? null : layer * side.N + neuron;
    const together = [...this.chosen, canChange(state)];
    const shown = `${asked} ${this.rows} ${found.length} ${selected} ${together}`;
    const add = () => {
      this.rows += ROWS;
      view.schedule();
    };
    renew(this.list, [
      ...(this.chosen.size ? [["chosen", together.join(), () => this.silencing()]] : []),
      ...(found.length ? [["table", shown, () => this.table(overview, selected)]] : []),
      ...(found.length > this.rows ? [["more", "", () => button(".tw-link.tw-more", add, MORE)]] : []),
    ]);
  }

  controls(side) {
    const { query } = this.state;
    const among = (part, names) =>
      select(part, Object.entries(names), query[part], (value) => this.ask({ [part]: value }));
    const layers = range(0, side.L - 1).map((layer) => [layer, `layer ${layer}`]);
    const inside = (within) => this.ask({ within });
    const ranking = query.where === "selected";
    return element(
      "div.tw-bar.tw-finding",
      { role: "search" },
      among("where", WHERE),
      ranking && this.selecting(),
      !ranking && query.where !== "all" && this.box("words", "words to find", query.words, "a word"),
      ranking && side.T > 0 && side.about.aggregate !== null && among("over", OVER),
      select("layer", [[null, "all layers"], ...layers], query.within, inside),
      labelled("sorted by", among("sort", SORTS)),
    );
  }

  box(part, label, value, placeholder) {
    const oninput = ({ target }) => this.ask({ [part]: target.value || QUERY[part] });
    const about = { type: "search", placeholder, "aria-label": label, value, oninput };
    return element("input.tw-query", about);
  }

  // Which tokens: a class, a pattern, or those selected in the passage.
  selecting() {
    const { query } = this.state;
    const { selected } = query;
    const ready = SELECTIONS.includes(selected);
    const pairs = SELECTIONS.map((name) => [name, name]);
    if (!ready) pairs.push([selected, isList(selected) ? "selected one by one" : "a pattern"]);
    const check = (part, label) => {
      const onchange = ({ target }) => this.ask({ [part]: target.checked });
      const about = { type: "checkbox", checked: query[part], onchange };
      return labelled(label, element("input", about));
    };
    return [
      select("class of tokens", pairs, selected, (name) => this.ask({ selected: name })),
      this.box("selected", "pattern of tokens", ready ? "" : selected, "a word, or /\\d+/"),
      check("whole", "whole words"),
      check("cases", "case"),
    ];
  }

  // The neurons that were chosen in the list, for a model that can run without them.
  silencing() {
    const chosen = [...this.chosen];
    const silence = () => {
      const { N } = this.state.selected().side;
      const changes = chosen.map((index) => ({
        ...{ layer: Math.floor(index / N), neuron: index % N, scale: 0 },
      }));
      this.chosen.clear();
      this.state.put({ changes });
    };
    return button(".tw-copy", silence, `silence ${plural(chosen.length, "neuron")} together`);
  }

  table(overview, selected) {
    const live = canChange(this.state);
    const columns = this.columns(overview);
    const row = (index) => {
      const [layer, neuron] = [Math.floor(index / overview.N), index % overview.N];
      const name = `${layer} \u00b7 ${neuron}`;
      const about = { "aria-current": index === selected && "true" };
      const cells = columns.map(([, , cell]) => element("span", cell(index)));
      const choose = () => this.state.chooseNeuron(this.state.selected().side, layer, neuron);
      const hit = button(".tw-item.tw-hit", choose, about, element("b", name), cells);
      if (!live) return hit;
      const onchange = ({ target }) => {
        this.chosen[target.checked ? "add" : "delete"](index);
        this.view.schedule();
      };
      const box = { type: "checkbox", "aria-label": `choose ${name}`, onchange };
      const checked = this.chosen.has(index);
      return element("div.tw-item", element("input", { ...box, checked }), hit);
    };
    const rows = this.answer.found.slice(0, this.rows).map(row);
    const names = [...(live ? [""] : []), "neuron", ...columns.map(([name]) => name)];
    const widths = columns.map(([, width]) => width).join(" ");
    return table(`${live ? "16px " : ""}62px ${widths}`, names, rows);
  }

  // Of each column behind the neuron its name, its width, and what is in the cell of one.
  columns(overview) {
    const { about, fires, strength } = overview;
    const { score, tallyOf, classOf, label } = this.answer;
    if (tallyOf) {
      const measure = (name, written) => [
        ...[name, "minmax(0, 1fr)"],
        (index) => written(tallyOf(index).measures(index)[name]),
      ];
      return [
        ...(classOf ? [["class", "minmax(90px, 2fr)", classOf]] : []),
        measure("phi", (phi) => phi.toFixed(3)),
        ...["precision", "recall", "fires"].map((name) => measure(name, percent)),
        ...["h inside", "outside"].map((name) => measure(name, (h) => signed(h.toFixed(2), 2))),
      ];
    }
    const matched = (index) => number(score[index]);
    const peaks = (index) => overview.peaksOf(index).map((peak) => pill(peak));
    const known = [
      ["fires", "48px", (index) => percent(fires[index] / about.tokens)],
      ["mean |h|", "54px", (index) => number(strength[index])],
      ["fires most at", "minmax(0, 1fr)", (index) => element("span.tw-chips", peaks(index))],
    ];
    const match = score && !label ? [["match", "64px", matched]] : [];
    const labels = label ? [["label", "minmax(0, 2fr)", label]] : [];
    return [...(fires ? known : []), ...match, ...labels];
  }
}
