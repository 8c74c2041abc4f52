// A passage: its tokens as text, each with a colour.

import { element, pieces } from "./elements.js";
import { pressed } from "./keyboard.js";
import { passageColours, showLegend } from "./colours.js";
import { integer, range } from "./words.js";

const LATER = 100; // ms
const OUT = 512; // the colour of a token that is left out

export class Passage {
  constructor(view, side) {
    this.view = view;
    this.state = view.state;
    this.side = side;
    this.spans = [];
    this.painted = new Int16Array(side.T).fill(-1);
    this.legend = element("div");
    const tokenAt = (event) => event.target.closest?.(".tw-t")?.number;
    this.text = element("div.tw-text", {
      tabindex: "0",
      role: "listbox",
      "aria-label": `passage, ${side.about.name}`,
      onpointerover: (event) => view.hover(side, tokenAt(event)),
      onpointerleave: () => view.hover(side),
      onpointerdown: (event) => (this.pressed = tokenAt(event)),
      onpointerup: (event) => this.dragged(tokenAt(event)),
      onclick: (event) => this.clicked(tokenAt(event), event),
      onkeydown: (event) => pressed(event, side, this.state),
    });
    this.text.append(...this.lines());
    this.nodes = [this.legend, this.text];
  }

  // From one token to another: all between are selected.
  dragged(token) {
    const { pressed } = this;
    if (token === undefined || pressed === undefined || token === pressed) return;
    this.view.browse.selectTokens(this.side, between(pressed, token));
    getSelection().removeAllRanges();
  }

  // Shift selects all tokens since the last click, beside those that are selected.
  clicked(token, { shiftKey }) {
    if (token === undefined) return;
    const { browse } = this.view;
    if (shiftKey) return browse.addTokens(this.side, between(this.anchor ?? token, token));
    this.anchor = token;
    const { side, token: before } = this.state.selected();
    this.view.keepPlace = true;
    if (side === this.side && before === token) this.state.put({ token: null });
    else this.state.chooseToken(this.side, token);
  }

  // Tokens flow as text does. A line may break before a token that begins with white space, and
  // wherever words are too long. A line of the text is a block with a direction of its own; each
  // token is isolated, so that it moves no other.
  lines() {
    const { side } = this;
    const nodes = [];
    const begin = () => nodes.push(element("div.tw-line"));
    for (let token = 0; token < side.T; token++) {
      const sequence = side.starts.indexOf(token);
      if (sequence >= 0 && side.starts.length > 2) {
        const name = `sequence ${integer(sequence + 1)}`;
        nodes.push(element("div.tw-sequence", { "aria-hidden": "true" }, name));
      }
      if (sequence >= 0) begin();
      const text = side.text(token);
      if (/^\s/.test(text)) nodes.at(-1).append(element("wbr"));
      nodes.at(-1).append(this.span(token, text));
      if (text.endsWith("\n") && !side.starts.includes(token + 1)) begin();
    }
    for (const node of nodes) node.dir = "auto"; // at the end: each token would be looked at again
    return nodes;
  }

  span(token, text) {
    const special = this.side.isSpecial(token) ? ".tw-special" : "";
    const id = `${this.view.prefix}${this.side.number}-${token}`;
    const about = { role: "option", id, "aria-label": text.trim() ? null : `token ${token}` };
    const span = element(`span.tw-t${special}`, about, pieces(text, true));
    this.spans.push(Object.assign(span, { number: token }));
    return span;
  }

  paint() {
    this.colours = passageColours(this.state, this.side);
    const { values, scale } = this.colours;
    clearTimeout(this.naming);
    this.naming = setTimeout(() => this.name(), LATER);
    const offset = scale.kind === "signed" ? 256 : 0;
    for (let token = 0; token < this.side.T; token++) {
      const left = Number.isNaN(values[token]);
      const index = left ? OUT : offset + scale.index(values[token]);
      if (this.painted[token] === index) continue;
      const { style, classList } = this.spans[token];
      style.cssText = scale.ramp.css[index - offset] ?? "";
      if (left || this.painted[token] === OUT) classList.toggle("tw-out", left);
      this.painted[token] = index;
    }
    showLegend(this.legend, scale);
    const members = this.state.membersOf(this.side);
    if (members !== this.members)
      this.spans.forEach((span, n) => span.classList.toggle("tw-member", Boolean(members?.[n])));
    this.members = members;
    const peeked = this.state.peeked(this.side);
    this.spans[this.peeked]?.classList.remove("tw-peeked");
    this.spans[peeked]?.classList.add("tw-peeked");
    this.peeked = peeked;
    this.pin(this.state.pinned(this.side));
  }

  // A token's name has its value. Names follow the colours, which the reader waits for.
  name() {
    const { values, of } = this.colours;
    this.spans.forEach((span, token) => {
      const value = Number.isNaN(values[token]) ? "left out" : of(values[token]);
      const name = `token ${token}, ${value}: ${this.side.text(token)}`;
      if (span.ariaLabel !== name) span.ariaLabel = name;
    });
  }

  pin(token) {
    if (this.pinned !== token) {
      this.spans[this.pinned]?.removeAttribute("aria-selected");
      this.spans[token]?.setAttribute("aria-selected", "true");
      this.text.setAttribute("aria-activedescendant", this.spans[token]?.id ?? "");
      this.pinned = token;
    }
    if (this.view.reveal && token !== null && !this.view.keepPlace) this.bring(this.spans[token]);
  }

  // Scroll within the passage only: the notebook around it stays where it is.
  bring(span) {
    const box = this.text.getBoundingClientRect();
    const token = span.getBoundingClientRect();
    if (token.top < box.top + token.height || token.bottom > box.bottom - token.height)
      this.text.scrollTop += token.top - box.top - (box.height - token.height) / 2;
  }
}

function between(one, other) {
  return range(Math.min(one, other), Math.max(one, other));
}
