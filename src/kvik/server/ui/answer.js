// An answer as it grows: text, or tokens coloured by how likely they were.

import { make } from "./dom.js";

const SHADES = [0.1, 0.3, 0.6, 0.9]; // probability below which a token gets shade p0, p1, ...

const NEAR = 40; // pixels from the end of a log that still count as its end

// Changes a log. A reader who was at its end stays there; one who scrolled up is not moved.
export function following(log, change) {
  const follow = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
  change();
  if (follow) log.scrollTop = log.scrollHeight;
}

export class Answer {
  text = "";

  constructor(element) {
    this.element = element;
    this.body = make("span");
    element.append(this.body);
  }

  add(text, tokens) {
    this.text += text;
    if (tokens.length) this.body.append(...tokens.map(coloured));
    else if (text) this.body.append(text);
  }

  end(reason) {
    this.element.append(make("span", { className: "end", textContent: reason }));
  }
}

// The tokens of a chunk: [text, logprob, [[text, logprob] of the most likely]].
export function tokensOf(choice) {
  const found = choice.logprobs;
  if (!found) return [];
  if (found.content) {
    return found.content.map((t) => [t.token, t.logprob, t.top_logprobs.map((o) => [o.token, o.logprob])]);
  }
  return (found.tokens ?? []).map((token, i) => [
    token,
    found.token_logprobs[i],
    Object.entries(found.top_logprobs?.[i] ?? {}),
  ]);
}

function coloured([text, logprob, top]) {
  const probability = Math.exp(logprob ?? 0);
  const shade = SHADES.findIndex((limit) => probability < limit);
  const title = [[text, logprob], ...top.filter(([other]) => other !== text)]
    .map(([token, value]) => `${JSON.stringify(token)} ${(100 * Math.exp(value)).toFixed(1)} %`)
    .join("\n");
  return make("span", { className: shade < 0 ? "token" : `token p${shade}`, textContent: text, title });
}
