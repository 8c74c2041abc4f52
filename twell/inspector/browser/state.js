// The selection: the model's traits, which Python shares, and the place under the pointer.

import { BEST } from "./classes.js";
import { QUERY } from "./search.js";

const SELECTION = { side: 0, token: null, layer: null, neuron: null };
const BEGIN = { ...SELECTION, colour: "count" };
const COLOURING = "colour skip_first difference".split(" ");
export const TRAITS = [...Object.keys(SELECTION), ...COLOURING, ...Object.keys(QUERY)];

export class State {
  constructor(model) {
    this.model = model;
    this.header = null; // until the passage is unpacked
    this.sides = [];
    this.peek = null; // { side, token, layer } or { side, layer, neuron } under the pointer
  }

  get(name) {
    return this.model.get(name);
  }

  // The traits that colour the view, as a text.
  colours() {
    return COLOURING.map((trait) => this.get(trait)).join();
  }

  // The search. The widget's model learns of it when it changes, and Python never.
  get query() {
    const part = ([name, begin]) => [name, this.get(name) ?? begin];
    return Object.fromEntries(Object.entries(QUERY).map(part));
  }

  // Of each token of a passage whether the search is for neurons that tell it from others; null if
  // none is selected.
  membersOf(side) {
    const { finding, where, selected } = this.query;
    if (!finding || where !== "selected" || selected === BEST) return null;
    try {
      return side.tokens.select(selected, this.query, side.catalog.chunk("overview")?.counts);
    } catch {
      return null; // no pattern
    }
  }

  // Without a neuron nothing can be coloured by one.
  put(changes) {
    if (changes.neuron === null && ["neuron", "effect"].includes(this.get("colour")))
      changes = { colour: "count", ...changes };
    for (const [name, value] of Object.entries(changes)) this.model.set(name, value);
    this.model.save_changes();
  }

  // A page's address may ask for what does not exist: that is not selected.
  selected() {
    const side = this.sides[this.get("side")] ?? this.sides[0];
    const known = (name, number) => {
      const value = this.get(name);
      return value >= 0 && value < number ? value : null;
    };
    return {
      side,
      token: known("token", side?.T),
      layer: known("layer", side?.L),
      neuron: known("neuron", side?.N),
    };
  }

  // Whether neurons of one side are those of the other: one model, or two of equal sizes.
  shares(one, other) {
    return one === other || this.header.paired;
  }

  // One name for a neuron on all sides that share it.
  nameOf(side, layer, neuron) {
    return [this.header.paired ? 0 : side.number, layer, neuron].join();
  }

  sharing(side) {
    return this.sides.filter((one) => this.shares(side, one));
  }

  // Whether a token of one side stands for the token with its number on the other.
  standsFor(one, other) {
    return one === other || this.header.aligned;
  }

  // The neuron whose values colour a side: the one under the pointer, else the selected one.
  shownNeuron(side) {
    const peeks = this.peek?.neuron !== undefined;
    const { side: own, layer, neuron } = peeks ? this.peek : this.selected();
    const exists = layer !== null && neuron !== null;
    return exists && this.shares(own, side) ? { layer, neuron } : null;
  }

  colouring(side) {
    const shown = this.shownNeuron(side);
    const colour = this.peek?.neuron === undefined || !shown ? this.get("colour") : "neuron";
    if (colour === "effect" && shown && !side.rise(shown.layer, shown.neuron)) return "neuron";
    return ["neuron", "effect"].includes(colour) && !shown ? "count" : colour;
  }

  // The selected token, or the one of this side that stands for it.
  pinned(side, { side: own, token } = this.selected()) {
    return (token ?? side.T) < side.T && this.standsFor(own, side) ? token : null;
  }

  peeked(side) {
    return this.pinned(side, this.peek ?? {});
  }

  // The side from which the values of this one are subtracted, or null.
  reference(side) {
    const [left, right] = this.sides;
    return this.get("difference") && this.header.aligned && side === right ? left : null;
  }

  choose(side, changes) {
    this.put({ side: side.number, ...changes });
  }

  // The neuron stays selected where it exists.
  chooseToken(side, token, changes = {}) {
    const lost = this.shares(this.selected().side, side) ? {} : { neuron: null };
    this.choose(side, { token, ...changes, ...lost });
  }

  chooseNeuron(side, layer, neuron, changes = {}) {
    this.choose(side, { layer, neuron, colour: "neuron", ...changes });
  }

  goTo(view) {
    this.put({ ...BEGIN, ...view });
  }

  // The neuron, then the token, then the layer.
  letGo() {
    const selected = this.selected();
    const name = ["neuron", "token", "layer"].find((name) => selected[name] !== null);
    if (name) this.put({ [name]: null });
  }
}
