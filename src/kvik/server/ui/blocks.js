// The KV cache: a bar of the whole, and below it a map of the blocks used so far. Cells have the colour
// of the request that holds the block.

import { Picture, count, legend } from "./canvas.js";
import { byId, setText } from "./dom.js";

const STATES = ["free", "cached", "shared", "pinned"];
const MEANINGS = ["free", "free, cached content can be reused", "used by several requests", "pinned"];
const OWNED = STATES.length; // first value of cells that belong to one request
const HEIGHT = 150; // target height of the map, in pixels
const [SMALLEST, LARGEST] = [4, 16]; // side of a cell, in pixels
const FEWEST = 96; // cells shown at least
const [BAR, GAP] = [10, 8]; // pixels

export class Blocks {
  #map = null;
  #cells = new Uint16Array();
  #used = 0; // cells up to the last one ever in use
  #owners = [];

  // `colours`: RequestColours of the running requests.
  constructor(colours) {
    this.colours = colours;
    this.picture = new Picture(byId("blocks"), {
      height: (width) => {
        const { size, columns, shown } = this.#grid(width);
        return BAR + GAP + Math.ceil(Math.max(1, shown / columns)) * size;
      },
      draw: (pen, width, colour) => this.#draw(pen, width, colour),
      at: (x, y) => this.#at(x, y),
    });
  }

  clear() {
    this.#used = 0;
  }

  show(view) {
    this.#map = view.blocks;
    this.#owners = view.running.map((request) => request.number);
    const bytes = Uint8Array.from(atob(view.blocks.cells), (c) => c.charCodeAt(0));
    const data = new DataView(bytes.buffer);
    this.#cells = Uint16Array.from({ length: bytes.length / 2 }, (_, i) => data.getUint16(2 * i, true));
    this.#used = Math.max(this.#used, this.#cells.findLastIndex((cell) => cell !== 0) + 1);
    const { num_blocks: all, num_free: free, num_cached: cached } = view.blocks;
    const held = all - free;
    const words = `${count(held)} of ${count(all)} blocks used (${((100 * held) / all).toFixed(0)} %), ${count(cached)} cached`;
    setText(byId("blocks-words"), words);
    this.picture.say(`Map of KV blocks: ${words}`);
    this.picture.paint();
    this.#tell();
  }

  // The side of a cell and how many are shown: those used, and 10 % more to show where they end.
  #grid(width) {
    const wanted = Math.min(this.#cells.length, Math.max(FEWEST, Math.ceil(this.#used * 1.1)));
    const side = Math.sqrt((width * HEIGHT) / Math.max(1, wanted));
    const columns = Math.max(1, Math.floor(width / Math.max(SMALLEST, Math.min(LARGEST, side))));
    return { size: width / columns, columns, shown: Math.min(this.#cells.length, Math.ceil(wanted / columns) * columns) };
  }

  #colourOf(cell) {
    return STATES[cell] ?? this.colours.of(this.#owners[cell - OWNED]);
  }

  #draw(pen, width, colour) {
    this.#bar(pen, width, colour);
    const { size, columns, shown } = this.#grid(width);
    const top = BAR + GAP;
    for (let i = 0; i < shown; i++) {
      pen.fillStyle = colour[this.#colourOf(this.#cells[i])];
      const [column, row] = [i % columns, Math.floor(i / columns)];
      const [x, y] = [Math.round(column * size), Math.round(top + row * size)];
      const [right, bottom] = [Math.round((column + 1) * size), Math.round(top + (row + 1) * size)];
      pen.fillRect(x, y, right - x - 1, bottom - y - 1);
    }
  }

  // Draws the share of each colour in the whole cache.
  #bar(pen, width, colour) {
    const counts = new Map();
    for (const cell of this.#cells) {
      const name = this.#colourOf(cell);
      counts.set(name, (counts.get(name) ?? 0) + 1);
    }
    const free = counts.get("free") ?? 0;
    counts.delete("free");
    pen.fillStyle = colour.free;
    pen.fillRect(0, 0, width, BAR);
    let x = 0;
    const last = ["shared", "pinned", "cached"];
    const names = [...[...counts.keys()].filter((name) => !last.includes(name)).sort(), ...last];
    for (const name of names.filter((one) => counts.has(one))) {
      const part = Math.max(free ? 1 : 0, (counts.get(name) / this.#cells.length) * width);
      pen.fillStyle = colour[name];
      pen.fillRect(x, 0, part, BAR);
      x += part;
    }
  }

  #at(x, y) {
    const { size, columns, shown } = this.#grid(this.picture.canvas.clientWidth);
    const column = Math.floor(x / size);
    const i = Math.floor((y - BAR - GAP) / size) * columns + column;
    if (y < BAR) return "the whole cache";
    if (y < BAR + GAP || column >= columns || i >= shown) return null;
    const cell = this.#cells[i];
    const first = i * this.#map.blocks_per_cell + 1;
    const last = Math.min(first + this.#map.blocks_per_cell - 1, this.#map.num_blocks);
    const name = first === last ? `block ${first}` : `blocks ${first}–${last}`;
    return `${name}: ${cell < OWNED ? MEANINGS[cell] : `request ${this.#owners[cell - OWNED]}`}`;
  }

  // Describes the part of the cache that is shown, and the colours.
  #tell() {
    const { num_blocks: all, blocks_per_cell: each } = this.#map;
    const { shown } = this.#grid(this.picture.canvas.clientWidth);
    const parts = [];
    if (shown < this.#cells.length) parts.push(`The first ${count(shown * each)} of ${count(all)} blocks; the rest has not been used yet.`);
    if (each > 1) parts.push(`Each cell is ${each} blocks.`);
    setText(byId("blocks-part"), parts.join(" "));
    const named = this.#owners.filter((number) => this.colours.of(number) !== "others");
    const others = this.#owners.length - named.length;
    legend(byId("blocks-legend"), [
      ...STATES.map((name) => [name, name]),
      ...named.map((number) => [this.colours.of(number), `request ${number}`]),
      ...(others ? [["others", `${others} more requests`]] : []),
    ]);
  }
}
