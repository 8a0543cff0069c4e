// A timeline of requests (queued, prefill, decode), and the queue.

import { Picture, count, legend, seconds } from "./canvas.js";
import { byId, make, setText } from "./dom.js";

const ROW = 15;
const MOST_ROWS = 20;
const [LEFT, RIGHT] = [40, 88];
const AXIS = 18;
const SPANS = [5, 10, 20, 30, 60, 120, 300]; // seconds, of which the least that fits is shown
const MOST_QUEUED = 10;

export class Requests {
  #known = new Map(); // number -> newest state of the request
  #rows = [];
  #now = 0;

  // `colours`: RequestColours of the running requests.
  constructor(colours) {
    this.colours = colours;
    this.picture = new Picture(byId("requests"), {
      height: () => Math.max(3, this.#rows.length) * ROW + AXIS,
      draw: (pen, width, colour) => this.#draw(pen, width, colour),
      at: (x, y) => this.#at(y),
    });
    legend(byId("requests-legend"), [
      ["queued", "queued"],
      ["prefill", "prefill"],
      ["decode", "decode; at the right, prompt + output tokens"],
    ]);
    byId("requests-numbers").addEventListener("toggle", () => this.#table());
  }

  clear() {
    this.#known.clear();
  }

  show(view) {
    this.#now = view.now;
    const present = [...view.running, ...view.waiting];
    const seen = new Set(present.map((r) => r.number));
    for (const request of [...view.finished, ...present]) this.#known.set(request.number, request);
    for (const [number, request] of this.#known) {
      // It ended between two views, or is no longer among the first in the queue.
      if (request.finished === null && !seen.has(number)) this.#known.delete(number);
    }
    const sorted = [...this.#known.values()].sort((a, b) => a.number - b.number);
    for (const old of sorted.slice(0, -100)) if (old.finished !== null) this.#known.delete(old.number);
    const began = sorted.filter((r) => r.phase !== "waiting" || r.finished !== null);
    this.#rows = (began.length ? began : sorted).slice(-MOST_ROWS);
    const { num_running: running, num_waiting: waiting } = view.stats;
    const words = `${running} running, ${waiting} waiting`;
    setText(byId("requests-words"), words);
    this.picture.say(`Timeline of requests: ${words}; table below`);
    this.picture.paint();
    this.#table();
    this.#queue(view);
  }

  #span() {
    const oldest = Math.min(...this.#rows.map((r) => r.arrival), this.#now);
    return SPANS.find((span) => span >= this.#now - oldest) ?? SPANS.at(-1);
  }

  #draw(pen, width, colour) {
    const span = this.#span();
    const start = this.#now - span;
    const place = (time) => LEFT + (Math.max(0, time - start) / span) * (width - LEFT - RIGHT);
    const bottom = Math.max(3, this.#rows.length) * ROW;
    const marks = width < 420 ? 2 : 5;
    for (let i = 0; i <= marks; i++) {
      const x = place(start + (span * i) / marks);
      pen.fillStyle = colour.faint;
      pen.fillRect(Math.round(x), 0, 1, bottom);
      pen.fillStyle = colour.soft;
      pen.textAlign = "center";
      pen.fillText(i === marks ? "now" : `−${span - (span * i) / marks} s`, x, bottom + 10);
    }
    this.#rows.forEach((r, i) => {
      const y = i * ROW;
      const end = r.finished ?? this.#now;
      pen.fillStyle = r.finished === null ? colour[this.colours.of(r.number)] : colour.line;
      pen.fillRect(0, y + 3, 3, ROW - 6);
      pen.fillStyle = colour.soft;
      pen.textAlign = "left";
      pen.fillText(`${r.number}`, 7, y + ROW / 2);
      const part = (from, to, paint) => {
        if (to < start) return;
        pen.fillStyle = paint;
        pen.fillRect(place(from), y + 3, Math.max(1, place(to) - place(from)), ROW - 6);
      };
      part(r.arrival, r.first_scheduled ?? end, colour.queued);
      if (r.first_scheduled !== null) part(r.first_scheduled, r.first_token ?? end, colour.prefill);
      if (r.first_token !== null) part(r.first_token, end, colour.decode);
      pen.fillStyle = colour.soft;
      pen.fillText(`${count(r.prompt_tokens)} + ${count(r.output_tokens)}`, width - RIGHT + 8, y + ROW / 2);
    });
  }

  #at(y) {
    const r = this.#rows[Math.floor(y / ROW)];
    if (!r) return null;
    const shown = figuresOf(r, this.#now);
    return (
      `request ${r.number}: ${shown.state}\n` +
      `${count(r.prompt_tokens)} prompt tokens, ${count(r.cached_tokens)} cached\n` +
      `${count(r.output_tokens)} output tokens, ${count(r.blocks)} blocks used\n` +
      `queued ${shown.queued}, TTFT ${shown.ttft}, TPOT ${shown.tpot}` +
      (r.preemptions ? `\npreempted ${r.preemptions} times` : "")
    );
  }

  #table() {
    if (!byId("requests-numbers").open) return;
    byId("requests-table").replaceChildren(
      ...this.#rows.map((r) => {
        const shown = figuresOf(r, this.#now);
        const cells = [shown.state, r.prompt_tokens, r.cached_tokens, r.output_tokens, shown.queued, shown.ttft, shown.tpot];
        const head = make("th", { scope: "row", textContent: r.number });
        return make("tr", {}, head, ...cells.map((text) => make("td", { textContent: text })));
      }),
    );
  }

  #queue(view) {
    const waiting = view.stats.num_waiting;
    setText(byId("queue-words"), waiting ? `${count(waiting)} requests, ${count(view.stats.queued_tokens)} tokens` : "empty");
    const items = view.waiting.slice(0, MOST_QUEUED).map((r) => {
      const again = r.phase === "preempted" ? ", preempted" : "";
      return make("li", { textContent: `${r.number}: ${count(r.prompt_tokens)} tokens, ${seconds(view.now - r.arrival)}${again}` });
    });
    if (waiting > items.length) items.push(make("li", { className: "rest", textContent: `and ${count(waiting - items.length)} more` }));
    byId("queue").replaceChildren(...items);
  }
}

export const tpotOf = (r, end) =>
  r.first_token !== null && r.output_tokens > 1 ? (end - r.first_token) / (r.output_tokens - 1) : null;

function figuresOf(r, now) {
  return {
    state: r.finish_reason ?? r.phase,
    queued: seconds((r.first_scheduled ?? r.finished ?? now) - r.arrival),
    ttft: r.first_token === null ? "–" : seconds(r.first_token - r.arrival),
    tpot: seconds(tpotOf(r, r.finished ?? now)),
  };
}
