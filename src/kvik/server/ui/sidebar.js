// The list of stored conversations: open, delete and undo.

import { byId, iconButton, make, setText } from "./dom.js";

const UNDO_SECONDS = 8;
const NOTES = {
  true: "Kept in this browser only.",
  false: "This browser's storage is full or disabled: the last change is lost on reload.",
};

export class Sidebar {
  #deleted = [];
  #timer = 0;

  // `open(id)` shows a conversation, "" a new one; `forget(id)` is called after deletion.
  constructor(store, { open, forget }) {
    Object.assign(this, { store, open, forget });
    byId("new").addEventListener("click", () => open(""));
    byId("delete-all").addEventListener("click", () => this.#delete(store.conversations));
    byId("undo").addEventListener("click", () => this.#undo());
  }

  // Updates the list. `id`: the conversation on the page; `kept`: whether the last change survives a
  // reload.
  show(id, kept) {
    this.id = id;
    const conversations = this.store.conversations;
    byId("conversations").replaceChildren(...conversations.map((one) => this.#row(one)));
    byId("delete-all").hidden = !conversations.length;
    if (kept !== undefined) setText(byId("history-note"), NOTES[kept]);
  }

  #row(conversation) {
    const { id, title, at } = conversation;
    const link = make("a", { href: `#${id}`, title }, make("span", { textContent: title }), make("time", { textContent: when(at) }));
    if (id === this.id) link.setAttribute("aria-current", "page");
    link.addEventListener("click", (event) => {
      event.preventDefault();
      this.open(id);
    });
    return make("li", {}, link, iconButton("bin", `Delete: ${title}`, () => this.#delete([conversation])));
  }

  #delete(conversations) {
    this.#deleted = conversations;
    for (const { id } of conversations) {
      this.store.delete(id);
      this.forget(id);
    }
    this.show(this.id);
    if (conversations.some(({ id }) => id === this.id)) this.open("");
    this.#toast(conversations.length === 1 ? "Conversation deleted." : `${conversations.length} conversations deleted.`);
  }

  #undo() {
    const kept = this.#deleted.map((conversation) => this.store.save(conversation));
    this.show(this.id, kept.every(Boolean));
    byId("toast").hidden = true;
  }

  #toast(text) {
    setText(byId("toast-words"), text);
    byId("toast").hidden = false;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => (byId("toast").hidden = true), UNDO_SECONDS * 1000);
  }
}

function when(at) {
  const date = new Date(at);
  const today = date.toDateString() === new Date().toDateString();
  const parts = today ? { hour: "2-digit", minute: "2-digit" } : { day: "numeric", month: "short" };
  return date.toLocaleString("en-GB", parts);
}
