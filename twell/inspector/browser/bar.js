// The controls above the passage, one or more for each trait of the view.

import { element, help, labelled, select } from "./elements.js";

export const COLOURS = {
  count: "active neurons",
  neuron: "one neuron",
  surprise: "surprise",
  effect: "surprise without the neuron",
};
const ABOUT_FIRST =
  "The first token of a sequence is by far the most active, so colours and scales leave it out.";

export function bar(state) {
  const box = (trait, name) => {
    const onchange = ({ target }) => state.put({ [trait]: target.checked });
    const about = { type: "checkbox", checked: state.get(trait), "aria-label": name };
    return element("label.tw-group", element("input", { ...about, onchange }), name);
  };
  // Without a selected neuron none can colour the passage.
  const lacking = state.selected().neuron === null;
  const chosen = state.get("colour");
  const { side, layer, neuron } = state.selected();
  const known = !lacking && side.rise(layer, neuron);
  const possible = chosen === "effect" && !known ? "neuron" : chosen;
  const colour = lacking && possible === "neuron" ? "count" : possible;
  const colours = Object.entries(COLOURS).filter(([name]) => known || name !== "effect");
  const colouring = select("colour", colours, colour, (colour) => state.put({ colour }));
  if (lacking)
    Object.assign(colouring.options[1], { disabled: true, title: "click a neuron first" });
  return element(
    "div.tw-bar",
    { role: "group", "aria-label": "what is shown" },
    labelled("Colour", colouring),
    element("span.tw-group", box("skip_first", "without first tokens"), help(ABOUT_FIRST)),
    state.header.aligned && box("difference", "right: difference to left"),
  );
}
