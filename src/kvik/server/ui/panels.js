// The panels next to the chat: conversations on the left, the engine on the right. In a wide window they
// are columns, and the browser remembers which are open; otherwise an open panel covers the chat.

import { byId } from "./dom.js";

export class Panel {
  static #all = [];

  // `wide`: the media query for windows in which the panel is a column.
  constructor(name, wide, store) {
    this.name = name;
    this.element = byId(name);
    this.button = byId(`toggle-${name}`);
    this.wide = window.matchMedia(wide);
    this.store = store;
    Panel.#all.push(this);
    this.button.addEventListener("click", () => this.#toggle());
    document.addEventListener("click", ({ target }) => {
      const outside = !this.element.contains(target) && !this.button.contains(target) && target.isConnected;
      if (outside && !this.wide.matches) this.open = false;
    });
    this.wide.addEventListener("change", () => this.#begin());
    this.#begin();
  }

  // Closes the panel that covers the chat; returns whether there was one.
  static uncover() {
    const covering = Panel.#all.filter((panel) => panel.open && !panel.wide.matches);
    for (const panel of covering) {
      panel.open = false;
      panel.button.focus();
    }
    return covering.length > 0;
  }

  get open() {
    return !this.element.hidden;
  }

  set open(on) {
    this.element.hidden = !on;
    this.button.setAttribute("aria-expanded", String(on));
  }

  #begin() {
    this.open = this.wide.matches && this.store.setting(this.name) !== false;
  }

  #toggle() {
    const on = !this.open;
    if (this.wide.matches) this.store.remember(this.name, on);
    else Panel.uncover();
    this.open = on;
    if (on && !this.wide.matches) this.element.querySelector("button, [tabindex]")?.focus();
  }
}
