// The boxes for texts that are run as they are typed, where there is a model.

import { element } from "./elements.js";

const WAIT = 350; // ms without a key before the text is run

export class Typing {
  constructor(view) {
    this.view = view;
    this.state = view.state;
    this.boxes = [];
    this.messages = [];
    this.nodes = this.state.get("runs") ? this.state.get("texts").map(() => this.build()) : [];
  }

  build() {
    const box = element("textarea.tw-type", {
      rows: "2",
      spellcheck: "false",
      placeholder: "Type a text; it is run at once.",
      dir: "auto",
      "aria-label": "text to run",
      oninput: () => {
        this.stop();
        this.timer = setTimeout(() => this.send(), WAIT);
      },
    });
    const message = element("span.tw-state", { role: "status" });
    this.boxes.push(box);
    this.messages.push(message);
    return element("div.tw-typing", box, message);
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
