// An exported page: a stand-in for the widget's model, with the chunks that the page has with it.

import { fromBase64 } from "./data.js";
import { View } from "./view.js";

// The part of the selection that the page's address keeps.
const KEPT = ["side", "token", "layer", "neuron", "colour"];

const NO_ROOM = "This page had no room for all that is known of this neuron; the widget shows it.";

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

  async chunk(key) {
    const text = document.getElementById(key)?.textContent;
    if (text === undefined) throw new Error(NO_ROOM);
    return fromBase64(text);
  }
}

// parent: the element to fill; view: where to begin.
export function openPage(parent, view) {
  const data = fromBase64(document.getElementById("data").textContent);
  for (const [name, value] of new URLSearchParams(location.hash.slice(1)))
    if (name in view) view[name] = name === "colour" ? value : Math.trunc(Number(value));
  const nothing = { texts: [], runs: false, busy: false, error: "" };
  new View(new PageModel({ ...view, data, ...nothing }), parent);
}
