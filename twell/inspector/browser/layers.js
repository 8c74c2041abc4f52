// What an atlas shows before a neuron is selected: all layers of a model.

import { button, element } from "./elements.js";
import { countBar, quiet } from "./parts.js";
import { integer, number, percent, plural } from "./words.js";

// Name and size of a model, and what is known of it.
export function modelFacts({ about, fires, L, N }) {
  const { name, tokens, source } = about;
  const dead = fires ? fires.reduce((sum, count) => sum + (count === 0), 0) : 0;
  const facts = [
    `${plural(L, "layer")} of ${integer(N)} neurons`,
    fires && `${percent(dead / fires.length)} dead`,
    tokens !== null && `counted over ${plural(tokens, "token")}`,
    source?.run && source.run !== name && source.run,
    !about.weights && "no weights: no promoted words, no similar neurons",
  ];
  return facts.filter(Boolean);
}

// Of each layer: active neurons, dead ones, and how strongly they fire. A click searches in it.
export function layersCard(view, side) {
  const overview = side.catalog?.chunk("overview");
  if (!overview) return null;
  if (!overview.fires) return quiet("There are no statistics without an aggregate.");
  const rows = Array.from({ length: overview.L }, (_, layer) => layerRow(overview, layer));
  const most = Math.max(...rows.map(({ active }) => active));
  const { within } = view.state.query;
  const line = ({ active, cells }, layer) =>
    button(
      ".tw-layer-line",
      () => view.browse.ask({ within: within === layer ? null : layer }),
      { "aria-pressed": String(within === layer), title: "search in it" },
      element("b", String(layer)),
      countBar(active / most, number(active)),
      cells.map((text) => element("span", text)),
    );
  const names = ["layer", "active a token", "dead", "median rate", "median |h|"];
  return element(
    "section.tw-card.tw-overview",
    { "aria-label": "layers" },
    element("div.tw-card-head", element("h4", "Layers")),
    element("div.tw-layer-line.tw-names", names.map((one) => element("span", one))),
    rows.map(line),
    quiet("A click on a layer searches in it, one on a neuron opens its card."),
  );
}

function layerRow({ fires, strength, about, N }, layer) {
  const own = (values) => values.subarray(layer * N, (layer + 1) * N);
  const alive = (values) => values.filter((_, n) => own(fires)[n]).sort();
  const middle = (sorted) => sorted[Math.floor(sorted.length / 2)] ?? 0;
  const rates = alive(own(fires));
  return {
    active: rates.reduce((sum, count) => sum + count, 0) / about.tokens,
    cells: [
      percent(1 - rates.length / N),
      percent(middle(rates) / about.tokens),
      number(middle(alive(own(strength)))),
    ],
  };
}
