// TTFT and TPOT of each request, and the throughput, since the page was opened.

import { Picture, count, margin, nice, seconds } from "./canvas.js";
import { byId, setText } from "./dom.js";
import { tpotOf } from "./requests.js";

const HEIGHT = 92;
const BOTTOM = 16; // height of the time axis, in pixels
const SPAN = 120; // seconds

export class Curves {
  #now = 0;
  #plotted = new Set(); // requests whose TTFT has a point
  #before = null; // the previous view

  constructor() {
    this.ttft = new Curve("ttft", "Time to first token", "prefill", seconds);
    this.tpot = new Curve("tpot", "Time per output token", "decode", seconds);
    this.throughput = new Curve("throughput", "Output tokens per second", "decode", count, true);
  }

  clear() {
    this.#plotted.clear();
    this.#before = null;
    for (const curve of [this.ttft, this.tpot, this.throughput]) curve.points = [];
  }

  show(view) {
    this.#now = view.now;
    for (const r of [...view.finished, ...view.running]) {
      if (r.first_token === null || this.#plotted.has(r.number)) continue;
      this.#plotted.add(r.number);
      this.ttft.points.push([r.first_token, r.first_token - r.arrival]);
    }
    for (const r of view.finished) {
      const value = tpotOf(r, r.finished);
      if (value !== null) this.tpot.points.push([r.finished, value]);
    }
    if (this.#before) {
      const passed = view.now - this.#before.now;
      const tokens = view.stats.delivered_tokens - this.#before.stats.delivered_tokens;
      if (passed > 0) this.throughput.points.push([view.now, tokens / passed]);
    }
    this.#before = view;
    for (const curve of [this.ttft, this.tpot, this.throughput]) curve.show(this.#now);
    if (this.#plotted.size > 5000) this.#plotted = new Set([...this.#plotted].slice(-1000));
  }
}

class Curve {
  points = []; // [time, value]
  #now = 0;
  #left = 0; // start of the time axis, in pixels

  constructor(id, title, colour, write, joined = false) {
    Object.assign(this, { id, title, colour, write, joined });
    this.picture = new Picture(byId(id), {
      height: HEIGHT,
      draw: (pen, width, colours) => this.#draw(pen, width, colours),
      at: (x) => this.#at(x),
    });
  }

  show(now) {
    this.#now = now;
    this.points = this.points.filter(([time]) => time > now - SPAN);
    const values = this.points.map(([, value]) => value).sort((a, b) => a - b);
    const words = values.length
      ? this.joined
        ? `${this.write(this.points.at(-1)[1])} tokens/s`
        : `median ${this.write(values[Math.floor(values.length / 2)])}`
      : "nothing yet";
    setText(byId(`${this.id}-words`), words);
    this.picture.say(`${this.title}, the last ${SPAN} seconds: ${words}`);
    this.picture.paint();
  }

  #place(width) {
    return (time) => this.#left + (1 - (this.#now - time) / SPAN) * (width - this.#left - 4);
  }

  #draw(pen, width, colours) {
    const top = nice(Math.max(1e-4, ...this.points.map(([, value]) => value)));
    const left = (this.#left = margin(pen, [this.write(top)]));
    const base = HEIGHT - BOTTOM;
    const place = this.#place(width);
    const rise = (value) => base - (value / top) * (base - 8);
    pen.textAlign = "right";
    for (const value of [0, top / 2, top]) {
      pen.fillStyle = value ? colours.faint : colours.line;
      pen.fillRect(left, Math.round(rise(value)), width - left, 1);
      pen.fillStyle = colours.soft;
      if (value !== top / 2) pen.fillText(value ? this.write(value) : "0", left - 6, rise(value));
    }
    pen.textAlign = "left";
    pen.fillText(`−${SPAN} s`, left, HEIGHT - 6);
    pen.textAlign = "right";
    pen.fillText("now", width, HEIGHT - 6);
    const colour = colours[this.colour];
    if (this.joined) this.#line(pen, place, rise, base, colour);
    else this.#dots(pen, place, rise, colour);
  }

  #line(pen, place, rise, base, colour) {
    if (!this.points.length) return;
    pen.beginPath();
    this.points.forEach(([time, value], i) => pen[i ? "lineTo" : "moveTo"](place(time), rise(value)));
    pen.strokeStyle = colour;
    pen.lineWidth = 1.5;
    pen.stroke();
    pen.lineTo(place(this.points.at(-1)[0]), base);
    pen.lineTo(place(this.points[0][0]), base);
    pen.globalAlpha = 0.12;
    pen.fillStyle = colour;
    pen.fill();
    pen.globalAlpha = 1;
  }

  #dots(pen, place, rise, colour) {
    pen.fillStyle = colour;
    pen.globalAlpha = 0.75;
    for (const [time, value] of this.points) {
      pen.beginPath();
      pen.arc(place(time), rise(value), 2.2, 0, 2 * Math.PI);
      pen.fill();
    }
    pen.globalAlpha = 1;
  }

  #at(x) {
    const place = this.#place(this.picture.canvas.clientWidth);
    let best = null;
    for (const point of this.points) {
      const away = Math.abs(place(point[0]) - x);
      if (away < 8 && (!best || away < best.away)) best = { away, point };
    }
    return best && `${this.write(best.point[1])}${this.joined ? " tokens/s" : ""}, ${seconds(this.#now - best.point[0])} ago`;
  }
}
