// The controls above the passage, one or more for each trait of the view.

import { button, element, help, labelled, numberBox, select } from "./elements.js";
import { range } from "./words.js";

const COLOURS = [["count", "active neurons"], ["neuron", "one neuron"], ["surprise", "surprise"]];
const SCALES = [
  ["all", "the same for all"],
  ["layer", "each layer its own"],
  ["neuron", "each neuron its own"],
];
const ABOUT_FIRST =
  "The first token of a sequence is by far the most active, so colours and scales leave it out.";
const MARK = "mark overflow of tiles at this compression";

export function bar(state) {
  const pick = (trait, label, pairs, chosen = state.get(trait), attributes = {}) =>
    select(label, pairs, chosen, (value) => state.put({ [trait]: value }), attributes);
  const box = (trait, name) => {
    const onchange = ({ target }) => state.put({ [trait]: target.checked });
    const about = { type: "checkbox", checked: state.get(trait), "aria-label": name };
    return element("label.tw-group", element("input", { ...about, onchange }), name);
  };
  // Without a selected neuron none can colour the passage.
  const lacking = state.selected().neuron === null;
  const chosen = state.get("colour");
  const colour = chosen === "neuron" && lacking ? "count" : chosen;
  const colouring = pick("colour", "colour", COLOURS, colour);
  if (lacking)
    Object.assign(colouring.options[1], { disabled: true, title: "click a neuron first" });
  const scales = SCALES.filter(([name]) => name !== "neuron" || colour === "neuron");
  const off = { disabled: colour === "surprise" };
  const { compressions, tile } = state.header;
  const marks = compressions.map((c) => [c, c ? `C = ${c}` : "off"]);
  const aboutMarks =
    `TwELL at compression C has room for ${tile} / C \u2212 1 active neurons in a tile of ` +
    `${tile}; red marks show where a token has more.`;
  return element(
    "div.tw-bar",
    { role: "toolbar", "aria-label": "what is shown" },
    labelled("Colour", colouring),
    labelled("Scale", pick("scale", "colour scale", scales, state.get("scale"), off)),
    state.scaling(colour) === "all" && limit(state),
    layers(state),
    labelled("Overflow", pick("compression", MARK, marks), help(aboutMarks)),
    element("span.tw-group", box("skip_first", "without first tokens"), help(ABOUT_FIRST)),
    state.header.aligned && box("difference", "right: difference to left"),
    state.model.follow && element("span.tw-group.tw-end", copier()),
  );
}

function limit(state) {
  const choose = (value) => state.put({ limit: value > 0 ? value : null });
  const attributes = { min: "0", placeholder: "auto" };
  const label = "end of the colour scale";
  return labelled("up to", numberBox(label, state.get("limit"), choose, attributes));
}

function layers(state) {
  const last = Math.max(...state.sides.map((side) => side.L)) - 1;
  const numbers = range(0, last).map((n) => [n, String(n)]);
  const shown = state.get("layers") ?? [0, last];
  const put = (first, end) =>
    state.put({ layers: first === 0 && end === last ? null : [first, end] });
  const from = (layer) => put(layer, Math.max(layer, shown[1]));
  const to = (layer) => put(Math.min(layer, shown[0]), layer);
  const pick = (label, at, choose) => select(label, numbers, shown[at], choose);
  return labelled("Layers", pick("first layer", 0, from), "to", pick("last layer", 1, to));
}

// A page has an address, which says what it shows; a widget has none.
function copier() {
  const copy = async ({ currentTarget }) => {
    await navigator.clipboard.writeText(location.href);
    currentTarget.textContent = "copied";
  };
  return button(".tw-copy", copy, { title: "a link to what is shown now" }, "copy link");
}
