// A passage: its tokens as text, each with a colour.

import { element } from "./elements.js";
import { passageColours, showLegend } from "./scales.js";
import { direction, integer, pieces } from "./words.js";

const OUT = 512; // the colour of a token that is left out

export class Passage {
  constructor(view, side) {
    this.view = view;
    this.state = view.state;
    this.side = side;
    this.spans = [];
    this.painted = new Int16Array(side.T).fill(-1);
    this.legend = element("div.tw-legend");
    const tokenAt = (event) => event.target.closest?.(".tw-t")?.number;
    this.text = element("div.tw-text", {
      tabindex: "0",
      role: "listbox",
      "aria-label": `passage, ${side.about.name}`,
      onpointerover: (event) => view.hover(side, tokenAt(event), event),
      onpointerleave: () => view.hover(side),
      onclick: (event) => this.clicked(tokenAt(event)),
    });
    this.text.append(...this.lines());
    this.nodes = [this.legend, this.text];
  }

  clicked(token) {
    if (token === undefined) return;
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
    let line = null;
    let words = "";
    const end = () => {
      line.setAttribute("dir", direction(words));
      words = "";
    };
    const begin = () => nodes.push((line = element("div.tw-line")));
    for (let sequence = 0; sequence + 1 < side.starts.length; sequence++) {
      const name = `sequence ${integer(sequence + 1)}`;
      if (side.starts.length > 2)
        nodes.push(element("div.tw-sequence", { "aria-hidden": "true" }, name));
      begin();
      const last = side.starts[sequence + 1] - 1;
      for (let token = side.starts[sequence]; token <= last; token++) {
        const text = side.text(token);
        if (/^\s/.test(text)) line.append(element("wbr"));
        line.append(this.span(token, text));
        words += text;
        if (text.endsWith("\n") && token < last) {
          end();
          begin();
        }
      }
      end();
    }
    return nodes;
  }

  span(token, text) {
    const special = this.side.isSpecial(token) ? ".tw-special" : "";
    const id = `${this.view.prefix}${this.side.number}-${token}`;
    const span = element(`span.tw-t${special}`, { role: "option", id }, pieces(text, true));
    span.number = token;
    this.spans.push(span);
    return span;
  }

  paint() {
    this.colours = passageColours(this.state, this.side);
    const { values, scale } = this.colours;
    const { fill, ink } = scale.ramp;
    const offset = scale.kind === "signed" ? 256 : 0;
    for (let token = 0; token < this.side.T; token++) {
      const left = Number.isNaN(values[token]);
      const index = left ? OUT : offset + scale.index(values[token]);
      if (this.painted[token] === index) continue;
      this.painted[token] = index;
      const { style, classList } = this.spans[token];
      style.backgroundColor = fill[index - offset] ?? "";
      style.color = ink[index - offset] ?? "";
      classList.toggle("tw-out", left);
    }
    showLegend(this.legend, scale);
    this.pin(this.state.pinned(this.side));
  }

  pin(token) {
    if (this.pinned !== token) {
      const before = this.spans[this.pinned];
      const now = this.spans[token];
      before?.classList.remove("tw-pinned");
      before?.removeAttribute("aria-selected");
      now?.classList.add("tw-pinned");
      now?.setAttribute("aria-selected", "true");
      if (now) this.text.setAttribute("aria-activedescendant", now.id);
      else this.text.removeAttribute("aria-activedescendant");
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

  showPeek() {
    const token = this.state.peeked(this.side);
    this.spans[this.peeked]?.classList.remove("tw-peeked");
    this.spans[token]?.classList.add("tw-peeked");
    this.peeked = token;
  }
}
