// The boxes for texts that are run as they are typed, if there is a model.

import { element } from "./elements.js";

const WAIT = 350; // ms without a key before the text is run

export class Typing {
  constructor(view) {
    this.view = view;
    this.state = view.state;
    const texts = this.state.get("runs") ? this.state.get("texts") : [];
    const oninput = () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.send(), WAIT);
    };
    const placeholder = "Type a text; it is run at once.";
    const about = { rows: "2", spellcheck: "false", dir: "auto", "aria-label": "text to run" };
    this.boxes = texts.map(() => element("textarea.tw-type", { ...about, placeholder, oninput }));
    this.message = element("div.tw-error", { role: "status" });
    this.nodes = [element("div.tw-typing", this.boxes), this.message];
  }

  // One run at a time: what is typed meanwhile waits for its end.
  send() {
    const texts = this.boxes.map((box) => box.value);
    if (JSON.stringify(texts) === JSON.stringify(this.state.get("texts"))) return;
    this.waiting = this.state.get("busy");
    if (!this.waiting) this.state.put({ texts, busy: true });
  }

  // Texts that Python set, never over what is being typed; and how the run goes.
  show() {
    this.boxes.forEach((box, n) => {
      if (box !== this.view.active()) box.value = this.state.get("texts")[n] ?? "";
    });
    const busy = this.state.get("busy");
    this.view.root.classList.toggle("tw-busy", busy);
    this.message.textContent = this.state.get("error");
    if (!busy && this.waiting) this.send();
  }
}
