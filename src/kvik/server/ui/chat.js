// The chat: shows a conversation, sends messages and streams answers. Each conversation, shown or not,
// may have one running generation.

import { Conversation } from "./conversation.js";
import { byId, fit, sends, setText } from "./dom.js";
import { ENDS, Generation } from "./generation.js";
import { MessageView, grow, partsOf } from "./message.js";
import { tokensOf } from "./tokens.js";

const NEAR = 40; // a log scrolled to within this many pixels of its end follows the answer

export class Chat {
  #conversation = new Conversation();
  #views = new Map(); // message -> MessageView, for the conversation shown
  #tokens = new WeakMap(); // message -> tokens with their probabilities
  #running = new Map(); // conversation id -> { conversation, asked, generation, answers, ... }
  #log = byId("log");
  #say = byId("say");

  // `kept(conversation, saved)` is called after a change; `saved`: it survives a reload.
  constructor({ api, params, store, model, kept }) {
    Object.assign(this, { api, params, store, model, kept });
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    sends(this.#say, (event) => !event.shiftKey, () => byId("chat-form").requestSubmit());
    this.#say.addEventListener("input", () => this.#compose());
    byId("stop-chat").addEventListener("click", () => this.stop());
    byId("to-end").addEventListener("click", () => this.#toEnd());
    this.#log.addEventListener("scroll", () => this.#place(), { passive: true });
    window.addEventListener("pagehide", () => this.#running.forEach((one) => store.save(one.conversation)));
  }

  get id() {
    return this.#conversation.id;
  }

  // Whether an answer is being written in the conversation shown.
  get running() {
    return this.#running.has(this.id);
  }

  // Shows a conversation, by default a new one.
  open(conversation = new Conversation()) {
    this.#conversation = conversation;
    this.#views.clear();
    this.fail("");
    this.#show();
    this.#toEnd();
  }

  // Returns whether there was something to stop.
  stop() {
    const running = this.#running.get(this.id);
    running?.generation.stop();
    return Boolean(running);
  }

  // Stops the generation of a deleted conversation.
  forget(id) {
    const running = this.#running.get(id);
    if (!running) return;
    running.forgotten = true;
    running.generation.stop();
  }

  fail(text) {
    byId("error").hidden = !text;
    setText(byId("error"), text);
  }

  // -- sending -----------------------------------------------------------------------------------

  #send() {
    const text = this.#say.value.trim();
    if (!text || this.running) return;
    const conversation = this.#conversation;
    const { last } = conversation;
    // The last message has no answer if the page was closed before the first token.
    const parent = last.role === "user" ? conversation.parentOf(last) : last;
    if (!this.#ask(parent, text)) return;
    this.#say.value = "";
    this.#compose();
  }

  // Adds a message after `parent` and requests answers. Without any, moves its text back to the input.
  #ask(parent, text) {
    const fields = this.params.read("chat");
    if (!fields) return false;
    const conversation = this.#conversation;
    const { shown } = parent;
    const asked = conversation.add(parent, "user", text);
    this.#answer(asked, fields).then((came) => {
      if (came || conversation !== this.#conversation) return;
      conversation.remove(parent, asked, shown);
      this.#say.value ||= text;
      this.#show();
      this.#keep(conversation);
    });
    return true;
  }

  #again(answer) {
    const fields = this.params.read("chat");
    if (fields && !this.running) this.#answer(this.#conversation.parentOf(answer), fields);
  }

  // Streams the answers to a message; returns whether there are any.
  async #answer(asked, fields) {
    const conversation = this.#conversation;
    const { shown } = asked;
    const generation = this.#generation(asked, fields);
    const answers = new Map([[0, conversation.add(asked, "assistant")]]); // by choice index
    const running = { conversation, asked, generation, answers };
    this.#running.set(conversation.id, running);
    this.fail("");
    this.#keep(conversation);
    this.#show();
    this.#toEnd();
    let error = "";
    try {
      for await (const choice of generation.choices()) this.#take(running, choice);
    } catch (problem) {
      error = generation.stopped ? ENDS.stopped : problem.message;
    }
    this.#running.delete(conversation.id);
    if (running.forgotten) return true;
    const nothing = error && ![...answers.values()].some((answer) => answer.text);
    for (const answer of answers.values()) {
      answer.end ||= error;
      answer.figures = generation.figures(this.model.context);
      if (nothing) conversation.remove(asked, answer, shown);
    }
    this.#keep(conversation);
    if (conversation === this.#conversation) {
      this.#following(() => this.#show());
      if (error && !generation.stopped) this.fail(error);
    }
    return asked.next.length > 0;
  }

  #generation(asked, fields) {
    const messages = [...this.#conversation.before(asked), asked].map(({ role, text }) => ({
      role,
      content: role === "user" ? text : partsOf(text).said,
    }));
    const { system } = this.params;
    if (system) messages.unshift({ role: "system", content: system });
    return new Generation(this.api, "v1/chat/completions", { model: this.model.name, messages, ...fields });
  }

  #take(running, choice) {
    const { conversation, asked, answers } = running;
    if (!answers.has(choice.index)) {
      answers.set(choice.index, conversation.add(asked, "assistant"));
      asked.shown = asked.next.indexOf(answers.get(0));
    }
    const answer = answers.get(choice.index);
    grow(answer, choice.delta ?? {});
    answer.end = ENDS[choice.finish_reason] ?? answer.end;
    const tokens = tokensOf(choice);
    if (tokens.length && !this.#tokens.has(answer)) {
      this.#tokens.set(answer, []);
      this.#views.delete(answer); // the new view shows tokens
    }
    this.#tokens.get(answer)?.push(...tokens);
    if (running.painting) return;
    running.painting = true; // at most once per frame
    requestAnimationFrame(() => {
      running.painting = false;
      if (conversation === this.#conversation && this.running) this.#paint(answers);
    });
  }

  #keep(conversation) {
    if (conversation.root.next.length) this.kept(conversation, this.store.save(conversation));
    else {
      this.store.delete(conversation.id);
      this.kept(conversation, true);
    }
  }

  // -- display -----------------------------------------------------------------------------------

  // Shows the messages of the conversation, reusing existing views.
  #show() {
    const conversation = this.#conversation;
    const running = this.#running.get(conversation.id);
    const writing = [...(running?.answers.values() ?? [])];
    const path = conversation.path();
    let parent = conversation.root;
    const elements = path.map((message) => {
      const view = this.#view(message);
      view.running = writing.includes(message);
      view.place(parent.shown, parent.next.length);
      parent = message;
      return view.element;
    });
    const list = byId("messages");
    if (elements.length !== list.children.length || elements.some((element, i) => element !== list.children[i])) {
      list.replaceChildren(...elements);
    }
    byId("welcome").hidden = path.length > 0;
    list.setAttribute("aria-busy", String(Boolean(running))); // screen readers read complete answers
    this.#compose();
    this.#place();
  }

  #view(message) {
    const known = this.#views.get(message);
    if (known) {
      known.update();
      return known;
    }
    const does = {
      step: (by) => this.#step(message, by),
      again: () => this.#again(message),
      edit: (text) => !this.running && this.#ask(this.#conversation.parentOf(message), text),
    };
    const view = new MessageView(message, does, this.#tokens.get(message));
    this.#views.set(message, view);
    return view;
  }

  #paint(answers) {
    const shown = [...answers.values()].find((answer) => answer === this.#conversation.last);
    this.#following(() => {
      const view = this.#views.get(shown);
      if (view) view.update();
      else this.#show();
    });
  }

  #step(message, by) {
    if (this.running) return;
    this.#conversation.parentOf(message).shown += by;
    this.#keep(this.#conversation);
    this.#show();
  }

  #compose() {
    const { running } = this;
    fit(this.#say);
    byId("send").disabled = running || !this.#say.value.trim();
    byId("send").hidden = running;
    byId("stop-chat").hidden = !running;
  }

  // Changes the log, and scrolls to its end only if it was there before.
  #following(change) {
    const follow = this.#fromEnd < NEAR;
    change();
    if (follow) this.#toEnd();
    else this.#place();
  }

  get #fromEnd() {
    return this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight;
  }

  #toEnd() {
    this.#log.scrollTop = this.#log.scrollHeight;
    this.#place();
  }

  #place() {
    byId("to-end").hidden = this.#fromEnd < NEAR;
  }
}
