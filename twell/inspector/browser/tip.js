// The small box at the pointer: the token below it.

import { element } from "./elements.js";
import { tokenPill } from "./parts.js";
import { integer, number, pieces, signed } from "./words.js";

export function fillTip(tip, state) {
  const { side, token, layer } = state.peek;
  const [first, last] = state.range(side);
  const lines = [element("div.tw-tip-token", tokenPill(side, token), ` token ${integer(token)}`)];
  const add = (name, value) =>
    lines.push(element("div", element("span", name), element("b", { dir: "auto" }, value)));
  const characters = side.characters(token);
  if (characters) add("bytes of", element("span", pieces(characters)));
  if (layer === undefined) {
    const active = first === last ? `active in layer ${first}` : "active, mean over layers";
    add(active, number(side.means(first, last)[token]));
  } else {
    add(`active in layer ${layer}`, integer(side.count(layer, token)));
    add(`fullest tile of ${state.header.tile}`, integer(side.fullestTile(layer, token)));
  }
  const surprise = side.surprise[token];
  add("surprise", Number.isNaN(surprise) ? "first token" : `${number(surprise)} nats`);
  const shown = state.shownNeuron(side);
  if (shown) {
    const { tokens, values } = side.column(shown.layer, shown.neuron);
    const at = tokens.indexOf(token);
    const silent = side.fires ? "not among those kept" : "silent";
    add(`h of ${shown.layer} \u00b7 ${shown.neuron}`, at < 0 ? silent : signed(values[at]));
  }
  tip.replaceChildren(...lines);
}

// Beside the pointer, within the width of the view.
export function placeTip(tip, event, root) {
  const box = root.getBoundingClientRect();
  const x = Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 4);
  tip.style.left = `${Math.max(0, x)}px`;
  tip.style.top = `${event.clientY - box.top + 18}px`;
}
