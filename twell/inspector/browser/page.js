// An exported page: a stand-in for the widget's model, with the cards that the page has with it.

import { addressOf, viewOf } from "./address.js";
import { unpack } from "./data.js";
import { View } from "./view.js";

class PageModel {
  constructor(state, begin) {
    this.state = state;
    this.begin = begin;
    this.listeners = new Map();
    this.keys = document; // a page is nothing but the view: keys work wherever the focus is
    addEventListener("hashchange", () => this.follow());
  }

  get(name) {
    return this.state[name];
  }

  set(name, value) {
    if (this.state[name] === value) return;
    this.state[name] = value;
    this.tell(`change:${name}`);
  }

  // The address was edited.
  follow() {
    const view = viewOf(location.hash.slice(1), this.begin);
    for (const [name, value] of Object.entries(view)) this.set(name, value);
  }

  save_changes() {
    const address = addressOf(this.state, this.begin);
    history.replaceState(null, "", address ? `#${address}` : location.pathname + location.search);
  }

  link() {
    return location.href;
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

// parent: the element to fill; text: the packed data in base64; begin: the view to begin with.
export function openPage(parent, text, begin) {
  const letters = atob(text);
  const data = new Uint8Array(letters.length); // Uint8Array.from takes half a second
  for (let at = 0; at < data.length; at++) data[at] = letters.charCodeAt(at);
  const view = viewOf(location.hash.slice(1), begin);
  const nothing = { texts: [], runs: false, busy: false, error: "" };
  new View(new PageModel({ ...view, data, ...nothing }, begin), parent);
}
