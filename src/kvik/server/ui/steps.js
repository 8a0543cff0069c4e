// The last steps, a bar each: prompt tokens upwards, decoded tokens downwards. Each has its own scale,
// since one prompt chunk has as many tokens as hundreds of decoding requests.

import { Picture, count, legend, margin, nice, seconds } from "./canvas.js";
import { byId, setText } from "./dom.js";

const HEIGHT = 132;
const MIDDLE = 78; // y of the baseline, in pixels

export class Steps {
  #steps = [];
  #left = 0; // x of the first bar, in pixels

  constructor(limit = 200) {
    this.limit = limit;
    this.picture = new Picture(byId("steps"), {
      height: HEIGHT,
      draw: (pen, width, colour) => this.#draw(pen, width, colour),
      at: (x) => this.#at(x),
    });
    legend(byId("steps-legend"), [
      ["prefill", "prefill tokens"],
      ["decode", "decode tokens"],
      ["preempted", "preemption"],
    ]);
  }

  clear() {
    this.#steps = [];
  }

  show(view) {
    const s = view.steps;
    s.ended.forEach((ended, i) =>
      this.#steps.push({
        number: s.first + i,
        ended,
        seconds: s.seconds[i],
        prefill: s.prefill_tokens[i],
        decode: s.decode_tokens[i],
        running: s.running[i],
        waiting: s.waiting[i],
        preemptions: s.preemptions[i],
      }),
    );
    this.#steps = this.#steps.slice(-this.limit);
    const last = this.#steps.at(-1);
    const words = last
      ? `step ${count(last.number)}: ${count(last.prefill)} prefill + ${count(last.decode)} decode tokens in ${seconds(last.seconds)}`
      : "none yet";
    setText(byId("steps-words"), words);
    this.picture.say(`Tokens of the last ${this.#steps.length} steps. Last: ${words}`);
    this.picture.paint();
  }

  #draw(pen, width, colour) {
    const up = nice(Math.max(4, ...this.#steps.map((s) => s.prefill)));
    const down = nice(Math.max(4, ...this.#steps.map((s) => s.decode)));
    const below = HEIGHT - MIDDLE;
    const left = (this.#left = margin(pen, [count(up), count(down)]));
    pen.fillStyle = colour.soft;
    pen.textAlign = "right";
    pen.fillText(count(up), left - 6, 7);
    pen.fillText("0", left - 6, MIDDLE);
    pen.fillText(count(down), left - 6, HEIGHT - 6);
    pen.fillStyle = colour.line;
    pen.fillRect(left, MIDDLE, width - left, 1);
    const each = (width - left) / this.limit;
    const wide = Math.max(1, each - (each > 3 ? 1 : 0.4));
    const first = this.limit - this.#steps.length;
    this.#steps.forEach((step, i) => {
      const x = left + (first + i) * each;
      bar(pen, colour.prefill, x, wide, step.prefill && -Math.max(2, (step.prefill / up) * (MIDDLE - 8)), MIDDLE);
      bar(pen, colour.decode, x, wide, step.decode && Math.max(2, (step.decode / down) * (below - 8)), MIDDLE + 1);
      if (step.preemptions) bar(pen, colour.preempted, x, wide, 4, 0);
    });
  }

  #at(x) {
    const each = (this.picture.canvas.clientWidth - this.#left) / this.limit;
    const step = this.#steps[Math.floor((x - this.#left) / each) - (this.limit - this.#steps.length)];
    if (x < this.#left || !step) return null;
    return (
      `step ${count(step.number)}, ${seconds(step.seconds)}\n` +
      `${count(step.prefill)} prefill, ${count(step.decode)} decode tokens\n` +
      `${step.running} running, ${step.waiting} waiting` +
      (step.preemptions ? `, ${step.preemptions} preempted` : "")
    );
  }
}

function bar(pen, colour, x, width, height, from) {
  pen.fillStyle = colour;
  pen.fillRect(x, from, width, height);
}
