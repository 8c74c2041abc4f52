// An exported page: a stand-in for the widget's model, with the chunks that the page has with it.

import { addressOf, viewOf } from "./address.js";
import { fromBase64 } from "./data.js";
import { QUERY } from "./search.js";
import { View } from "./view.js";

const NO_ROOM = "This page had no room for all that is known of this neuron; the widget shows it.";

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

  get query() {
    return this.state;
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
    this.tell("change:query");
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

  async chunk(key) {
    const text = document.getElementById(key)?.textContent;
    if (text === undefined) throw new Error(NO_ROOM);
    return fromBase64(text);
  }
}

// parent: the element to fill; first: the view to begin with.
export function openPage(parent, first) {
  const begin = { ...first, ...QUERY };
  const data = fromBase64(document.getElementById("data").textContent);
  const view = viewOf(location.hash.slice(1), begin);
  const nothing = { texts: [], runs: false, busy: false, error: "" };
  new View(new PageModel({ ...view, data, ...nothing }, begin), parent);
}
