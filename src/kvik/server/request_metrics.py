"""What the server's requests were like, counted as they come, go on and end."""

from __future__ import annotations

from collections import Counter

from kvik.engine.output import RequestOutput
from kvik.server.histogram import FEW, FIRST, GAPS, SECONDS, TOKENS, Histogram
from kvik.server.observer import Life


class RequestMetrics:
    """An `Observer`. Durations are of the engine's clock, but for the gaps between tokens, which
    are what this process saw.

    Attributes:
        ended: requests by how they ended. refused: by why.
        ttft: arrival to the first token. gaps: between pieces of one completion's stream.
        tpot: (e2e - ttft) / (tokens - 1). e2e: arrival to the last token.
        queued: arrival to the first step. prefill: from there to the first token.
        decode: from there to the last. inference: the first step to the last token.
        prompt_tokens, output_tokens: of a request. longest: of its completions.
        computed: prompt tokens that were not in the prefix cache.
        n, max_tokens: as asked for.
    """

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.refused_for: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_pinned_tokens = 0
        self.num_output_tokens = 0
        self.ttft = Histogram(FIRST)
        self.gaps = Histogram(GAPS)
        self.tpot = Histogram(GAPS)
        self.e2e, self.queued = Histogram(SECONDS), Histogram(SECONDS)
        self.prefill, self.decode = Histogram(SECONDS), Histogram(SECONDS)
        self.inference = Histogram(SECONDS)
        self.prompt_tokens, self.output_tokens = Histogram(TOKENS), Histogram(TOKENS)
        self.longest, self.computed = Histogram(TOKENS), Histogram(TOKENS)
        self.max_tokens = Histogram(TOKENS)
        self.n, self.preemptions = Histogram(FEW), Histogram(FEW)

    def arrived(self, life: Life) -> None:
        self.n.add(life.params.n)
        if life.params.max_tokens is not None:
            self.max_tokens.add(life.params.max_tokens)

    def delivered(self, life: Life, index: int, num_tokens: int, now: float) -> None:
        self.num_output_tokens += num_tokens
        before = life.last_tokens.get(index)
        if before is not None and num_tokens:
            self.gaps.add(now - before)

    def finished(self, life: Life, output: RequestOutput | None, reason: str) -> None:
        self.ended[reason] += 1
        if output is None:
            return
        times, tokens = output.metrics, [len(one.token_ids) for one in output.completions]
        self.num_prompt_tokens += life.num_prompt_tokens
        self.num_cached_tokens += output.num_cached_tokens
        self.prompt_tokens.add(life.num_prompt_tokens)
        self.computed.add(life.num_prompt_tokens - output.num_cached_tokens)
        self.output_tokens.add(sum(tokens))
        self.longest.add(max(tokens))
        self.preemptions.add(output.num_preemptions)
        self.e2e.add(times.e2e)
        if times.first_scheduled is None:
            return
        self.queued.add(times.first_scheduled - times.arrival)
        self.inference.add(times.finished - times.first_scheduled)
        if times.first_token is None:
            return
        self.ttft.add(times.first_token - times.arrival)
        self.prefill.add(times.first_token - times.first_scheduled)
        self.decode.add(times.finished - times.first_token)
        if life.params.n == 1 and (tpot := times.tpot(tokens[0])) is not None:
            self.tpot.add(tpot)

    def refused(self, tenant: str, reason: str) -> None:
        self.refused_for[reason] += 1
