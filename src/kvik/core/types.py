"""The data of a request, shared by both trunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from kvik.core.counters import RequestSpeculation
from kvik.core.sampling_params import SamplingParams


class RequestStatus(IntEnum):
    WAITING = 0  # in the queue, holds no blocks
    RUNNING = 1  # holds a slot and blocks
    PREEMPTED = 2  # back in the queue after losing its blocks
    FINISHED = 3


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the caller went away
    DEADLINE = "deadline"  # the deadline passed
    ERROR = "error"  # per-request code failed; the message says how


# One vector of a prompt: the mean of the hidden states of its tokens, or that of the last one.
POOLINGS = ("mean", "last")


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix of the prompt that stays in the prefix cache for a while, used or not."""

    num_tokens: int  # of the prompt; what is pinned are its full blocks
    seconds: float  # since it was last computed or used


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as it enters the engine: what the caller wants, already checked and tokenised."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0  # smaller is more urgent
    cache_salt: str = ""  # requests share prefix blocks only under the same salt
    deadline: float | None = None  # engine-clock time after which the result is worthless
    tenant: str = ""  # those who share the engine; each gets a fair part of it
    pins: tuple[Pin, ...] = ()  # in order of length
    pooling: str | None = None  # one of `POOLINGS`: hidden states are wanted, and no text


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: the token itself, then the most likely ones."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Request:
    """One generation being served. The n completions of a prompt are n sibling requests."""

    request_id: str
    index: int  # which of the n siblings
    params: SamplingParams
    token_ids: list[int]  # prompt, then the delivered output
    num_prompt_tokens: int
    max_length: int  # prompt + output never grow past this
    stop_ids: frozenset[int]
    seed: int
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    pooling: str | None = None  # see `EngineRequest`
    tenant: str = ""  # see `EngineRequest`
    pins: tuple[Pin, ...] = ()  # that are yet to be made; see `EngineRequest`
    leader: Request | None = None  # sibling 0, whose prompt blocks are shared

    status: RequestStatus = RequestStatus.WAITING
    serial: int = -1  # order of arrival at the scheduler, breaks every tie
    slot: int = -1
    last_step: int = -1  # the newest step with a row of this request
    num_computed_tokens: int = 0  # K/V written, or promised by steps in flight
    num_written_tokens: int = 0  # K/V written by steps whose results are known here
    num_pending_tokens: int = 0  # sampled by steps in flight, ids not known here yet
    num_draft_tokens: int = 0  # proposed for the next step; only the worker knows the ids
    speculation: RequestSpeculation | None = None  # so far; None: nobody guesses for it
    block_ids: list[list[int]] = field(default_factory=list)  # one table per KV group
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids
    num_metered_tokens: int = 0  # of those computed, whose work is counted
    num_charged_tokens: int = 0  # of those known, that its tenant was charged for or found cached
    num_lost_tokens: int = 0  # computed before a preemption
    num_committed_blocks: int = 0  # how many of its blocks the prefix cache has been told of
    order: tuple[float, int] = (0.0, 0)  # the policy's key: smaller is served first, evicted last
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first scheduling
    num_pinned_tokens: int = 0  # prompt tokens written by this request, and pinned
    num_preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reads_whole_prompt(self) -> bool:
        """Something is wanted of every position of the prompt, so that none may be found cached."""
        return self.params.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def num_unscheduled_tokens(self) -> int:
        """Known tokens that no step computes yet, those being sampled included: 1 if it decodes."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.index)


@dataclass(frozen=True, slots=True)
class PromptUse:
    """Tokens of a prompt, by how their K/V came into the cache; the rest was simply computed."""

    num_cached_tokens: int  # found there
    num_pinned_tokens: int  # written and pinned


@dataclass(slots=True)  # not frozen: made for every row of every step, five times faster so
class RequestDelta:
    """What one step brought to one request, or why it ended."""

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    report: RequestReport | None = None  # with the last delta
    embedding: list[float] | None = None  # of a pooling request, with its last delta
    refused: str | None = None  # the limit of the queue that kept the request out; nothing was done
    prompt: PromptUse | None = None  # with the first token
    again: bool = False  # it was lost with its engine, and another one may be asked for all of it


@dataclass(frozen=True, slots=True)
class RequestReport:
    """How a request fared, in seconds of the engine's clock and in tokens."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    num_cached_tokens: int
    num_preemptions: int
    speculation: RequestSpeculation | None = None  # None: nobody guessed for it
    num_pinned_tokens: int = 0  # of the prompt, written and pinned by this request
    serial: int = -1  # the request's number since the engine started
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @classmethod
    def of(cls, request: Request, finished: float) -> RequestReport:
        return cls(
            arrival=request.arrival,
            first_scheduled=request.first_scheduled,
            first_token=request.first_token,
            finished=finished,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            speculation=request.speculation,
            num_pinned_tokens=request.num_pinned_tokens,
            serial=request.serial,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
        )
