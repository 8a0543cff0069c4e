// The live engine: follows the server's events while the page is visible, and updates the drawings.

import { Blocks } from "./blocks.js";
import { RequestColours, count, seconds } from "./canvas.js";
import { Curves } from "./curves.js";
import { byId, make, setText } from "./dom.js";
import { Requests } from "./requests.js";
import { Steps } from "./steps.js";

const PAUSE = 2000; // milliseconds between attempts

export class Engine {
  #api;
  #colours = new RequestColours();
  #pictures = [new Blocks(this.#colours), new Steps(), new Requests(this.#colours), new Curves()];
  #following = null; // an AbortController
  #steps = 0;

  constructor(api) {
    this.#api = api;
    document.addEventListener("visibilitychange", () => this.restart());
  }

  // Reconnects after a change of the key or of visibility. A hidden page sends no requests.
  restart() {
    this.#following?.abort();
    this.#following = null;
    if (!document.hidden) this.#follow((this.#following = new AbortController()));
  }

  async #follow(running) {
    while (!running.signal.aborted) {
      try {
        for (const picture of this.#pictures) picture.clear?.();
        for await (const frame of this.#api.stream("v1/engine/live", undefined, running.signal)) this.#take(frame);
      } catch (error) {
        if (running.signal.aborted) return;
        this.#state("not connected", "bad");
        this.#note(error.message);
      }
      await new Promise((done) => setTimeout(done, PAUSE));
    }
  }

  #take({ state, reason, view, replicas }) {
    this.#state(state, state === "ready" ? "ready" : ["starting", "asleep"].includes(state) ? "" : "bad");
    this.#note(reason);
    table(replicas ?? []);
    if (!view) return;
    if (view.stats.steps < this.#steps) for (const picture of this.#pictures) picture.clear?.(); // the engine restarted
    this.#steps = view.stats.steps;
    gauges(view);
    const words = tierWords(view.stats.moves);
    byId("tiers").hidden = !words;
    setText(byId("tiers"), words);
    this.#colours.update(view.running);
    for (const picture of this.#pictures) picture.show(view);
  }

  #state(text, kind) {
    const badge = byId("state");
    setText(badge, text);
    badge.className = `state ${kind}`;
  }

  #note(text) {
    const note = byId("engine-note");
    note.hidden = !text;
    setText(note, text ?? "");
  }
}

function gauges(view) {
  const { stats, rates } = view;
  const hits = stats.prefix_queries ? stats.prefix_hits / stats.prefix_queries : 0;
  const step = view.steps.seconds.at(-1);
  const shown = [
    ["decode tok/s", count(rates.decode_tokens)],
    ["prefill tok/s", count(rates.prefill_tokens)],
    ["running", count(stats.num_running)],
    ["waiting", count(stats.num_waiting)],
    ["KV used", `${(100 * stats.kv_usage).toFixed(0)} %`],
    ["prefix hits", `${(100 * hits).toFixed(0)} %`],
    ["preempted", count(stats.preemptions)],
  ];
  if (stats.speculation) {
    const { drafts, accepted } = stats.speculation.drafts;
    shown.push(["drafts accepted", drafts ? `${((100 * accepted) / drafts).toFixed(0)} %` : "–"]);
  }
  const list = byId("gauges");
  if (list.children.length !== shown.length) {
    list.replaceChildren(...shown.map(([name]) => make("div", {}, make("dt", { textContent: name }), make("dd"))));
  }
  shown.forEach(([, value], i) => setText(list.children[i].lastChild, value));
  if (step !== undefined) list.title = `the last step took ${seconds(step)}`;
}

// Describes the contents and transfers of the KV cache's tiers; "" if there are none.
export function tierWords(moves) {
  if (!moves) return "";
  const { tiers, totals, off } = moves;
  const each = tiers.map(({ name, bytes, capacity, loaded, bytes_per_second: rate }) => {
    const speed = rate ? ` at ${(rate / 1e9).toFixed(1)} GB/s` : "";
    const held = capacity ? `${size(bytes)} of ${size(capacity)}` : `${count(loaded)} pages`; // loaded from peers
    return `${name} ${held}${speed}`;
  });
  if (off) each.push(`disk off: ${off}`);
  const did = [
    `${count(totals.loaded_tokens)} tokens loaded`,
    `load or compute ${count(totals.load_choices)}/${count(totals.compute_choices)}`,
    `swapped out ${count(totals.swapped_out)}, in ${count(totals.swapped_in)}`,
  ];
  return `Tiers: ${each.join(", ")}; ${did.join(", ")}`;
}

function size(bytes) {
  return bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}

// Shows a row per replica, if there are several.
function table(replicas) {
  const shown = byId("replicas");
  shown.hidden = !replicas.length;
  if (!replicas.length) return;
  const row = ({ number, state, draining, stats, rates }) => {
    const cells = [`${number}`, draining && state === "ready" ? "draining" : state];
    const hits = stats?.prefix_queries ? `${((100 * stats.prefix_hits) / stats.prefix_queries).toFixed(0)} %` : "–";
    if (!stats) return [...cells, ...Array(6).fill("–")];
    const held = `${(100 * stats.kv_usage).toFixed(0)} %`;
    const paces = [count(rates.decode_tokens), count(rates.prefill_tokens)];
    return [...cells, count(stats.num_running), count(stats.num_waiting), held, hits, ...paces];
  };
  const cells = (tag, texts) => make("tr", {}, ...texts.map((textContent) => make(tag, { textContent })));
  const titles = ["replica", "state", "running", "waiting", "KV used", "hits", "decode tok/s", "prefill tok/s"];
  shown.replaceChildren(cells("th", titles), ...replicas.map((one) => cells("td", row(one))));
}
