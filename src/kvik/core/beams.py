"""Beam search: the most likely outputs of a prompt, instead of sampled ones.

A search has `num_beams` beams: its most likely unfinished outputs. In each round one request for
each beam computes its next token, and the most likely continuations of all beams are the beams of
the next round. Continuations that end are kept, the best `num_beams` of them.

Beams share the blocks of what they have in common. A partly filled last block is copied only if
several beams continue it (Kwon et al. 2023, section 4.4). So each request computes one token, as a
decode does. It finds its blocks in the prefix cache; those that other requests have taken meanwhile
are computed again.

Scores, and when a search ends, are those of `generate(num_beams=...)` in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, replace
from math import inf

from kvik.core.types import (
    FinishReason,
    PromptUse,
    Request,
    RequestDelta,
    RequestReport,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """An output, as its last token and the output before it."""

    index: int  # of the request that computed the token, in its round
    before: Beam | None  # None: the token is the first
    token: TokenLogprobs
    logprob: float  # sum of the log probabilities of all tokens
    length: int  # number of tokens

    def tokens(self) -> list[TokenLogprobs]:
        """Return all tokens, in order."""
        beam: Beam | None = self
        newest_first = []
        while beam is not None:
            newest_first.append(beam.token)
            beam = beam.before
        return newest_first[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class _Ended:
    """An output that has ended."""

    beam: Beam | None  # None: it has no tokens
    score: float
    reason: FinishReason
    complete: bool = False  # it is a structured text that ended without a stop token


class BeamSearch:
    """The search of one request."""

    def __init__(self, first: Request) -> None:
        """
        Args:
            first: a request for one output, with the caller's parameters.
        """
        params = self._params = first.params
        self._max_length = first.max_length
        top = max(num_ranked(params.num_beams, first.stop_ids), params.logprobs or 0)
        per_token = replace(params, n=1, temperature=0.0, logprobs=top, speculation=False)
        # What the requests have in common.
        self._common = replace(first, params=per_token, speculation=None, is_beam=True)
        self._beams: list[Beam] = []
        self._ended: list[_Ended] = []  # best first
        # The most likely tokens of this round with their log probabilities, by request.
        self._tops: dict[int, tuple[tuple[int, float], ...]] = {}
        self._report: RequestReport | None = None  # of the first request
        self._prompt: PromptUse | None = None
        self._num_preemptions = 0
        # Of the current round, in the order of the beams; empty: the search is over.
        self.requests = [self._request(0, first.token_ids[:])]
        # The last delta of the first request that ended without a token, and the search with it;
        # None: there is none.
        self.failed: RequestDelta | None = None

    def take(self, delta: RequestDelta) -> None:
        """Take the last delta of a request of this round."""
        report = delta.report
        assert report is not None
        if self._report is None:
            self._report, self._prompt = report, delta.prompt
            self._common = replace(
                self._common,
                first_scheduled=report.first_scheduled,
                first_token=report.first_token,
                pins=(),
                source=None,
            )
        self._num_preemptions += report.num_preemptions
        if delta.logprobs is None:
            self.failed = self.failed or delta
        else:
            self._tops[delta.index] = delta.logprobs[0].top if delta.logprobs else ()

    def advance(self) -> list[Request]:
        """Choose the beams of the next round, once all requests of this one have ended.

        Returns:
            The requests of this round that no beam continues.
        """
        num_beams = self._params.num_beams
        for index, top in sorted(self._tops.items()):
            if not top:  # its text was complete before, which only the worker knows
                self._keep(self._before(index), FinishReason.STOP, complete=True)
        beams: list[Beam] = []
        for place, beam in enumerate(() if self.failed else self._continuations()):
            reason = self._end_of(beam)
            if reason is None:
                beams.append(beam)
            elif place < num_beams:
                self._keep(beam, reason)
            if len(beams) == num_beams:
                break
        if beams and not self._may_improve(beams[0]):
            beams = []
        last_of = {beam.index: index for index, beam in enumerate(beams)}  # parent -> last beam
        parents = self.requests
        self.requests = [
            self._continue(index, beam, parents[beam.index], is_last=last_of[beam.index] == index)
            for index, beam in enumerate(beams)
        ]
        self._beams, self._tops = beams, {}
        return [request for request in parents if request.index not in last_of]

    def last_deltas(self, now: float) -> list[RequestDelta]:
        """Return the outputs of the search, the best first, or how it failed."""
        return [self._last_delta(index, now) for index in range(self._params.n)]

    def _last_delta(self, index: int, now: float) -> RequestDelta:
        delta = RequestDelta(self._common.request_id, index, [], FinishReason.ERROR)
        length = 0
        if self.failed is not None:
            delta.finish_reason, delta.error = self.failed.finish_reason, self.failed.error
        elif index >= len(self._ended):
            delta.error = f"n: the rules of the request allow only {len(self._ended)} outputs"
        else:
            ended = self._ended[index]
            tokens = [] if ended.beam is None else ended.beam.tokens()
            length = len(tokens)
            delta.token_ids = [entry.token_id for entry in tokens]
            delta.finish_reason, delta.complete = ended.reason, ended.complete
            if delta.token_ids[-1:] and delta.token_ids[-1] in self._params.stop_token_ids:
                delta.stop_reason = delta.token_ids[-1]
            if self._params.logprobs is not None:
                delta.logprobs = tokens
            delta.prompt = self._prompt
        assert self._report is not None
        delta.report = replace(
            self._report,
            finished=now,
            num_preemptions=0 if index else self._num_preemptions,
            num_output_tokens=length,
        )
        return delta

    def _request(self, index: int, tokens: MutableSequence[int]) -> Request:
        """Return a request for the token after `tokens`."""
        return replace(
            self._common,
            index=index,
            token_ids=tokens,
            max_length=len(tokens) + 1,
            block_ids=[],
            block_hashes=[],
        )

    def _continue(self, index: int, beam: Beam, parent: Request, *, is_last: bool) -> Request:
        """Return a request for the next token of a beam.

        Args:
            is_last: no later beam has the same parent.
        """
        tokens = parent.token_ids[:-1]  # without the token that it sampled
        computed = len(tokens)
        tokens.append(beam.token.token_id)
        request = self._request(index, tokens)
        request.block_hashes = parent.block_hashes[:]
        request.num_kept_tokens = computed
        request.takes_block = is_last
        return request

    def _continuations(self) -> Iterator[Beam]:
        """Yield the most likely continuations of all beams, the best first."""
        ranked = []
        for index, top in self._tops.items():
            before = self._before(index)
            total = 0.0 if before is None else before.logprob
            ranked += [
                (-(total + logprob), index, rank, token, logprob)
                for rank, (token, logprob) in enumerate(top, 1)
                if logprob > -inf
            ]
        shown = self._params.logprobs or 0
        for negative, index, rank, token, logprob in sorted(ranked):
            entry = TokenLogprobs(token, logprob, rank, self._tops[index][:shown])
            before = self._before(index)
            length = 1 if before is None else before.length + 1
            yield Beam(index, before, entry, -negative, length)

    def _before(self, index: int) -> Beam | None:
        """Return the beam that a request of this round continues."""
        return self._beams[index] if self._beams else None

    def _end_of(self, beam: Beam) -> FinishReason | None:
        """Return why an output ends with its last token, or None."""
        if beam.token.token_id in self._common.stop_ids:
            return FinishReason.STOP
        if self._common.num_prompt_tokens + beam.length >= self._max_length:
            return FinishReason.LENGTH
        return None

    def _keep(self, beam: Beam | None, reason: FinishReason, *, complete: bool = False) -> None:
        """Keep an output that has ended, if it is one of the best."""
        score = 0.0 if beam is None else self._score(beam)
        self._ended.append(_Ended(beam, score, reason, complete))
        self._ended.sort(key=lambda ended: -ended.score)
        del self._ended[self._params.num_beams :]

    def _may_improve(self, best: Beam) -> bool:
        """Return whether the search goes on: the most likely beam may still become one of the best
        outputs."""
        if len(self._ended) < self._params.num_beams:
            return True
        return not self._params.early_stopping and self._score(best) > self._ended[-1].score

    def _score(self, beam: Beam) -> float:
        penalty: float = beam.length**self._params.length_penalty
        return beam.logprob / penalty


def num_ranked(num_beams: int, stop_ids: frozenset[int]) -> int:
    """Return how many of a beam's most likely next tokens hold `num_beams` that do not end it."""
    return num_beams + len(stop_ids)
