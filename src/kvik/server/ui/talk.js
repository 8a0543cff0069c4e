// Chat and completion: what is asked, the stream of the answer, and how it ends.

import { Answer, following, tokensOf } from "./answer.js";
import { byId, make, setText } from "./dom.js";

const REASONS = { length: "cut at the length limit" }; // "stop" is how answers should end

export class Talk {
  #api;
  #params;
  #model = "";
  #messages = [];
  #running = null; // an AbortController

  constructor(api, params) {
    this.#api = api;
    this.#params = params;
    byId("chat-form").addEventListener("submit", (event) => this.#submit(event, () => this.#chat()));
    byId("completion-form").addEventListener("submit", (event) => this.#submit(event, () => this.#complete()));
    byId("stop-chat").addEventListener("click", () => this.#running?.abort());
    byId("stop-completion").addEventListener("click", () => this.#running?.abort());
    byId("clear").addEventListener("click", () => this.#clear());
    sends("say", "chat-form", (event) => !event.shiftKey);
    sends("prompt", "completion-form", (event) => event.ctrlKey || event.metaKey);
  }

  set model(name) {
    this.#model = name;
  }

  #submit(event, ask) {
    event.preventDefault();
    if (!this.#running) ask();
  }

  async #chat() {
    const said = byId("say").value.trim();
    const fields = this.#params.read("chat");
    if (!said || !fields) return;
    byId("say").value = "";
    const system = byId("system").value.trim();
    const messages = [...this.#messages, { role: "user", content: said }];
    const body = { messages: system ? [{ role: "system", content: system }, ...messages] : messages };
    const log = byId("messages");
    const asked = bubble(log, "user", "You", said);
    log.scrollTop = log.scrollHeight;
    const add = (index) => new Answer(bubble(log, "assistant", index ? `Model, answer ${index + 1}` : "Model"));
    const answers = await this.#run("v1/chat/completions", { ...body, ...fields }, log, add, (choice) => choice.delta?.content);
    if (answers[0]?.text) {
      this.#messages = [...messages, { role: "assistant", content: answers[0].text }];
    } else if (!answers.length) {
      asked.remove(); // nothing came: it may be asked again
      byId("say").value ||= said;
    }
  }

  async #complete() {
    const prompt = byId("prompt").value;
    const fields = this.#params.read("completion");
    if (!prompt || !fields) return;
    const log = byId("completions");
    log.replaceChildren();
    const add = () => {
      const box = make("div", { className: "answer" }, make("span", { className: "given", textContent: prompt }));
      log.append(box);
      return new Answer(box);
    };
    await this.#run("v1/completions", { prompt, ...fields }, log, add, (choice) => choice.text);
  }

  // Streams one request; returns its answers by index, empty if none began.
  async #run(path, fields, log, add, textOf) {
    const running = (this.#running = new AbortController());
    const answers = [];
    const began = performance.now();
    let first = null;
    let usage = null;
    this.#busy(true, log);
    const body = { model: this.#model, stream: true, stream_options: { include_usage: true }, ...fields };
    try {
      for await (const event of this.#api.stream(path, body, running.signal)) {
        usage = event.usage ?? usage;
        for (const choice of event.choices ?? []) {
          const text = textOf(choice) ?? "";
          if (text) first ??= performance.now();
          following(log, () => {
            const answer = (answers[choice.index] ??= add(choice.index));
            answer.add(text, tokensOf(choice));
            if (REASONS[choice.finish_reason]) answer.end(REASONS[choice.finish_reason]);
          });
        }
      }
    } catch (error) {
      if (running.signal.aborted) following(log, () => answers.forEach((answer) => answer.end("stopped")));
      else this.#fail(error.message);
    } finally {
      this.#running = null;
      this.#busy(false, log);
      setText(byId("figures"), figures(began, first, usage));
    }
    return answers;
  }

  #busy(on, log) {
    log.setAttribute("aria-busy", String(on)); // read out when it is whole
    for (const id of ["send", "complete", "clear"]) byId(id).disabled = on;
    for (const id of ["stop-chat", "stop-completion"]) byId(id).disabled = !on;
    if (on) byId("error").hidden = true;
  }

  #fail(text) {
    const box = byId("error");
    box.hidden = false;
    setText(box, text);
  }

  #clear() {
    this.#messages = [];
    byId("messages").replaceChildren();
    byId("completions").replaceChildren();
    byId("error").hidden = true;
    setText(byId("figures"), "");
  }
}

function bubble(log, role, who, text = "") {
  const item = make("li", { className: role }, make("span", { className: "who", textContent: who }), text);
  log.append(item);
  return item;
}

function sends(field, form, when) {
  byId(field).addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing || !when(event)) return;
    event.preventDefault();
    byId(form).requestSubmit();
  });
}

function figures(began, first, usage) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} prompt tokens${cached ? ` (${cached} cached)` : ""}`);
    parts.push(`${usage.completion_tokens} output tokens`);
  }
  if (first !== null) {
    parts.push(`first text after ${Math.round(first - began)} ms`);
    const seconds = (performance.now() - first) / 1000;
    if (usage?.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  }
  return parts.join(" · ");
}
