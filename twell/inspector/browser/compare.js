// Two models beside each other: which neurons changed most, and how alike the selected one is.

import { button, element } from "./elements.js";
import { help } from "./parts.js";
import { number, percent } from "./words.js";

const MOST = 20;
const ABOUT_CHANGED =
  "The mean over this text\u2019s tokens of the size of the difference of h, right minus left.";
const ABOUT_ALIKE =
  "The cosine of the neuron\u2019s weights in the two models: of what makes it fire (input), and of " +
  "what it adds to the output (output); 1 is the same direction.";

// The neurons with the largest mean |difference of h|: layer, neuron, change.
export function changedMost(left, right, skipFirst) {
  return right.remember(`changed most ${skipFirst}`, () => {
    const sums = new Float64Array(right.L * right.N);
    for (const row of right.rows(0, right.L - 1, skipFirst))
      addChanges(sums, left, right, row, right.N * Math.floor(row / right.T));
    const tokens = [...right.rows(0, 0, skipFirst)].length;
    const changed = Array.from(sums.keys()).filter((at) => sums[at] > 0);
    changed.sort((a, b) => sums[b] - sums[a] || a - b);
    const one = (at) => ({ layer: Math.floor(at / right.N), neuron: at % right.N });
    return changed.slice(0, MOST).map((at) => ({ ...one(at), change: sums[at] / tokens }));
  });
}

// Adds |difference| of a token and layer to the sums: the neurons of both sides ascend.
function addChanges(sums, a, b, row, first) {
  let [i, j] = [a.pointer[row], b.pointer[row]];
  const [last, end] = [a.pointer[row + 1], b.pointer[row + 1]];
  while (i < last || j < end) {
    const neuron = Math.min(i < last ? a.neuron[i] : Infinity, j < end ? b.neuron[j] : Infinity);
    const before = i < last && a.neuron[i] === neuron ? a.value[i++] : 0;
    const after = j < end && b.neuron[j] === neuron ? b.value[j++] : 0;
    sums[first + neuron] += Math.abs(after - before);
  }
}

// The list as a card; null where no token of a neuron has a difference.
export function changedCard(state) {
  const [left, right] = state.sides;
  const { aligned, paired } = state.header;
  if (!aligned || !paired || !right.T) return null;
  const changed = changedMost(left, right, state.get("skip_first"));
  const selected = state.selected();
  const rows = changed.map(({ layer, neuron, change }) => {
    const chosen = selected.layer === layer && selected.neuron === neuron;
    const fires = [left, right].map((side) => percent(side.firings(layer, neuron) / side.T));
    return button(
      ".tw-entry",
      () => state.chooseNeuron(selected.side, layer, neuron),
      { "aria-pressed": String(chosen), data: { focus: `changed-${layer}-${neuron}` } },
      element("span", `${layer} \u00b7 ${neuron}`),
      element("b", number(change)),
      element("span", fires[0]),
      element("span", fires[1]),
    );
  });
  const kept = left.fires || right.fires ? " Of weak values only those that are kept count." : "";
  return element(
    "section.tw-card.tw-changed-most",
    { "aria-label": "neurons that changed most" },
    element("h4", "Changed most", help(ABOUT_CHANGED + kept)),
    rows.length
      ? element(
          "div.tw-table",
          element(
            "div.tw-entry.tw-entry-head",
            ["neuron", "change", "fires left", "right"].map((name) => element("span", name)),
          ),
          rows,
        )
      : element("p.tw-quiet", "No value of any neuron differs in this text."),
  );
}

// How alike a neuron is in the two models; null for one model.
export function alikeness(state, layer, neuron) {
  const [input, output] = state.header?.alike ?? []; // an atlas has no header
  if (!input) return null;
  const at = layer * state.sides[0].N + neuron;
  return element(
    "p.tw-quiet.tw-alike",
    `weights in both: input ${input[at].toFixed(2)}, output ${output[at].toFixed(2)}`,
    help(ABOUT_ALIKE),
  );
}
