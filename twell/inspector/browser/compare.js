// Two sides beside each other: which neurons changed most, and what was changed in a live model.

import { meanOf } from "./data.js";
import { button, closer, element, help, labelled, numberBox, quiet, table } from "./elements.js";
import { number, percent, signed } from "./words.js";

const ABOUT_CHANGED =
  "The mean over this text\u2019s tokens of the size of the difference of h, right minus left, " +
  "without the first token of each sequence.";
const ABOUT_CHANGE =
  "The model runs again with another h of this neuron in the output of its layer, at every " +
  "token; the second side shows what becomes of it.";
const ABOUT_SILENCED =
  "Exact: when this page was made, the model ran without this neuron, and then without each other.";

export function changedCard(state) {
  const { changed } = state.header;
  const rows = changed.map(([layer, neuron, change]) => {
    const share = (side) => element("span", percent(side.firings(layer, neuron) / side.T));
    return button(
      ".tw-item.tw-entry",
      () => state.chooseNeuron(state.selected().side, layer, neuron),
      { data: { neuron: state.nameOf(state.sides[0], layer, neuron) } },
      element("span", `${layer} \u00b7 ${neuron}`),
      element("b", number(change)),
      state.sides.map(share),
    );
  });
  const names = ["neuron", "change", "fires left", "right"];
  return element(
    "section.tw-card.tw-changed-most",
    { "aria-label": "neurons that changed most" },
    element("div.tw-card-head", element("h2", "Changed most"), help(ABOUT_CHANGED)),
    rows.length
      ? table("repeat(4, minmax(0, 80px))", names, rows)
      : quiet("No value of any neuron differs in this text."),
  );
}

// Whether there is a model to run, and not two that are compared already.
export function canChange(state) {
  return state.get("runs") && (!state.sides[1] || state.sides[1].about.changes.length > 0);
}

// Silence, scale or set a neuron; silence it alone where no model can run and its effect is known;
// null where nothing can be changed.
export function changeControls(state, side, layer, neuron) {
  if (!canChange(state)) {
    const silent = state.get("colour") === "effect";
    const show = () => state.put({ colour: silent ? "neuron" : "effect" });
    const pressed = { "aria-pressed": String(silent) };
    if (!side.silenced) return null;
    const silence = side.rise(layer, neuron)
      ? [button(".tw-copy", show, pressed, "silence"), help(ABOUT_SILENCED)]
      : quiet(`This page can silence ${side.silenced.length} neurons, and not this one.`);
    return element("div.tw-change", silence);
  }
  const isIt = (change) => change.layer === layer && change.neuron === neuron;
  const now = state.get("changes").find(isIt);
  const to = (how) => {
    const others = state.get("changes").filter((one) => !isIt(one));
    state.put({ changes: how ? [...others, { layer, neuron, ...how }] : others });
  };
  const box = (sign, name, label) =>
    labelled(
      sign,
      numberBox(label, now?.[name], (value) => to(value === null ? null : { [name]: value })),
    );
  const silent = now?.scale === 0;
  const silence = () => to(silent ? null : { scale: 0 });
  return element(
    "div.tw-change",
    element("span.tw-quiet", "Change h", help(ABOUT_CHANGE)),
    button(".tw-copy", silence, { "aria-pressed": String(silent) }, "silence"),
    box("times", "scale", "scale the neuron by"),
    box("fixed at", "value", "set the neuron to"),
  );
}

function described({ layer, neuron, scale, value }) {
  const what = scale === 0 ? "silent" : scale === undefined ? `= ${value}` : `\u00d7 ${scale}`;
  return `${layer} \u00b7 ${neuron} ${what}`;
}

// All changes, and the loss before and after; null if nothing is changed.
export function changeStrip(state) {
  const [before, after] = state.sides;
  const changes = after?.about.changes ?? [];
  if (changes.length) {
    const undo = (rest) => state.put({ changes: rest });
    return strip(state, before, after.surprise, changes, state.get("runs") && undo);
  }
  const { side, layer, neuron } = state.selected();
  const rise = state.get("colour") === "effect" && side.rise(layer, neuron);
  if (!rise) return null;
  const surprise = side.surprise.map((before, token) => before + rise[token]);
  return strip(state, side, surprise, [{ layer, neuron, scale: 0 }], () => state.put({ colour: "neuron" }));
}

// surprise: of each token after the changes; undo(rest): only the rest remains.
function strip(state, side, surprise, changes, undo) {
  const closing = (one) =>
    closer(`undo ${described(one)}`, () => undo(changes.filter((other) => other !== one)));
  const chips = changes.map((one) => element("span.tw-changed", described(one), undo && closing(one)));
  const members = state.membersOf(side);
  const lossOf = (values) => meanOf(values.filter((_, token) => members[token]));
  const difference = (name, [one, other]) =>
    element(
      "b",
      `${name} ${one.toFixed(3)} \u2192 ${other.toFixed(3)} nats (${signed(other - one)})`,
    );
  const losses = [
    difference("loss", [side.surprise, surprise].map(meanOf)),
    members && difference("at the selected tokens", [side.surprise, surprise].map(lossOf)),
  ];
  const all = undo && button(".tw-link", () => undo([]), "undo all");
  return element("div.tw-change.tw-strip-of-changes", "Changed", chips, all, losses);
}
