// The boxes for texts that are run as they are typed, if there is a model.

import { element } from "./elements.js";

const WAIT = 350; // ms without a key before the text is run

export class Typing {
  constructor(view) {
    this.view = view;
    this.state = view.state;
    const texts = this.state.get("runs") ? this.state.get("texts") : [];
    const oninput = () => {
      this.stop();
      this.timer = setTimeout(() => this.send(), WAIT);
    };
    const placeholder = "Type a text; it is run at once.";
    const about = { rows: "2", spellcheck: "false", dir: "auto", "aria-label": "text to run" };
    this.boxes = texts.map(() => element("textarea.tw-type", { ...about, placeholder, oninput }));
    this.messages = texts.map(() => element("span.tw-state", { role: "status" }));
    this.nodes = this.boxes.map((box, n) => element("div.tw-typing", box, this.messages[n]));
  }

  stop() {
    clearTimeout(this.timer);
  }

  // One run at a time: what is typed meanwhile waits for its end.
  send() {
    const texts = this.boxes.map((box) => box.value);
    if (JSON.stringify(texts) === JSON.stringify(this.state.get("texts"))) return;
    this.waiting = this.state.get("busy");
    if (!this.waiting) this.state.put({ texts, busy: true });
  }

  // Texts that Python set; never over what is being typed.
  showTexts() {
    this.boxes.forEach((box, n) => {
      if (box !== this.view.active()) box.value = this.state.get("texts")[n] ?? "";
    });
  }

  showMessages() {
    const busy = this.state.get("busy");
    const error = this.state.get("error");
    this.view.root.classList.toggle("tw-busy", busy);
    for (const message of this.messages) {
      message.textContent = busy ? "running \u2026" : error;
      message.classList.toggle("tw-error", !busy && error !== "");
    }
    if (!busy && this.waiting) {
      this.waiting = false;
      this.send();
    }
  }
}
