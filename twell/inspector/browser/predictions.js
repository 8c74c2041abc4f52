// The tokens that a model expects after a token, and what comes.

import { element } from "./elements.js";
import { help, pill } from "./parts.js";
import { percent, signed } from "./words.js";

const ABOUT_NEXT =
  "The ten likeliest next tokens with their probabilities; the framed one is what follows in the " +
  "text.";

// other: a side with the same tokens, to whose probabilities these are compared.
export function predictionList(side, token, other) {
  const predicted = side.predictions(token);
  if (!predicted) return null;
  const following = side.following(token);
  const comes = following === null ? null : side.text(following);
  const before = other?.predictions(token);
  const actual = following === null ? 0 : Math.exp(-side.surprise[following]);
  const rows = predicted.map((one) => word(one, one.text === comes, before));
  if (comes !== null && !predicted.some(({ text }) => text === comes)) {
    const was = other && Math.exp(-other.surprise[following]);
    const rest = was === undefined ? before : [{ text: comes, probability: was }];
    rows.push(element("span", "\u2026"), word({ text: comes, probability: actual }, true, rest));
  }
  return element(
    "div.tw-next",
    element("h5", "predicts next", help(ABOUT_NEXT)),
    element("div.tw-words", rows),
  );
}

function word({ text, probability }, comes, before) {
  const known = before?.find((one) => one.text === text);
  const change = known && 100 * (probability - known.probability);
  const moved = known ? Math.abs(change) >= 0.1 && signed(change, 2) : before && "new";
  return element(
    comes ? "span.tw-expected.tw-comes" : "span.tw-expected",
    pill(text),
    element("b", percent(probability)),
    moved && element("small", { title: "change in percentage points" }, moved),
  );
}
