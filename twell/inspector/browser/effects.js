// What parts of the model do to the prediction behind a token: their direct effects on the logits of
// the likeliest word and of the word that follows.

import { element, help, pill, quiet, signedBar, signedText, table } from "./elements.js";

const ABOUT =
  "A neuron adds h times its column of the down projection to the residual stream. A bar is what " +
  "this adds to a word\u2019s logit through the last norm and the unembedding, against the mean " +
  "over all words. Approximation: the norm\u2019s scale is taken as fixed. What later layers make " +
  "of it is left out.";
const ABOUT_EXACT =
  "Exact: how much the surprise of the next token rises, in nats, when the model runs without the " +
  "neuron at all tokens.";

const rounded = (value) => signedText(Number(value.toFixed(2)), Math.abs(value) < 0.1 ? 1 : 2);

export function effectsOf(cards, side, token) {
  const effects = side.effects(token);
  if (!effects) return null;
  const { parts, strongest } = effects;
  const likeliest = side.predictions(token)[0].text;
  const next = side.next(token);
  const words = [likeliest, next].filter((word, n) => n === 0 || ![null, likeliest].includes(word));
  const most = (pairs) => Math.max(...pairs.flatMap((pair) => [...pair].map(Math.abs))) || 1;
  const cells = (pair, most) =>
    words.flatMap((_, n) => [signedBar(pair[n] / most), rounded(pair[n])]);
  const exact = side.silenced && next !== null;
  const head = ["exact", help(ABOUT_EXACT)];
  const drawn = (first, rows, last) =>
    table(
      `auto ${words.map(() => "minmax(20px, 1fr) 46px").join(" ")} ${last ? "56px" : ""}`,
      [first, ...words.map((word) => pill(word)), ...(last ? [last] : [])],
      rows,
    );
  const widest = most(strongest.map(({ pair }) => pair));
  const neurons = strongest.map(({ layer, neuron, pair }) => {
    const rise = exact && side.rise(layer, neuron)?.[token + 1];
    const about = { type: "button", ...cards.choosing(side, layer, neuron, token) };
    const name = element("span", `${layer} \u00b7 ${neuron}`);
    const silenced = Number.isFinite(rise) ? rounded(rise) : element("span", "\u2013");
    return element("button.tw-item.tw-effect", about, name, cells(pair, widest), exact && silenced);
  });
  const names = ["embedding"];
  for (let layer = 0; layer < side.L; layer++)
    names.push(`attention ${layer}`, `neurons ${layer}`);
  const sum = [0, 1].map((n) => parts.reduce((sum, pair) => sum + pair[n], 0));
  const longest = most(parts);
  const sums = [...parts.map((pair, n) => [names[n], pair]), ["logit", sum]].map(([name, pair]) =>
    element("div.tw-item", element("span", name), cells(pair, longest)),
  );
  return element(
    "div.tw-effects",
    element("h3", "direct effects on the next word\u2019s logit", help(ABOUT)),
    element("div.tw-scrolled", { data: { of: token } }, drawn("neuron", neurons, exact && head)),
    element("h3", "summed by layer"),
    element("div.tw-scrolled", { tabindex: "0" }, drawn("part", sums)),
    quiet("Bars are of the strongest neurons, sums of all; they end with the logit."),
  );
}
