// The server's API: JSON requests and server-sent events.

export class ApiError extends Error {}

export class Api {
  key = ""; // never stored

  async get(path, signal) {
    const response = await this.#ask(path, { signal });
    return response.json();
  }

  // Yields the parsed data of each event, until [DONE] or the end of the stream.
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

// Yields the data of server-sent events. An event may span several chunks of the body.
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
