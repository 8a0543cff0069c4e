// A message on the page, with its buttons.

import { copyText, fit, icon, iconButton, make, sends, setText } from "./dom.js";
import { Prose } from "./prose.js";
import { coloured, shadesLegend } from "./tokens.js";

const [OPEN, CLOSE] = ["<think>", "</think>"];

// The parts of an answer: reasoning before </think>, if any, and the rest. With some templates the
// prompt opens the reasoning, so that the answer only closes it.
export function partsOf(text) {
  const began = text.trimStart().startsWith(OPEN);
  const end = text.indexOf(CLOSE);
  if (!began && end < 0) return { thought: "", said: text };
  const from = began ? text.indexOf(OPEN) + OPEN.length : 0;
  if (end < 0) return { thought: text.slice(from), said: "" };
  return { thought: text.slice(from, end).trim(), said: text.slice(end + CLOSE.length).trimStart() };
}

// Appends a delta to an answer. Reasoning in its own field is stored between the marks above.
export function grow(answer, { content, reasoning_content: thought }) {
  if (thought) {
    answer.text += (answer.thinks ? "" : OPEN) + thought;
    answer.thinks = true;
  }
  if (content) {
    answer.text += (answer.thinks ? CLOSE : "") + content;
    answer.thinks = false;
  }
}

export class MessageView {
  #body = make("div", { className: "body" });
  #thought = null; // the Prose of the reasoning
  #said = null; // the Prose of the answer
  #numTokens = 0;
  #end = make("p", { className: "end", hidden: true });
  #figures = make("span", { className: "note", title: "Tokens: prompt + answer" });
  #versions = make("span", { className: "versions", hidden: true });

  // `does`: { step(by), again(), edit(text) }, the actions of the buttons. `tokens`: with probabilities,
  // if requested.
  constructor(message, does, tokens) {
    this.message = message;
    this.does = does;
    this.tokens = tokens;
    const copy = iconButton("copy", "Copy", () => this.#copy(copy));
    const own = message.role === "user";
    const act = own
      ? iconButton("edit", "Edit and resend", () => this.#edit())
      : iconButton("again", "Another answer", () => does.again());
    act.classList.add("act");
    this.tools = make("div", { className: "tools" }, this.#versions, copy, act, this.#figures);
    const who = make("span", { className: "unseen", textContent: own ? "You:" : "Model:" });
    this.element = make("li", { className: message.role }, who, this.#body, this.#end, this.tools);
    this.update();
  }

  update() {
    const { message, tokens } = this;
    if (message.role === "user") setText(this.#body, message.text);
    else if (tokens) this.#colour();
    else this.#write();
    setText(this.#end, message.end);
    this.#end.hidden = !message.end;
    setText(this.#figures, message.figures);
  }

  set running(on) {
    this.element.classList.toggle("running", on);
    this.tools.hidden = on;
  }

  // Shows that this is version `index` of `count`.
  place(index, count) {
    this.#versions.hidden = count < 2;
    if (this.#versions.textContent === `${index + 1} / ${count}`) return;
    const step = (symbol, label, by, possible) => {
      const button = iconButton(symbol, label, () => this.does.step(by));
      button.disabled = !possible;
      return button;
    };
    this.#versions.replaceChildren(
      step("left", "Previous version", -1, index > 0),
      `${index + 1} / ${count}`,
      step("right", "Next version", 1, index < count - 1),
    );
  }

  #write() {
    const { thought, said } = partsOf(this.message.text);
    if (thought && !this.#thought) {
      const text = make("div", { className: "prose" });
      this.#body.prepend(make("details", { className: "fold" }, make("summary", { textContent: "Reasoning" }), text));
      this.#thought = new Prose(text);
    }
    if (!this.#said) {
      const text = make("div", { className: "prose" });
      this.#body.append(text);
      this.#said = new Prose(text);
    }
    if (this.#thought) this.#thought.text = thought;
    this.#said.text = said;
  }

  #colour() {
    if (!this.#body.children.length) this.#body.append(make("div", { className: "tokens" }), shadesLegend());
    this.#body.firstChild.append(...this.tokens.slice(this.#numTokens).map(coloured));
    this.#numTokens = this.tokens.length;
  }

  async #copy(button) {
    const copied = await copyText(partsOf(this.message.text).said);
    button.replaceChildren(icon(copied ? "tick" : "cross"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  }

  #edit() {
    const area = make("textarea", { value: this.message.text, ariaLabel: "Message", rows: 1 });
    const cancel = make("button", { type: "button", textContent: "Cancel" });
    const send = make("button", { type: "submit", className: "primary", textContent: "Send" });
    const form = make("form", { className: "edit" }, area, make("div", { className: "row" }, cancel, send));
    const close = () => {
      form.replaceWith(this.#body);
      this.tools.hidden = false;
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = area.value.trim();
      if (text && this.does.edit(text)) close();
    });
    area.addEventListener("input", () => fit(area));
    area.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    });
    sends(area, (event) => !event.shiftKey, () => form.requestSubmit());
    cancel.addEventListener("click", close);
    this.#body.replaceWith(form);
    this.tools.hidden = true;
    fit(area);
    area.focus();
  }
}
