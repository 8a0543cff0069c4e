// A conversation is a tree: edited messages and further answers are siblings of the first, and one of
// them is shown. A message is { role, text, end, figures, next, shown }: `end` says why an answer ended early,
// `next` holds the messages that follow, and `shown` is the index of the one shown.

const TITLE = 60; // characters

const message = (role, text) => ({ role, text, end: "", figures: "", next: [], shown: 0 });

export class Conversation {
  constructor(id = newId(), at = Date.now(), root = message("root", "")) {
    Object.assign(this, { id, at, root });
  }

  // Returns the conversation that `toJSON` wrote, or null if `json` is invalid.
  static read(json) {
    try {
      const { id, at, root } = JSON.parse(json);
      return typeof id === "string" && Number.isFinite(at) ? new Conversation(id, at, restored(root, "root")) : null;
    } catch {
      return null;
    }
  }

  toJSON() {
    return { id: this.id, at: this.at, root: this.root };
  }

  get title() {
    const text = this.root.next[this.root.shown]?.text.trim().replace(/\s+/g, " ") ?? "";
    return text.length > TITLE ? `${text.slice(0, TITLE - 1)}…` : text;
  }

  // The shown messages, first to last.
  path() {
    const shown = [];
    let last = this.root;
    while ((last = last.next[last.shown])) shown.push(last);
    return shown;
  }

  // The shown messages before one.
  before(wanted) {
    const path = this.path();
    return path.slice(0, path.indexOf(wanted));
  }

  parentOf(wanted) {
    return this.before(wanted).at(-1) ?? this.root;
  }

  get last() {
    return this.path().at(-1) ?? this.root;
  }

  // Adds a message after `parent`, and shows it.
  add(parent, role, text = "") {
    const added = message(role, text);
    parent.shown = parent.next.push(added) - 1;
    this.at = Date.now();
    return added;
  }

  // Removes a message, and shows the one at index `shown` of the rest.
  remove(parent, removed, shown) {
    parent.next = parent.next.filter((one) => one !== removed);
    parent.shown = Math.max(0, Math.min(shown, parent.next.length - 1));
  }
}

function restored({ role, text, end, figures, next, shown }, wanted) {
  if (role !== wanted || ![text, end, figures].every((one) => typeof one === "string")) throw new TypeError("no message");
  const follows = wanted === "user" ? "assistant" : "user";
  const messages = next.map((one) => restored(one, follows));
  return { role, text, end, figures, next: messages, shown: messages[shown] ? shown : 0 };
}

// Browsers offer crypto.randomUUID only over HTTPS and on localhost.
const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
