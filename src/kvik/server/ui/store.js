// Conversations (a bounded number) and settings in the browser's storage. It may be disabled, full, or
// changed by another page of this server; nothing here throws in these cases.

import { Conversation } from "./conversation.js";

const CONVERSATION = "kvik.conversation.";
const SETTING = "kvik.setting.";
const MAX_CONVERSATIONS = 100;
const MAX_CHARACTERS = 2_000_000; // of all conversations; browsers allow about 5 million

export class Store {
  #conversations = new Map(); // id -> Conversation, stored or not
  #sizes = new Map(); // id -> characters, if stored
  #storage = null;

  // `changed(id)`: another page wrote or deleted this conversation.
  constructor(changed) {
    try {
      this.#storage = window.localStorage;
      for (const key of Object.keys(this.#storage)) if (key.startsWith(CONVERSATION)) this.#load(key);
    } catch {
      this.#storage = null; // disabled
    }
    window.addEventListener("storage", ({ key }) => {
      if (!key?.startsWith(CONVERSATION)) return;
      this.#load(key);
      changed(key.slice(CONVERSATION.length));
    });
  }

  // Newest first.
  get conversations() {
    return [...this.#conversations.values()].sort((a, b) => b.at - a.at);
  }

  get(id) {
    return this.#conversations.get(id) ?? null;
  }

  // Deletes the oldest others if needed; returns whether the conversation survives a reload.
  save(conversation) {
    const { id } = conversation;
    const json = JSON.stringify(conversation);
    this.#conversations.set(id, conversation);
    if (json.length <= MAX_CHARACTERS) {
      this.#sizes.set(id, json.length);
      while (this.#sizes.size > MAX_CONVERSATIONS || this.#total > MAX_CHARACTERS) this.#dropOldest(id);
      const enough = this.#total - 2 * json.length; // below, other data fills the storage
      do {
        if (this.#write(CONVERSATION + id, json)) return true;
      } while (this.#total > enough && this.#dropOldest(id));
    }
    this.#sizes.delete(id);
    this.#erase(id); // a reload would bring back an older version
    return false;
  }

  delete(id) {
    this.#conversations.delete(id);
    this.#sizes.delete(id);
    this.#erase(id);
  }

  setting(name) {
    try {
      return JSON.parse(this.#storage.getItem(SETTING + name));
    } catch {
      return null;
    }
  }

  remember(name, value) {
    this.#write(SETTING + name, JSON.stringify(value));
  }

  #load(key) {
    const id = key.slice(CONVERSATION.length);
    const json = this.#storage.getItem(key);
    const read = json === null ? null : Conversation.read(json);
    if (read?.id === id) {
      this.#conversations.set(id, read);
      this.#sizes.set(id, json.length);
    } else {
      this.#conversations.delete(id);
      this.#sizes.delete(id);
    }
  }

  get #total() {
    return [...this.#sizes.values()].reduce((sum, size) => sum + size, 0);
  }

  #dropOldest(except) {
    const oldest = this.conversations.findLast((one) => one.id !== except && this.#sizes.has(one.id));
    if (oldest) this.delete(oldest.id);
    return Boolean(oldest);
  }

  #write(key, text) {
    try {
      this.#storage.setItem(key, text);
      return true;
    } catch {
      return false;
    }
  }

  #erase(id) {
    try {
      this.#storage.removeItem(CONVERSATION + id);
    } catch {
      // nothing was stored
    }
  }
}
