// The controls above the passage, one or more for each trait of the view.

import { button, element } from "./elements.js";
import { help } from "./parts.js";

const COLOURS = { count: "active neurons", neuron: "one neuron", surprise: "surprise" };
const SCALES = {
  all: "the same for all",
  layer: "each layer its own",
  neuron: "each neuron its own",
};

const ABOUT_FIRST =
  "The first token of a sequence is by far the most active, so colours and scales leave it out.";

const label = (name, ...nodes) => element("label.tw-group", element("span", name), ...nodes);

export class Bar {
  constructor(state) {
    this.state = state;
    this.updates = []; // each brings a control up to date
    this.node = element(
      "div.tw-bar",
      { role: "toolbar", "aria-label": "what is shown" },
      this.colours(),
      this.scale(),
      this.limit(),
      this.layers(),
      this.overflow(),
      this.box("skip_first", "without first tokens", ABOUT_FIRST),
      state.header.aligned && this.box("difference", "right: difference to left"),
      element("span.tw-group.tw-end", this.presets(), this.copier()),
    );
  }

  show() {
    for (const update of this.updates) update();
  }

  // Without a selected neuron none can colour the passage.
  colour() {
    const colour = this.state.get("colour");
    return colour === "neuron" && this.state.selected().neuron === null ? "count" : colour;
  }

  colours() {
    const options = Object.entries(COLOURS).map(([colour, name]) => {
      const choose = () => this.state.put({ colour });
      const option = button(".tw-option", choose, { role: "radio" }, name);
      this.updates.push(() => {
        option.setAttribute("aria-checked", String(colour === this.colour()));
        option.disabled = colour === "neuron" && this.state.selected().neuron === null;
        option.title = option.disabled ? "click a neuron first" : "";
      });
      return option;
    });
    return element(
      "div.tw-group",
      { role: "radiogroup", "aria-label": "colour" },
      element("span", "Colour"),
      element("span.tw-options", options),
    );
  }

  // A select of values with names, and what happens when one is chosen.
  select(name, names, onchange) {
    const options = names.map((text) => element("option", text));
    const select = element("select", { "aria-label": name }, options);
    select.addEventListener("change", () => onchange(select.selectedIndex));
    return select;
  }

  trait(trait, name, values, names) {
    const select = this.select(name, names, (n) => this.state.put({ [trait]: values[n] }));
    this.updates.push(() => (select.selectedIndex = values.indexOf(this.state.get(trait))));
    return select;
  }

  scale() {
    const select = this.trait("scale", "colour scale", Object.keys(SCALES), Object.values(SCALES));
    this.updates.push(() => {
      select.options[2].disabled = this.colour() !== "neuron";
      select.disabled = this.colour() === "surprise";
    });
    return label("Scale", select);
  }

  limit() {
    const end = () => (Number(input.value) > 0 ? Number(input.value) : null);
    const input = element("input.tw-number", {
      type: "number",
      min: "0",
      step: "any",
      placeholder: "auto",
      "aria-label": "end of the colour scale",
      onchange: () => this.state.put({ limit: end() }),
    });
    const group = label("up to", input);
    this.updates.push(() => {
      group.hidden = this.state.scaling(this.colour()) !== "all";
      input.value = this.state.get("limit") ?? "";
    });
    return group;
  }

  layers() {
    const last = Math.max(...this.state.sides.map((side) => side.L)) - 1;
    const numbers = Array.from({ length: last + 1 }, (_, n) => String(n));
    const shown = () => [...(this.state.get("layers") ?? [0, last])];
    const bound = (end, name) => {
      const select = this.select(name, numbers, (layer) => {
        const range = shown();
        range[end] = layer;
        if (range[0] > range[1]) range[1 - end] = layer;
        this.state.put({ layers: range[0] === 0 && range[1] === last ? null : range });
      });
      this.updates.push(() => (select.value = String(shown()[end])));
      return select;
    };
    return label("Layers", bound(0, "first layer"), element("span", "to"), bound(1, "last layer"));
  }

  overflow() {
    const { compressions, tile } = this.state.header;
    const names = compressions.map((c) => (c ? `C = ${c}` : "off"));
    const name = "mark overflow of tiles at this compression";
    const sentence =
      `TwELL at compression C has room for ${tile} / C \u2212 1 active neurons in a tile of ` +
      `${tile}; red marks show where a token has more.`;
    const select = this.trait("compression", name, compressions, names);
    return label("Overflow", select, help(sentence));
  }

  box(trait, name, sentence) {
    const input = element("input", {
      type: "checkbox",
      onchange: () => this.state.put({ [trait]: input.checked }),
    });
    this.updates.push(() => (input.checked = this.state.get(trait)));
    const box = element("label.tw-group", input, element("span", name));
    return sentence ? element("span.tw-group", box, help(sentence)) : box;
  }

  // A page has an address, which says what it shows; a widget has none.
  copier() {
    const { model } = this.state;
    if (!model.link) return null;
    const copy = async () => {
      try {
        await navigator.clipboard.writeText(model.link());
        node.textContent = "copied";
      } catch {
        prompt("The browser keeps the clipboard to itself; copy the link here:", model.link());
      }
      setTimeout(() => (node.textContent = "copy link"), 1500);
    };
    const node = button(".tw-copy", copy, { title: "a link to what is shown now" }, "copy link");
    return node;
  }

  presets() {
    const presets = this.state.sides[0].about.starts_with;
    const names = ["Go to \u2026", ...presets.map(({ name }) => name)];
    const select = this.select("go to", names, (n) => {
      select.selectedIndex = 0;
      if (n > 0) this.state.goTo(presets[n - 1]);
    });
    presets.forEach(({ note }, n) => (select.options[n + 1].title = note));
    return select;
  }
}
