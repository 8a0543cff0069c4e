// The server's API: JSON requests, and answers that come as server-sent events.

export class ApiError extends Error {}

export class Api {
  key = ""; // in memory only

  async get(path, signal) {
    const response = await this.#ask(path, { signal });
    return response.json();
  }

  // The data of each event, parsed; ends at [DONE] or when the server closes.
  async *stream(path, body, signal) {
    const options = { signal };
    if (body !== undefined) {
      options.method = "POST";
      options.body = JSON.stringify(body);
    }
    const response = await this.#ask(path, options);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(message(event.error));
      yield event;
    }
  }

  async #ask(path, options) {
    const headers = {};
    if (options.body !== undefined) headers["Content-Type"] = "application/json";
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("the server cannot be reached");
    }
    if (!response.ok) throw new ApiError(await refusal(response));
    return response;
  }
}

// The data of server-sent events, however the bytes are cut.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function refusal(response) {
  try {
    return message((await response.json()).error);
  } catch {
    return `the server answered ${response.status}`;
  }
}

function message({ param, message: text }) {
  return param && !text.startsWith(`${param}:`) ? `${param}: ${text}` : String(text);
}
