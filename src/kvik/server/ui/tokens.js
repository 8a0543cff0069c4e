// Tokens coloured by probability.

import { make } from "./dom.js";

const SHADES = [0.1, 0.3, 0.6, 0.9]; // probability below which a token gets shade p0, p1, ...

// The tokens of a chunk: [text, logprob, [[text, logprob], ...] of the most likely tokens].
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

export function coloured([text, logprob, top]) {
  const probability = Math.exp(logprob ?? 0);
  const shade = SHADES.findIndex((limit) => probability < limit);
  const title = [[text, logprob], ...top.filter(([other]) => other !== text)]
    .map(([token, value]) => `${JSON.stringify(token)} ${(100 * Math.exp(value)).toFixed(1)} %`)
    .join("\n");
  return make("span", { className: shade < 0 ? "token" : `token p${shade}`, textContent: text, title });
}

export function shadesLegend() {
  const shades = SHADES.map((limit, i) => make("span", { className: `token p${i}`, textContent: `< ${100 * limit} %` }));
  return make("p", { className: "shades note" }, "Probability: ", ...shades);
}
