// A page or an atlas: a stand-in for the widget's model. Its state is in the address; chunks are in
// the page, or in files beside an atlas.

import { addressOf, viewOf } from "./address.js";
import { fromBase64 } from "./data.js";
import { element } from "./elements.js";
import { QUERY } from "./search.js";
import { View } from "./view.js";

const NO_ROOM = "This page had no room for all that is known of this neuron; the widget shows it.";

class PageModel {
  constructor(state, begin, atlas) {
    Object.assign(this, { begin, atlas });
    this.state = { ...state, ...viewOf(location.hash.slice(1), begin) };
    this.listeners = [];
    this.keys = document; // a page is nothing but the view: keys work wherever the focus is
    addEventListener("hashchange", () => this.follow());
  }

  get query() {
    return this.state;
  }

  get(name) {
    return this.state[name];
  }

  set(name, value) {
    if (this.state[name] === value) return;
    this.state[name] = value;
    this.tell(`change:${name}`);
  }

  on(name, react) {
    this.listeners.push([name, react]);
  }

  tell(name) {
    for (const [known, react] of this.listeners) if (known === name) react();
  }

  // The address was edited, or the reader went back.
  follow() {
    const view = viewOf(location.hash.slice(1), this.begin);
    for (const [name, value] of Object.entries(view)) this.set(name, value);
    this.tell("change:query");
  }

  // In an atlas the back button leads to the neuron before.
  save_changes() {
    const address = addressOf(this.state, this.begin);
    const { layer, neuron } = viewOf(location.hash.slice(1), this.begin);
    const other = layer !== this.state.layer || neuron !== this.state.neuron;
    const write = this.atlas && other ? "pushState" : "replaceState";
    history[write](null, "", address ? `#${address}` : location.pathname + location.search);
  }

  link() {
    return location.href;
  }

  async chunk(key) {
    const text = document.getElementById(key)?.textContent;
    if (text !== undefined) return fromBase64(text);
    if (!this.atlas) throw new Error(NO_ROOM);
    return loadChunk(key.split(":")[1]);
  }
}

// A page from disk may not fetch: each file of a chunk is a script that calls twellChunk.
const arriving = new Map();
globalThis.twellChunk = (name, text) => arriving.get(name)?.(fromBase64(text));

function loadChunk(name) {
  return new Promise((done, refuse) => {
    arriving.set(name, done);
    const onerror = () => refuse(new Error(`chunks/${name}.js is missing beside this page.`));
    document.head.append(element("script", { src: `chunks/${name}.js`, onerror }));
  });
}

// parent: the element to fill; first: the view to begin with; atlas: neurons without a passage.
export function openPage(parent, first, atlas = false) {
  const data = fromBase64(document.getElementById("data").textContent);
  const state = { ...first, data, texts: [], runs: false, busy: false, error: "" };
  const begin = atlas
    ? { layer: null, neuron: null, ...QUERY, finding: true }
    : { ...first, ...QUERY };
  new View(new PageModel(state, begin, atlas), parent);
}
