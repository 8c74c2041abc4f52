// Of a neuron's card: the words that it promotes, and the neurons that are like it.

import { button, element } from "./elements.js";
import { pill } from "./parts.js";
import { percent, signed } from "./words.js";

const KIN = {
  together: ["fires together", "correlation (phi) of which tokens they fire for"],
  gate: ["gate alike", "cosine of the rows of the gate projection, which decides when they fire"],
  up: ["up alike", "cosine of the rows of the up projection, which gives h its size and sign"],
  down: ["output alike", "cosine of what they add to the residual stream"],
  read: ["read it", "neurons of later layers: cosine of their gate rows with what this one adds"],
  written: ["it reads", "neurons of earlier layers: cosine of what they add with this gate row"],
};
const WITHIN = ["together", "gate", "up"]; // these are of one layer

// A gated neuron's h has both signs: words that a positive one promotes a negative one suppresses.
export function promoted({ promotes, suppresses, overview, histogram, edges, fires }) {
  const { gated } = overview.about;
  const share = (sign) => {
    if (!histogram || !fires) return "";
    const inside = histogram.filter((_, bin) => (edges[bin] < 0 ? -1 : 1) === sign);
    return ` (${percent(inside.reduce((sum, count) => sum + count, 0) / fires)})`;
  };
  const list = (title, words, h, sign) => {
    const word = ([text, change]) =>
      element(
        "span.tw-word",
        { title: `logit at h = ${h}, against the mean over all words` },
        pill(text),
        element("small", signed(sign * change)),
      );
    return element("div", element("h5", title), element("div.tw-words", words.map(word)));
  };
  const lists = gated
    ? [
        list(`when positive${share(1)} it promotes`, promotes, "1", 1),
        list(`when negative${share(-1)} it promotes`, suppresses, "\u22121", -1),
      ]
    : [list("promotes", promotes, "1", 1), list("suppresses", suppresses, "1", 1)];
  const swapped = "With the other sign of h it suppresses these words. Numbers: logits at |h| = 1.";
  return element(
    "div.tw-promoted",
    element("div.tw-both-words", lists),
    gated && element("p.tw-quiet", swapped),
  );
}

// Neurons of the same layer, then of all; a click selects one.
export function neighbours({ like = [], together = [] }, layer, choose) {
  const row = (name, pairs) => {
    const [label, title] = KIN[name];
    const chip = ([of, neuron, size]) =>
      button(
        size < 0 ? ".tw-chip.tw-minus" : ".tw-chip",
        () => choose(of, neuron),
        { title: `layer ${of}, neuron ${neuron}`, data: { focus: `${name}-${of}-${neuron}` } },
        element("span", WITHIN.includes(name) ? String(neuron) : `${of} \u00b7 ${neuron}`),
        element("b", signed(size, 2)),
      );
    const about = element("span", { title }, label);
    return element("div.tw-kin", { data: { kin: name } }, about, pairs.map(chip));
  };
  const here = together.map(([neuron, phi]) => [layer, neuron, phi]);
  const lists = [...(here.length ? [["together", here]] : []), ...like];
  const part = (title, within) => {
    const rows = lists.filter(([name]) => WITHIN.includes(name) === within);
    const nodes = rows.map((one) => row(...one));
    return nodes.length > 0 && element("div.tw-kins", element("h5", title), nodes);
  };
  return [part(`In layer ${layer}`, true), part("In all layers: layer \u00b7 neuron", false)];
}
