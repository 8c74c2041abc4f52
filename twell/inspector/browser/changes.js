// Changing neurons of a live model: controls on a neuron's card, and a strip of all changes.

import { button, element } from "./elements.js";
import { help } from "./parts.js";
import { signed } from "./words.js";

const ABOUT_CHANGE =
  "The model runs again with another h of this neuron in the output of its layer, at every token; " +
  "the second side shows what becomes of it.";
const TWO =
  "Changes are shown beside the unchanged model, and this view compares already: a view of one " +
  "model and one text has them.";

const isOf = (layer, neuron) => (change) => change.layer === layer && change.neuron === neuron;

// What is compared is shown: surprise, as a difference to the unchanged model.
function change(state, changes) {
  const view = changes.length ? { colour: "surprise", scale: "all", difference: true } : {};
  const back = changes.length ? {} : { difference: false, side: 0 };
  state.put({ ...view, ...back, changes });
}

// Silence, scale and set a neuron; null where no model is there to run.
export function changeControls(state, layer, neuron) {
  if (!state.get("runs")) return null;
  const [, right] = state.sides;
  if (right && !right.about.changes.length) return element("p.tw-quiet", TWO);
  const changes = state.get("changes");
  const now = changes.find(isOf(layer, neuron));
  const to = (how) => {
    const others = changes.filter((one) => !isOf(layer, neuron)(one));
    change(state, how ? [...others, { layer, neuron, ...how }] : others);
  };
  const typed = (name, sign, label) =>
    element(
      "label.tw-group",
      element("span", sign),
      element("input.tw-number", {
        type: "number",
        step: "any",
        value: now?.[name] ?? "",
        "aria-label": label,
        data: { focus: `change-${name}` },
        onchange: ({ target }) =>
          to(target.value === "" ? null : { [name]: Number(target.value) }),
      }),
    );
  const silent = now?.scale === 0;
  return element(
    "div.tw-change",
    element("span.tw-quiet", "h becomes", help(ABOUT_CHANGE)),
    button(
      ".tw-copy",
      () => to(silent ? null : { scale: 0 }),
      { "aria-pressed": String(silent), data: { focus: "change-silence" } },
      "0, silent",
    ),
    typed("scale", "times", "scale the neuron by"),
    typed("value", "fixed at", "set the neuron to"),
    now && button(".tw-link", () => to(null), { data: { focus: "change-undo" } }, "undo"),
  );
}

function described({ layer, neuron, scale, value }) {
  const what = scale === 0 ? "silent" : scale === undefined ? `= ${value}` : `\u00d7 ${scale}`;
  return `${layer} \u00b7 ${neuron} ${what}`;
}

// All changes, and the loss before and after; nothing where nothing is changed.
export function changeStrip(state) {
  const [before, after] = state.sides;
  const changes = after?.about.changes ?? [];
  if (!changes.length) return [];
  const live = state.get("runs");
  const chips = changes.map((one) =>
    element(
      "span.tw-changed",
      described(one),
      live &&
        button(
          ".tw-close",
          () => change(state, changes.filter((other) => other !== one)),
          { "aria-label": `undo ${described(one)}` },
          "\u00d7",
        ),
    ),
  );
  const loss = element(
    "b",
    `loss ${before.loss().toFixed(3)} \u2192 ${after.loss().toFixed(3)} nats ` +
      `(${signed(after.loss() - before.loss())})`,
  );
  const all = live && button(".tw-link", () => change(state, []), "undo all");
  return [element("div.tw-strip-of-changes", "Changed", chips, all, loss)];
}
