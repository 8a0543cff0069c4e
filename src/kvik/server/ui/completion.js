// Completion: a prompt and its continuations.

import { byId, make, sends, setText } from "./dom.js";
import { ENDS, Generation } from "./generation.js";
import { coloured, shadesLegend, tokensOf } from "./tokens.js";

export class Completion {
  #running = null; // a Generation

  constructor({ api, params, model }) {
    Object.assign(this, { api, params, model });
    byId("completion-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.#running) this.#complete();
    });
    sends(byId("prompt"), (event) => event.ctrlKey || event.metaKey, () => byId("completion-form").requestSubmit());
    byId("stop-completion").addEventListener("click", () => this.stop());
  }

  // Returns whether there was something to stop.
  stop() {
    this.#running?.stop();
    return Boolean(this.#running);
  }

  async #complete() {
    const prompt = byId("prompt").value;
    const fields = this.params.read("completion");
    if (!prompt || !fields) return;
    const list = byId("completions");
    list.replaceChildren();
    const boxes = [];
    const box = (index) => {
      if (!boxes[index]) {
        const body = make("span");
        const given = make("span", { className: "given", textContent: prompt });
        boxes[index] = { body, element: make("div", { className: "answer" }, given, body) };
        list.append(boxes[index].element);
      }
      return boxes[index];
    };
    const ends = (at, text) => at.element.append(make("span", { className: "end", textContent: text }));
    const generation = (this.#running = new Generation(this.api, "v1/completions", { model: this.model.name, prompt, ...fields }));
    this.#busy(true);
    try {
      for await (const choice of generation.choices()) {
        const at = box(choice.index);
        const tokens = tokensOf(choice);
        if (tokens.length) at.body.append(...tokens.map(coloured));
        else if (choice.text) at.body.append(choice.text);
        if (ENDS[choice.finish_reason]) ends(at, ENDS[choice.finish_reason]);
      }
    } catch (error) {
      if (generation.stopped) boxes.forEach((at) => ends(at, ENDS.stopped));
      else this.#fail(error.message);
    } finally {
      this.#running = null;
      this.#busy(false);
      if (fields.logprobs && boxes.length) list.append(shadesLegend());
      setText(byId("figures"), generation.figures(this.model.context));
    }
  }

  #busy(on) {
    byId("completions").setAttribute("aria-busy", String(on)); // screen readers read complete answers
    byId("complete").disabled = on;
    byId("stop-completion").disabled = !on;
    if (on) this.#fail("");
  }

  #fail(text) {
    byId("completion-error").hidden = !text;
    setText(byId("completion-error"), text);
  }
}
