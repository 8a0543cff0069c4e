// A streamed request: its choices, and its figures.

export class Generation {
  #stop = new AbortController();
  #began = performance.now();
  #first = null; // time of the first choice with content
  #usage = null;

  constructor(api, path, body) {
    Object.assign(this, { api, path, body });
  }

  // Yields choices; throws if the server refuses the request or `stop` is called.
  async *choices() {
    const body = { stream: true, stream_options: { include_usage: true }, ...this.body };
    for await (const event of this.api.stream(this.path, body, this.#stop.signal)) {
      this.#usage = event.usage ?? this.#usage;
      for (const choice of event.choices ?? []) {
        if (choice.text || choice.delta?.content || choice.delta?.reasoning_content) this.#first ??= performance.now();
        yield choice;
      }
    }
  }

  stop() {
    this.#stop.abort();
  }

  get stopped() {
    return this.#stop.signal.aborted;
  }

  // `context`: the model's context length, or 0 if unknown.
  figures(context) {
    const parts = [];
    const { prompt_tokens: prompt, completion_tokens: output, prompt_tokens_details: details } = this.#usage ?? {};
    const seconds = this.#first === null ? 0 : (performance.now() - this.#first) / 1000;
    if (output > 1 && seconds) parts.push(`${((output - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.#first !== null) parts.push(`first token after ${Math.round(this.#first - this.#began)} ms`);
    if (this.#usage) {
      const cached = details?.cached_tokens;
      parts.push(`${prompt} + ${output} tokens${cached ? ` (${cached} cached)` : ""}`);
      if (context && (this.body.n ?? 1) === 1) parts.push(`context ${Math.round((100 * (prompt + output)) / context)} %`);
    }
    return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · ");
  }
}

// Labels of finish reasons; "stop", the normal end, has none.
export const ENDS = { length: "Cut at the length limit", stopped: "Stopped" };
