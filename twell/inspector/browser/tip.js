// The small box at the pointer: the token below it, or the sentence of a question mark.

import { element } from "./elements.js";
import { tokenPill } from "./parts.js";
import { integer, number, pieces, signed } from "./words.js";

export class Tip {
  constructor(view) {
    this.view = view;
    this.node = element("div.tw-tip", { hidden: true });
    const { root } = view;
    for (const event of ["pointerover", "focusin", "click"])
      root.addEventListener(event, ({ target }) => this.explain(target.closest?.(".tw-help")));
    for (const event of ["pointerout", "focusout"])
      root.addEventListener(event, () => this.explain(null));
  }

  explain(mark) {
    if (!mark && !this.mark) return;
    this.mark = mark;
    if (!mark) this.node.hidden = !this.view.state.peek?.token;
    else {
      const { left, bottom } = mark.getBoundingClientRect();
      this.show([mark.dataset.help], left - 14, bottom - 12);
    }
  }

  // event: of the pointer that is on the token, or null.
  follow(event) {
    if (event) this.show(tokenLines(this.view.state), event.clientX, event.clientY);
    else this.node.hidden = true;
  }

  // Beside a place in the window, within the width of the view.
  show(nodes, x, y) {
    this.node.replaceChildren(...nodes);
    this.node.hidden = false;
    const box = this.view.root.getBoundingClientRect();
    const left = Math.min(x - box.left + 14, box.width - this.node.offsetWidth - 4);
    this.node.style.left = `${Math.max(0, left)}px`;
    this.node.style.top = `${y - box.top + 18}px`;
  }
}

function tokenLines(state) {
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
  return lines;
}
