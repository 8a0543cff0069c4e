"""The definition of sampling in plain Python: the required probability of each token."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from kvik.core.sampling_params import SamplingParams

Probabilities = dict[int, float]


def distribution(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_ids: Collection[int] = (),
) -> Probabilities:
    """Return the probability of each token that can be sampled; at temperature 0, one token."""
    scores = dict(enumerate(logits))
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    if params.allowed_token_ids is not None:
        scores = {t: s for t, s in scores.items() if t in params.allowed_token_ids}
    for *prefix, last in params.bad_words:
        if list(output[len(output) - len(prefix) :]) == prefix:
            scores.pop(last, None)
    if len(output) < params.min_tokens:
        scores = {t: s for t, s in scores.items() if t not in stop_ids}
    for token in scores:
        if token in prompt or token in output:
            factor = params.repetition_penalty
            scores[token] *= 1 / factor if scores[token] > 0 else factor
        scores[token] -= params.frequency_penalty * list(output).count(token)
        scores[token] -= params.presence_penalty * (token in output)
    if params.greedy:
        return {max(scores, key=lambda t: (scores[t], -t)): 1.0}
    top = max(scores.values())
    kept = _normalise({t: math.exp((s - top) / params.temperature) for t, s in scores.items()})
    if params.top_k > 0:
        kept = _normalise(dict(_most_likely(kept)[: params.top_k]))
    if params.top_p < 1:  # rounded sums may reach 1 before the last token
        kept = _smallest_set(_most_likely(kept), params.top_p)
    highest = max(kept.values())
    kept = _normalise({t: p for t, p in kept.items() if p >= params.min_p * highest})
    if params.typical_p < 1:
        kept = _typical(kept, params.typical_p)
    return kept


def _normalise(weights: Probabilities) -> Probabilities:
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def _most_likely(kept: Probabilities) -> list[tuple[int, float]]:
    return sorted(kept.items(), key=lambda item: (-item[1], item[0]))


def _smallest_set(ordered: list[tuple[int, float]], mass: float) -> Probabilities:
    """Return the fewest leading tokens whose probabilities reach the mass."""
    kept: Probabilities = {}
    for token, p in ordered:
        if kept and sum(kept.values()) >= mass:
            break
        kept[token] = p
    return _normalise(kept)


def _typical(kept: Probabilities, mass: float) -> Probabilities:
    """Return the smallest set nearest to the entropy, with all tokens as near as its last one."""
    kept = {token: p for token, p in kept.items() if p > 0}
    entropy = -sum(p * math.log(p) for p in kept.values())
    distance = {token: abs(-math.log(p) - entropy) for token, p in kept.items()}
    nearest = _smallest_set(sorted(kept.items(), key=lambda item: distance[item[0]]), mass)
    limit = max(distance[token] for token in nearest) + 1e-12
    return _normalise({token: p for token, p in kept.items() if distance[token] <= limit})
