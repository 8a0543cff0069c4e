// The map of KV blocks: a cell for each, coloured by the request that holds it.

import { Picture, colourOf, count, legend } from "./canvas.js";
import { byId, setText } from "./dom.js";

const STATES = ["free", "cached", "shared", "pinned"];
const OWNED = STATES.length;
const HEIGHT = 150; // pixels that the cells aim at
const SHOWN_OWNERS = 8;

export class Blocks {
  #map = null;
  #cells = new Uint16Array();
  #owners = [];
  #key = "";

  constructor() {
    this.picture = new Picture(byId("blocks"), {
      height: (width) => {
        const { size, columns } = this.#grid(width);
        return Math.max(size, Math.ceil(this.#cells.length / columns) * size);
      },
      draw: (pen, width, colour) => this.#draw(pen, width, colour),
      at: (x, y) => this.#at(x, y),
    });
    window
      .matchMedia("(prefers-color-scheme: dark)")
      .addEventListener("change", () => this.#legend());
  }

  show(view) {
    this.#map = view.blocks;
    this.#owners = view.running.map((request) => request.number);
    const bytes = Uint8Array.from(atob(view.blocks.cells), (c) => c.charCodeAt(0));
    const data = new DataView(bytes.buffer);
    this.#cells = Uint16Array.from({ length: bytes.length / 2 }, (_, i) => data.getUint16(2 * i, true));
    const { num_blocks: all, num_free: free, num_cached: cached, blocks_per_cell: each } = view.blocks;
    const held = all - free;
    const words =
      `${count(held)} of ${count(all)} held (${((100 * held) / all).toFixed(0)} %), ${count(cached)} with content to match` +
      (each > 1 ? `; a cell is ${each} blocks` : "");
    setText(byId("blocks-words"), words);
    this.picture.say(`Map of KV blocks: ${words}`);
    this.picture.paint();
    this.#legend();
  }

  #grid(width) {
    const room = Math.sqrt((width * HEIGHT) / Math.max(1, this.#cells.length));
    const size = Math.max(3, Math.min(14, Math.floor(room)));
    return { size, columns: Math.max(1, Math.floor(width / size)) };
  }

  #draw(pen, width, colour) {
    const { size, columns } = this.#grid(width);
    const side = size > 4 ? size - 1 : size;
    const palette = [...STATES.map((name) => colour[name]), ...this.#owners.map(colourOf)];
    this.#cells.forEach((cell, i) => {
      pen.fillStyle = palette[cell] ?? colour.pinned;
      pen.fillRect((i % columns) * size, Math.floor(i / columns) * size, side, side);
    });
  }

  #at(x, y) {
    const { size, columns } = this.#grid(this.picture.canvas.clientWidth);
    const column = Math.floor(x / size);
    const i = Math.floor(y / size) * columns + column;
    if (column >= columns || i >= this.#cells.length) return null;
    const cell = this.#cells[i];
    const first = i * this.#map.blocks_per_cell + 1;
    const last = Math.min(first + this.#map.blocks_per_cell - 1, this.#map.num_blocks);
    const name = first === last ? `block ${first}` : `blocks ${first}–${last}`;
    return `${name}: ${cell < OWNED ? STATES[cell] : `request ${this.#owners[cell - OWNED]}`}`;
  }

  #legend() {
    const key = `${this.#owners.slice(0, SHOWN_OWNERS + 1)}`;
    const scheme = getComputedStyle(document.documentElement);
    if (this.#key === key + scheme.getPropertyValue("--free")) return;
    this.#key = key + scheme.getPropertyValue("--free");
    const fixed = STATES.map((name) => [scheme.getPropertyValue(`--${name}`), name]);
    const owners = this.#owners.slice(0, SHOWN_OWNERS).map((n) => [colourOf(n), `request ${n}`]);
    const rest = this.#owners.length - owners.length;
    legend(byId("blocks-legend"), [...fixed, ...owners, ...(rest > 0 ? [["transparent", `and ${rest} more`]] : [])]);
  }
}
