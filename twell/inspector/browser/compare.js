// Two sides beside each other: which neurons changed most, and what was changed in a live model.

import { meanOf } from "./data.js";
import { button, closer, element, help, labelled, numberBox, quiet, table } from "./elements.js";
import { number, percent, signed } from "./words.js";

const ABOUT_CHANGED =
  "The mean over this text\u2019s tokens of the size of the difference of h, right minus left, " +
  "without the first token of each sequence.";
const SAME = "No value of any neuron differs in this text.";
const ABOUT_CHANGE =
  "The model runs again with another h of this neuron in the output of its layer, at every " +
  "token; the second side shows what becomes of it.";

export function changedCard(state) {
  const { changed } = state.header;
  const { length } = state.sides[1].about.changes;
  const none = length ? "No neuron changes after these: only predictions do." : SAME;
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
      : quiet(none),
  );
}

// Whether there is a model to run, and not two that are compared already.
export function canChange(state) {
  return state.get("runs") && (!state.sides[1] || state.sides[1].about.changes.length > 0);
}

// Silence, scale or set a neuron; null where that cannot be.
export function changeControls(state, layer, neuron) {
  if (!canChange(state)) return null;
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
  if (!changes.length) return null;
  const live = state.get("runs");
  const undo = (one) =>
    closer(`undo ${described(one)}`, () =>
      state.put({ changes: changes.filter((other) => other !== one) }),
    );
  const chips = changes.map((one) => element("span.tw-changed", described(one), live && undo(one)));
  const members = state.membersOf(before);
  const lossOf = (side) => meanOf([...side.surprise].filter((_, token) => members[token]));
  const difference = (name, [one, other]) =>
    element(
      "b",
      `${name} ${one.toFixed(3)} \u2192 ${other.toFixed(3)} nats (${signed(other - one)})`,
    );
  const losses = [
    difference("loss", [before.loss, after.loss]),
    members && difference("at the selected tokens", [before, after].map(lossOf)),
  ];
  const all = live && button(".tw-link", () => state.put({ changes: [] }), "undo all");
  return element("div.tw-change.tw-strip-of-changes", "Changed", chips, all, losses);
}
