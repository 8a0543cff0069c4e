"""Turn deltas of token ids into text: detokenise, find stop strings, collect the outputs.

This runs on the frontend's side of the engine. An error in the text of one request ends only that
request.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from math import fsum, sqrt
from weakref import WeakValueDictionary

from kvik.core.types import (
    EngineRequest,
    FinishReason,
    RequestDelta,
    RequestReport,
    RequestSpeculation,
    TokenLogprobs,
)
from kvik.text.detokenizer import NO_MARKS, Detokenizer, StopStrings, StopTable
from kvik.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    embedding: list[float]  # [hidden]
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    num_preemptions: int  # how often it lost its blocks and started again


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The score of a pair of texts."""

    request_id: str
    prompt_token_ids: Sequence[int]  # of both, as the model read them
    score: float  # larger is better; in 0..1 unless the model's files name another function
    num_cached_tokens: int  # of the prompt, found in the prefix cache


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The classes of a text."""

    request_id: str
    prompt_token_ids: Sequence[int]
    label: str  # the likeliest
    # A number for each label of the model, in its order: probabilities, of which the sum is 1
    # unless the labels are independent; or the outputs of the model, as requested.
    probs: list[float]
    num_cached_tokens: int  # of the prompt, found in the prefix cache


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


SCORE_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "none": lambda x: x,
    "sigmoid": _sigmoid,
    "tanh": math.tanh,
    "relu": lambda x: max(0.0, x),
}


def _softmax(values: Sequence[float]) -> list[float]:
    largest = max(values)
    powers = [math.exp(x - largest) for x in values]
    total = fsum(powers)
    return [power / total for power in powers]


def normalise(vector: Sequence[float]) -> list[float]:
    """Scale a vector to length 1; a zero vector is unchanged."""
    length = sqrt(fsum(x * x for x in vector))
    return [x / length for x in vector] if length else list(vector)


@dataclass(slots=True)  # not frozen: one per row and step
class TextDelta:
    """What one or more steps added to one completion."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    stop_reason: int | str | None = None  # the stop string or stop id that ended it
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first of completion 0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished completion. `token_ids` hold the token that ended it, `text` does not."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None  # the stop string or stop id that ended it
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    # How many drafts were made for it and accepted at each place, the tokens per check of drafts
    # (`drafts.mean_length`), and the estimated speedup. None: no speculation in this engine or for
    # this request.
    speculation: RequestSpeculation | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds of one clock, from the first of n siblings to the last."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float

    @property
    def ttft(self) -> float | None:
        """Time to first token: arrival to the first sampled token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def e2e(self) -> float:
        return self.finished - self.arrival

    def tpot(self, num_output_tokens: int) -> float | None:
        """Time per output token after the first: (E2E - TTFT) / (n - 1)."""
        if self.first_token is None or num_output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: its completions in order of index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    num_preemptions: int
    prompt_logprobs: list[TokenLogprobs | None] | None  # None for tokens that are not scored
    metrics: RequestMetrics
    embedding: list[float] | None = None  # of a pooling request, as the model returned it
    num_pinned_tokens: int = 0  # of the prompt, written and pinned by this request

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def finished(self) -> bool:
        """Always true: there is an output only when all completions have ended."""
        return True

    @property
    def num_output_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.outputs)

    @property
    def speculation(self) -> RequestSpeculation | None:
        """Sum over its completions; None if none of them had speculation."""
        parts = [c.speculation for c in self.outputs if c.speculation is not None]
        return reduce(operator.add, parts) if parts else None

    @property
    def num_drafted_tokens(self) -> int:
        """Drafts that were computed."""
        return sum(c.speculation.drafts.drafts for c in self.outputs if c.speculation)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were accepted, those after the end of the output included."""
        return sum(c.speculation.drafts.accepted for c in self.outputs if c.speculation)


def embedding_output(
    output: RequestOutput, *, normalize: bool, dimensions: int | None
) -> EmbeddingOutput:
    """Return the vector of a request, cut to some dimensions and then scaled to length 1 if wanted.

    Raises:
        RuntimeError: the engine failed to compute it.
    """
    vector = _pooled(output, "vector")[:dimensions]
    return EmbeddingOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        embedding=normalise(vector) if normalize else vector,
        num_cached_tokens=output.num_cached_tokens,
        num_preemptions=output.num_preemptions,
    )


def score_output(output: RequestOutput, function: str) -> ScoreOutput:
    """Return the score of a request.

    Args:
        function: of the score (`PoolingSpec.function`).

    Raises:
        RuntimeError: the engine failed to compute it.
    """
    return ScoreOutput(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        score=activated(_pooled(output, "score"), function)[0],
        num_cached_tokens=output.num_cached_tokens,
    )


def classification_output(
    output: RequestOutput, labels: Sequence[str], function: str
) -> ClassificationOutput:
    """Return the classes of a request; for the arguments see `PoolingSpec`.

    Raises:
        RuntimeError: the engine failed to compute them.
    """
    probs = activated(_pooled(output, "class"), function)
    return ClassificationOutput(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        label=likeliest(probs, labels),
        probs=probs,
        num_cached_tokens=output.num_cached_tokens,
    )


def likeliest(probs: Sequence[float], labels: Sequence[str]) -> str:
    """Return the label of the largest number, and of equal ones the first."""
    return labels[max(range(len(probs)), key=probs.__getitem__)]


def activated(outputs: Sequence[float], function: str) -> list[float]:
    """Apply a function (`PoolingSpec.function`) to what the head of a model returned."""
    if function == "softmax":
        return _softmax(outputs)
    return [SCORE_FUNCTIONS[function](x) for x in outputs]


def _pooled(output: RequestOutput, label: str) -> list[float]:
    if output.embedding is None:
        raise RuntimeError(f"{output.request_id} has no {label}: {output.outputs[0].error}")
    return output.embedding


PIECE = 512  # tokens; a single growing array would leave holes in memory as large as itself


class _Tokens:
    """A list of token ids, all but the newest in compact pieces, since texts may be endless."""

    def __init__(self) -> None:
        self._compact: list[array[int]] = []
        self._newest: list[int] = []
        self.count = 0

    def extend(self, ids: Sequence[int]) -> None:
        self._newest += ids
        self.count += len(ids)
        if len(self._newest) >= PIECE:
            code = "H" if max(self._newest) < 1 << 16 else "I"
            self._compact.append(array(code, self._newest))
            self._newest = []

    def to_list(self) -> list[int]:
        return [token for piece in (*self._compact, self._newest) for token in piece]


@dataclass(slots=True)
class _Completion:
    """A completion in progress."""

    detokenizer: Detokenizer | None
    stops: StopStrings | None
    text: str = ""  # if it is made all at once at the end
    shown: int = 0  # else: characters shown; the full text is made again from the tokens
    token_ids: _Tokens = field(default_factory=_Tokens)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    matched: str | None = None  # the stop string; tokens after it are dropped
    result: CompletionOutput | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class OutputSoFar:
    """What a completion has, before its request has ended."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # of its last tokens, or of none
    stopped: bool  # a stop string was met


@dataclass(slots=True)
class _Entry:
    request: EngineRequest
    prompt: str | None
    streaming: bool
    new_detokenizer: Callable[[], Detokenizer] | None
    completions: list[_Completion]
    spellings: Mapping[str, str]  # a mark -> the text of its token, which a stop string may have
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs_sent: bool = False  # in a delta
    embedding: list[float] | None = None
    reports: dict[int, RequestReport] = field(default_factory=dict)  # by index


@dataclass(slots=True)
class Processed:
    """The text of some deltas, and the requests that the engine must end because of it."""

    # For each delta of the engine, how many of its tokens belong to the output.
    counts: list[int] = field(default_factory=list)
    deltas: list[TextDelta] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)
    to_end: list[tuple[str, int, FinishReason, str | None]] = field(default_factory=list)


class OutputProcessor:
    """Turns the engine's deltas into text and finished outputs."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._entries: dict[str, _Entry] = {}
        # Making a table takes milliseconds, so outputs with the same stop strings share it.
        self._stop_tables: WeakValueDictionary[Sequence[str], StopTable] = WeakValueDictionary()

    def add(
        self,
        request: EngineRequest,
        prompt: str | None,
        *,
        streaming: bool,
        marks: Mapping[int, str] = NO_MARKS,
    ) -> None:
        """Expect deltas of `request`. Without streaming or stop strings text is made at the end.

        Args:
            marks: text that replaces that of some tokens, special or not.
        """
        params = request.params
        spellings = self._spellings(marks, params.skip_special_tokens) if params.stop else {}
        table = self._stop_table(_with_marks(params.stop, spellings)) if params.stop else None
        completions, new_stream = [], None
        if self.tokenizer is not None:
            skipped = params.skip_special_tokens
            new_stream = partial(
                self.tokenizer.new_stream, request.prompt_token_ids, skipped, marks
            )
        for _ in range(params.n):
            detokenizer = None if new_stream is None else new_stream()
            stops = None
            if table is not None:
                stops = StopStrings(table, params.include_stop_str_in_output)
            completions.append(_Completion(detokenizer, stops))
        entry = _Entry(request, prompt, streaming, new_stream, completions, spellings)
        self._entries[request.request_id] = entry

    def _spellings(self, marks: Mapping[int, str], skips: bool) -> dict[str, str]:
        """Return marks with the texts of the tokens that they replace, unless that is skipped."""
        if self.tokenizer is None:
            return {}
        skipped = self.tokenizer.special_ids if skips else frozenset[int]()
        return {m: self.tokenizer.token(t) for t, m in marks.items() if t not in skipped}

    def _stop_table(self, stop: Sequence[str]) -> StopTable:
        table = self._stop_tables.get(stop)
        if table is None:
            table = self._stop_tables[stop] = StopTable(stop)
        return table

    def discard(self, request_id: str) -> None:
        """Forget a request that the engine refused, or whose reader has left."""
        self._entries.pop(request_id, None)

    def so_far(self, request_id: str) -> list[OutputSoFar]:
        """Return what the completions of a request have that has not ended."""
        return [
            OutputSoFar(c.token_ids.to_list(), c.logprobs, c.matched is not None)
            for c in self._entries[request_id].completions
        ]

    def process(self, deltas: Iterable[RequestDelta]) -> Processed:
        """Turn deltas into text and finished outputs."""
        out = Processed()
        for delta in deltas:
            out.counts.append(0)
            entry = self._entries.get(delta.request_id)
            if entry is None:
                continue  # its reader has left
            if delta.prompt_logprobs is not None:  # long ones come in parts
                entry.prompt_logprobs = entry.prompt_logprobs or []
                entry.prompt_logprobs += delta.prompt_logprobs
            if delta.embedding is not None:
                entry.embedding = delta.embedding
            completion = entry.completions[delta.index]
            if completion.result is not None:
                continue  # it has ended
            text, first = "", completion.token_ids.count
            if completion.matched is None and completion.error is None:
                try:
                    if completion.stops is None:
                        text = self._grow(entry, completion, delta)
                    else:
                        for part in _by_token(delta):
                            text += self._grow(entry, completion, part)
                            if completion.matched is not None:
                                break
                except Exception as error:
                    completion.error = f"{type(error).__name__}: {error}"
                if delta.finish_reason is None:
                    self._ask_to_end(entry, completion, delta.index, out)
            if delta.finish_reason is not None:
                self._finish(entry, completion, delta, out)
            # Tokens after a stop string are dropped.
            out.counts[-1] = completion.token_ids.count - first
            if not entry.streaming:
                continue
            tokens = delta.token_ids[: out.counts[-1]]
            if text or tokens or delta.finish_reason:
                result = completion.result
                out.deltas.append(
                    TextDelta(
                        delta.request_id,
                        delta.index,
                        text,
                        tokens,
                        finish_reason=result.finish_reason if result else None,
                        error=completion.error,
                        logprobs=delta.logprobs[: len(tokens)]
                        if tokens and delta.logprobs
                        else None,
                        stop_reason=result.stop_reason if result else None,
                        prompt_logprobs=_prompt_logprobs(entry) if delta.index == 0 else None,
                    )
                )
        return out

    @staticmethod
    def _grow(entry: _Entry, completion: _Completion, delta: RequestDelta) -> str:
        """Append the delta's tokens; returns the text that may be shown now."""
        completion.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            completion.logprobs += delta.logprobs
        last = delta.finish_reason is not None
        at_end = not (entry.streaming or completion.stops)  # all at once, at the end
        if completion.detokenizer is None or (at_end and not last):
            return ""
        ids = completion.token_ids.to_list() if at_end else delta.token_ids
        if delta.finish_reason is FinishReason.STOP and ids:
            shown = delta.complete or entry.request.params.include_stop_str_in_output
            ids = ids if shown else ids[:-1]
        text = completion.detokenizer.push(ids)
        if last:
            text += completion.detokenizer.flush()
        if completion.stops is not None:
            enough = completion.token_ids.count > entry.request.params.min_tokens
            text, completion.matched = completion.stops.push(text, may_end=enough)
            if last and completion.matched is None:
                text += completion.stops.flush()
        if at_end:
            completion.text = text
        else:
            completion.shown += len(text)
        return text

    @staticmethod
    def _ask_to_end(entry: _Entry, completion: _Completion, index: int, out: Processed) -> None:
        request_id = entry.request.request_id
        if completion.error is not None:
            out.to_end.append((request_id, index, FinishReason.ERROR, completion.error))
        elif completion.matched is not None:
            out.to_end.append((request_id, index, FinishReason.STOP, None))

    def _finish(
        self, entry: _Entry, completion: _Completion, delta: RequestDelta, out: Processed
    ) -> None:
        assert delta.finish_reason is not None
        completion.error = completion.error or delta.error
        reason, stop_reason = delta.finish_reason, delta.stop_reason
        if completion.error is not None:
            reason, stop_reason = FinishReason.ERROR, None
        elif completion.matched is not None:
            reason, stop_reason = FinishReason.STOP, completion.matched
            for mark, text in entry.spellings.items():
                stop_reason = stop_reason.replace(mark, text)
        completion.result = CompletionOutput(
            index=delta.index,
            text=completion.text or _text_again(entry, completion),
            token_ids=completion.token_ids.to_list(),
            finish_reason=reason.value,
            stop_reason=stop_reason,
            logprobs=completion.logprobs if entry.request.params.logprobs is not None else None,
            error=completion.error,
            speculation=None if delta.report is None else delta.report.speculation,
        )
        if delta.report is not None:
            entry.reports[delta.index] = delta.report
        if all(c.result is not None for c in entry.completions):
            del self._entries[delta.request_id]
            out.finished.append(_output(entry))


def _with_marks(stop: Sequence[str], spellings: Mapping[str, str]) -> Sequence[str]:
    """Return stop strings, and how they look where marks replace tokens."""
    marked = list(stop)
    for mark, text in sorted(spellings.items(), key=lambda item: -len(item[1])):
        marked = [string.replace(text, mark) for string in marked]
    return tuple(dict.fromkeys([*stop, *marked]))


def _text_again(entry: _Entry, completion: _Completion) -> str:
    """Make the shown text again. Keeping it would take more memory than the tokens, and texts may
    be endless."""
    if entry.new_detokenizer is None or not completion.shown:
        return ""
    detokenizer = entry.new_detokenizer()
    if completion.error is None:
        return (detokenizer.push(completion.token_ids.to_list()) + detokenizer.flush())[
            : completion.shown
        ]
    text = ""  # one of the tokens cannot be decoded
    for token in completion.token_ids.to_list():
        if len(text) >= completion.shown:
            break
        text += detokenizer.push([token])
    return text[: completion.shown]


def merged(deltas: Sequence[TextDelta]) -> list[TextDelta]:
    """Merge the deltas of one request, in order, into one for each completion."""
    if len(deltas) < 2:
        return list(deltas)
    by_index: dict[int, list[TextDelta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [parts[0] if len(parts) == 1 else _joined(parts) for parts in by_index.values()]


def _prompt_logprobs(entry: _Entry) -> list[TokenLogprobs | None] | None:
    """Return the log probabilities of the prompt once, with the first token."""
    if entry.prompt_logprobs_sent:
        return None
    entry.prompt_logprobs_sent = entry.prompt_logprobs is not None
    return _of_prompt(entry)


def _of_prompt(entry: _Entry) -> list[TokenLogprobs | None] | None:
    """Return the log probabilities of the prompt; None where a token has none."""
    if entry.prompt_logprobs is None:
        return None
    num_unscored = max(1, entry.request.params.prompt_logprobs_start)
    return [None] * num_unscored + entry.prompt_logprobs


def _joined(deltas: Sequence[TextDelta]) -> TextDelta:
    last = deltas[-1]
    return TextDelta(
        last.request_id,
        last.index,
        "".join([delta.text for delta in deltas]),
        [token for delta in deltas for token in delta.token_ids],
        last.finish_reason,
        last.error,
        [entry for delta in deltas for entry in delta.logprobs or ()] or None,
        last.stop_reason,
        deltas[0].prompt_logprobs,
    )


def _by_token(delta: RequestDelta) -> list[RequestDelta]:
    """Split a delta by tokens: a stop string may end the output at any of them."""
    tokens, logprobs = delta.token_ids, delta.logprobs
    if len(tokens) < 2:
        return [delta]
    parts = [
        RequestDelta(
            delta.request_id,
            delta.index,
            [token],
            logprobs=None if logprobs is None else logprobs[i : i + 1],
        )
        for i, token in enumerate(tokens)
    ]
    parts[-1].finish_reason, parts[-1].stop_reason = delta.finish_reason, delta.stop_reason
    parts[-1].complete = delta.complete
    return parts


_UNKNOWN = RequestReport(math.nan, None, None, math.nan, 0, 0)  # the engine ended without a report


def _output(entry: _Entry) -> RequestOutput:
    first = entry.reports.get(0, _UNKNOWN)
    reports = entry.reports.values() or [_UNKNOWN]
    return RequestOutput(
        request_id=entry.request.request_id,
        prompt=entry.prompt,
        prompt_token_ids=entry.request.prompt_token_ids,
        outputs=[c.result for c in entry.completions if c.result is not None],
        num_cached_tokens=first.num_cached_tokens,  # the others share its prompt
        num_preemptions=sum(r.num_preemptions for r in reports),
        prompt_logprobs=_of_prompt(entry),
        embedding=entry.embedding,
        num_pinned_tokens=first.num_pinned_tokens,
        metrics=RequestMetrics(
            arrival=min(r.arrival for r in reports),
            first_scheduled=min(
                (r.first_scheduled for r in reports if r.first_scheduled is not None), default=None
            ),
            first_token=min(
                (r.first_token for r in reports if r.first_token is not None), default=None
            ),
            finished=max(r.finished for r in reports),
        ),
    )
