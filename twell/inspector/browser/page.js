// An exported page: a stand-in for the widget's model, with the cards that the page has with it.

import { unpack } from "./data.js";
import { View } from "./view.js";

// The part of the selection that the page's address keeps.
const KEPT = ["side", "token", "layer", "neuron", "colour"];

class PageModel {
  constructor(state) {
    this.state = state;
    this.listeners = new Map();
  }

  get(name) {
    return this.state[name];
  }

  set(name, value) {
    if (this.state[name] === value) return;
    this.state[name] = value;
    this.tell(`change:${name}`);
  }

  save_changes() {
    const kept = Object.entries(this.state).filter(
      ([name, value]) => KEPT.includes(name) && value !== null,
    );
    history.replaceState(null, "", `#${kept.map((pair) => pair.join("=")).join("&")}`);
  }

  on(name, react) {
    this.listeners.set(name, [...(this.listeners.get(name) ?? []), react]);
  }

  tell(name, ...words) {
    for (const react of this.listeners.get(name) ?? []) react(...words);
  }

  async cards() {
    const { cards } = await unpack(this.state.data);
    return JSON.parse(new TextDecoder().decode(cards));
  }

  async send({ ask }) {
    this.known ??= this.cards();
    const card = (await this.known)[ask] ?? { missing: true };
    this.tell("msg:custom", { key: ask, card });
  }
}

// parent: the element to fill; text: the packed data in base64; view: where to begin.
export function openPage(parent, text, view) {
  const letters = atob(text);
  const data = new Uint8Array(letters.length); // Uint8Array.from takes half a second
  for (let at = 0; at < data.length; at++) data[at] = letters.charCodeAt(at);
  for (const [name, value] of new URLSearchParams(location.hash.slice(1)))
    if (name in view) view[name] = name === "colour" ? value : Math.trunc(Number(value));
  const nothing = { texts: [], runs: false, busy: false, error: "" };
  new View(new PageModel({ ...view, data, ...nothing }), parent);
}
