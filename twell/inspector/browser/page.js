// A page or an atlas: a stand-in for the widget's model. Its state is in the address; chunks are in
// the page, or in files beside an atlas.

import { COLOURS } from "./bar.js";
import { fromBase64 } from "./data.js";
import { element } from "./elements.js";
import { OVER, QUERY, SORTS, WHERE } from "./search.js";
import { View } from "./view.js";

const NO_ROOM = "This page had no room for all that is known of this neuron; the widget shows it.";

class PageModel extends EventTarget {
  constructor(state, begin, atlas) {
    super();
    Object.assign(this, { begin, atlas });
    this.state = { ...state, ...viewOf(location.hash.slice(1), begin) };
    addEventListener("hashchange", () => this.follow());
  }

  get(name) {
    return this.state[name];
  }

  set(name, value) {
    if (this.state[name] === value) return;
    this.state[name] = value;
    this.dispatchEvent(new Event(`change:${name}`));
  }

  on(name, react) {
    this.addEventListener(name, react);
  }

  follow() {
    const view = viewOf(location.hash.slice(1), this.begin);
    for (const [name, value] of Object.entries(view)) this.set(name, value);
  }

  // In an atlas the back button leads to the neuron before.
  save_changes() {
    if (location.protocol === "about:") return; // inside of a notebook, without an address
    const address = addressOf(this.state, this.begin);
    const { layer, neuron } = viewOf(location.hash.slice(1), this.begin);
    const other = layer !== this.state.layer || neuron !== this.state.neuron;
    const write = this.atlas && other ? "pushState" : "replaceState";
    history[write](null, "", address ? `#${address}` : location.pathname + location.search);
  }

  async chunk(key) {
    const text = document.getElementById(key)?.textContent;
    if (text !== undefined) return fromBase64(text);
    if (!this.atlas) throw new Error(NO_ROOM);
    return loadChunk(key.split(":")[1]);
  }
}

// --- the address: the parts of the state that differ from the beginning

const whole = (text) => (/^\d{1,9}$/.test(text) ? Number(text) : undefined);
const yes = (text) => ({ yes: true, no: false })[text];
const CHOICES = { colour: COLOURS, over: OVER, where: WHERE, sort: SORTS };

function written(value) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  return encodeURIComponent(value ?? "none");
}

export function addressOf(view, begin) {
  const parts = Object.keys(begin).map((name) => [name, written(view[name])]);
  const changed = parts.filter(([name, text]) => text !== written(begin[name]));
  return changed.map((part) => part.join("=")).join("&");
}

// The view of an address. A part that is missing or nonsense is as in the beginning.
export function viewOf(address, begin) {
  const words = new URLSearchParams(address);
  const view = { ...begin };
  for (const name of Object.keys(begin)) {
    const text = words.get(name);
    if (text === null) continue;
    if (typeof begin[name] === "boolean") view[name] = yes(text) ?? begin[name];
    else if (typeof begin[name] !== "string") view[name] = text === "none" ? null : whole(text);
    else if (Object.hasOwn(CHOICES[name] ?? { [text]: 0 }, text)) view[name] = text;
  }
  return view;
}

// --- chunks, and the start

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
globalThis.twellOpen = (parent, first, atlas) => {
  const data = fromBase64(document.getElementById("data").textContent);
  const state = { ...first, data, texts: [], runs: false, busy: false, error: "" };
  const begin = atlas
    ? { layer: null, neuron: null, ...QUERY, finding: true }
    : { ...first, ...QUERY };
  new View(new PageModel(state, begin, atlas), parent);
};
