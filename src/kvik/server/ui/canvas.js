// Shared by all drawings: device pixels, the page's colours, tooltips, and number formats.

import { make } from "./dom.js";

export class Picture {
  // `draw(pen, width, colours)` paints; `at(x, y)` returns the text of the tooltip, or null.
  constructor(canvas, { height, draw, at = () => null }) {
    this.canvas = canvas;
    this.height = height;
    this.draw = draw;
    this.pen = canvas.getContext("2d");
    this.tip = make("div", { className: "tip", hidden: true });
    canvas.parentElement.append(this.tip);
    new ResizeObserver(() => this.paint()).observe(canvas.parentElement);
    dark.addEventListener("change", () => this.paint());
    canvas.addEventListener("pointermove", (event) => this.#show(event, at));
    canvas.addEventListener("pointerdown", (event) => this.#show(event, at));
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
  }

  paint() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const height = typeof this.height === "function" ? this.height(width) : this.height;
    const scale = window.devicePixelRatio || 1;
    const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      Object.assign(this.canvas, { width: w, height: h });
      this.canvas.style.height = `${height}px`;
    }
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    this.pen.clearRect(0, 0, width, height);
    this.pen.font = `11px ${getComputedStyle(this.canvas).fontFamily}`;
    this.pen.textBaseline = "middle";
    this.draw(this.pen, width, colours());
  }

  say(words) {
    if (this.canvas.getAttribute("aria-label") !== words) this.canvas.setAttribute("aria-label", words);
  }

  #show(event, at) {
    const text = at(event.offsetX, event.offsetY);
    this.tip.hidden = text === null;
    if (text === null) return;
    this.tip.textContent = text;
    const room = this.canvas.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(event.offsetX + 12, room))}px`;
    this.tip.style.top = `${event.offsetY + 14}px`;
  }
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");

const NAMES = (
  "card ink soft line faint free cached shared pinned queued prefill decode preempted " +
  "request0 request1 request2 request3 request4 request5 others"
).split(" ");

export function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// Assigns colour names to running requests. A request keeps its colour while it runs; when all are
// taken, the other requests share one.
export class RequestColours {
  #numbers = new Array(6).fill(null); // requests with colours request0, request1, ...

  update(running) {
    const present = new Set(running.map((request) => request.number));
    this.#numbers = this.#numbers.map((number) => (present.has(number) ? number : null));
    for (const number of present) {
      const free = this.#numbers.indexOf(null);
      if (free < 0) return;
      if (!this.#numbers.includes(number)) this.#numbers[free] = number;
    }
  }

  of(number) {
    const place = this.#numbers.indexOf(number);
    return place < 0 ? "others" : `request${place}`;
  }
}

// Fills a legend with [name of the colour, label] entries.
export function legend(list, entries) {
  const key = JSON.stringify(entries);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(
    ...entries.map(([colour, label]) => {
      const swatch = make("span", { className: "swatch" });
      swatch.style.background = `var(--${colour})`;
      return make("li", {}, swatch, label);
    }),
  );
}

// The width of the labels left of an axis, in pixels.
export function margin(pen, labels) {
  return Math.ceil(Math.max(...labels.map((label) => pen.measureText(label).width))) + 8;
}

export function nice(limit) {
  // The least of 1, 2, 5, 10, 20, ... that is at least `limit`.
  const power = 10 ** Math.floor(Math.log10(limit));
  return [1, 2, 5, 10].map((step) => step * power).find((value) => value >= limit * 0.9999);
}

export const count = (value) => Math.round(value).toLocaleString("en");

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 0.9995) return `${(value * 1000).toFixed(0)} ms`;
  return value < 9.995 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}
