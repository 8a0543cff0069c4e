"""The data of a request, shared by the scheduler and the worker."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from itertools import zip_longest
from typing import Any

from kvik.core.sampling_params import SamplingParams
from kvik.spec.adapters import NO_ADAPTER
from kvik.spec.visible_keys import NEVER

# Seeds of requests that have none: siblings, and requests that do not give one.

_MASK = 2**64 - 1


def derive_seed(seed: int, index: int) -> int:
    """Return an independent int64 seed for the `index`-th user of `seed`; index 0 keeps it.

    One round of splitmix64 (Steele, Lea, Flood 2014), so that neighbours share no pattern.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


# Ends of outputs that tokens show. (Stop strings need text; the client finds them.)


def finish_reason(request: Request, token: int) -> FinishReason | None:
    """Return why the request ends with `token`, its newest output token, or None."""
    if token in request.stop_ids and request.num_output_tokens >= request.params.min_tokens:
        if token in request.params.stop_token_ids:
            request.stop_reason = token  # not for EOS, which is the default
        return FinishReason.STOP
    if len(request.token_ids) >= request.max_length:
        return FinishReason.LENGTH
    return None


MAX_SIZES = 32


@dataclass(slots=True)
class SchedulerCounters:
    """Totals of the scheduler since the start."""

    steps: int = 0  # plans with rows
    rows: int = 0  # requests, each counted in every step that computes for it
    scheduled_tokens: int = 0
    delivered_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    # [i] steps of more than 2^(i - 1) and up to 2^i tokens.
    step_sizes: list[int] = field(default_factory=lambda: [0] * MAX_SIZES)


@dataclass(slots=True)
class DraftCounts:
    """How many drafts were computed, and how many of them were accepted.

    The place of a draft is the number of drafts before it. In a tree only those on the path to it
    count, so drafts of the same depth have the same place."""

    rows: int = 0  # rows of steps (one per request) with drafts
    drafts: int = 0  # computed in these rows
    accepted: int = 0  # of these drafts
    at: list[int] = field(default_factory=list)  # [i] rows with at least one draft at place i
    # [i] rows with an accepted draft at place i, and so at all places before it.
    accepted_at: list[int] = field(default_factory=list)

    def add(self, drafts: int, accepted: int, places: int | None = None) -> None:
        """Count one row.

        Args:
            places: number of distinct places of its drafts, if they form a tree; None: one per
                draft.
        """
        if places is None:
            places = drafts
        self.rows += 1
        self.drafts += drafts
        self.accepted += accepted
        missing = places - len(self.at)
        if missing > 0:
            self.at += [0] * missing
            self.accepted_at += [0] * missing
        for i in range(places):
            self.at[i] += 1
        for i in range(accepted):
            self.accepted_at[i] += 1

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.rows + other.rows,
            self.drafts + other.drafts,
            self.accepted + other.accepted,
            [sum(pair) for pair in zip_longest(self.at, other.at, fillvalue=0)],
            [sum(pair) for pair in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)],
        )

    def copy(self) -> DraftCounts:
        return replace(self, at=self.at[:], accepted_at=self.accepted_at[:])

    @property
    def mean_length(self) -> float:
        """Tokens per row with drafts, the model's own included; 0.0 without rows."""
        return (self.accepted + self.rows) / self.rows if self.rows else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the drafts that were accepted."""
        return self.accepted / self.drafts if self.drafts else 0.0


@dataclass(slots=True)
class RequestSpeculation:
    """Results of speculation for one completion, or several together.

    The times cover decoding steps, with and without drafts, for which the time without drafts is
    known. It is unknown for steps with chunks of prompts, and until a step without drafts was
    measured. A step counts in full for each completion that decodes in it, since each waits for
    the whole step."""

    # How many were computed and accepted, by place.
    drafts: DraftCounts = field(default_factory=DraftCounts)
    seconds: float = 0.0  # duration of these steps, including making drafts
    # Duration of steps without drafts for the same tokens, one token per step, as measured recently
    # for the same number of requests. See `DraftTimes`.
    plain_seconds: float = 0.0

    @property
    def speedup(self) -> float | None:
        """Estimated speedup of its tokens over decoding without drafts; None if no step was
        measured. It may be below 1: drafts for other requests make a step longer too."""
        return self.plain_seconds / self.seconds if self.seconds else None

    def figures(self) -> dict[str, Any]:
        """Return what answers, traces and reports of a request say about its speculation."""
        drafts = self.drafts
        return {
            "checks": drafts.rows,
            "drafted_tokens": drafts.drafts,
            "accepted_tokens": drafts.accepted,
            "drafted_per_position": drafts.at,
            "accepted_per_position": drafts.accepted_at,
            "mean_accepted_length": drafts.mean_length if drafts.rows else None,
            "speedup": self.speedup,
        }

    def __add__(self, other: RequestSpeculation) -> RequestSpeculation:
        return RequestSpeculation(
            self.drafts + other.drafts,
            self.seconds + other.seconds,
            self.plain_seconds + other.plain_seconds,
        )


class RequestStatus(IntEnum):
    WAITING = 0  # in the queue, holds no blocks
    RUNNING = 1  # holds a slot and blocks
    PREEMPTED = 2  # back in the queue after losing its blocks
    FINISHED = 3
    LOADING = 4  # in the queue, waiting for pages of its prefix


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the caller went away
    DEADLINE = "deadline"  # the deadline passed
    ERROR = "error"  # per-request code failed; the message says how
    MOVED = "moved"  # another engine continues it


# How the hidden states of a prompt become one vector: their mean, the last, the first, or the
# maximum of each channel.
POOLINGS = ("mean", "last", "cls", "max")
SCORE = "score"  # given instead of a pooling: the result is the model's score of the prompt


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix of the prompt that stays in the prefix cache for a time, used or not."""

    num_tokens: int  # from the start of the prompt; only full blocks are pinned
    seconds: float  # since it was last computed or used


@dataclass(frozen=True, slots=True)
class PageSource:
    """Pages of a prompt that another engine keeps for a time."""

    # host, port: where it serves them.
    host: str
    port: int
    lease: str  # its name for them
    num_tokens: int  # how many tokens they hold, from the start of the request


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as it enters the engine, tokenised."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0  # smaller is more urgent
    cache_salt: str = ""  # requests share prefix blocks only under the same salt
    deadline: float | None = None  # engine-clock time after which the result is worthless
    tenant: str = ""  # tenants that share the engine get fair parts of it
    pins: tuple[Pin, ...] = ()  # in order of length
    pooling: str | None = None  # one of `POOLINGS`, or `SCORE`: the result is a vector, not text
    second_text: int = 0  # where the second text of a pair begins in the prompt; 0: it is one text
    lends: bool = False  # its pages stay for another engine when it has ended
    source: PageSource | None = None  # another engine has pages of it
    # The unfinished outputs of a request that another engine began.
    resumed: tuple[Handover, ...] = ()


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
    token_ids: MutableSequence[int]  # prompt, then the delivered output
    num_prompt_tokens: int
    max_length: int  # prompt + output never grow past this
    stop_ids: frozenset[int]
    seed: int
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    pooling: str | None = None  # see `EngineRequest`
    second_text: int = 0  # see `EngineRequest`
    tenant: str = ""  # see `EngineRequest`
    adapter: int = NO_ADAPTER  # slot of its adapter
    pins: tuple[Pin, ...] = ()  # not made yet; see `EngineRequest`
    leader: Request | None = None  # sibling 0, whose prompt blocks are shared
    lends: bool = False  # see `EngineRequest`
    source: PageSource | None = None  # see `EngineRequest`; None once the pages are not needed

    status: RequestStatus = RequestStatus.WAITING
    serial: int = -1  # order of arrival at the scheduler, breaks every tie
    slot: int = -1
    awaits_prefix: bool = False  # it waits only for a prefix that another request is computing
    last_step: int = -1  # the newest step with a row of this request
    num_computed_tokens: int = 0  # K/V written, or promised by steps in flight
    num_written_tokens: int = 0  # K/V written by steps whose results are known here
    num_pending_tokens: int = 0  # sampled by steps in flight, ids not known here yet
    num_draft_tokens: int = 0  # proposed for the next step; only the worker knows the ids
    num_uncovered_tokens: int = 0  # accepted drafts of its last step, which no state covers yet
    is_doubted: bool = False  # a row of it failed, so that no copy of its state is published
    speculation: RequestSpeculation | None = None  # so far; None: no speculation
    block_ids: list[list[int]] = field(default_factory=list)  # one table per KV group
    # Of the full blocks of token_ids; b"" for blocks that nothing will look up again.
    block_hashes: list[bytes] = field(default_factory=list)
    num_cut_tokens: int = 0  # computed tokens at the last cut, when layers with a budget drop some
    next_cut: int = NEVER  # computed tokens after which they drop some again
    num_metered_tokens: int = 0  # computed tokens whose work is counted
    num_charged_tokens: int = 0  # known tokens that its tenant was charged for or found cached
    num_lost_tokens: int = 0  # computed before a preemption
    num_committed_blocks: int = 0  # blocks that are published in the prefix cache
    order: tuple[float, int] = (0.0, 0)  # the policy's key: smaller is served first, evicted last
    num_shared_tokens: int = 0  # tokens whose blocks were cached when it last started
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first scheduling
    num_pinned_tokens: int = 0  # prompt tokens written by this request, and pinned
    num_preemptions: int = 0
    # Computed before, by this request until it was preempted or by the one that it continues, and
    # perhaps still cached or in a tier: also a partly filled last block.
    num_kept_tokens: int = 0
    is_beam: bool = False  # the next token of a beam; others may continue it
    takes_block: bool = False  # no other request needs the partly filled block that it continues
    rest: bytes = b""  # hash of the partly filled last block that an ended beam has published
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
    def continues_beam(self) -> bool:
        """Whether it computes the next token of a search that has begun."""
        return self.is_beam and self.num_output_tokens > 0

    @property
    def num_cacheable_tokens(self) -> int:
        """Known tokens that may come from the prefix cache. The last one is always computed, since
        its logits are needed, and so are tokens that predict a prompt token to be scored."""
        if self.pooling in ("mean", "cls", "max"):
            return 0
        limit = len(self.token_ids) - 1
        if self.params.prompt_logprobs is not None:
            limit = min(limit, max(0, self.params.prompt_logprobs_start - 1))
        return limit

    @property
    def num_unscheduled_tokens(self) -> int:
        """Known tokens that no step computes yet, those being sampled included: 1 if it decodes."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.index)


@dataclass(frozen=True, slots=True)
class PromptUse:
    """Tokens of a prompt by how their K/V came into the cache; the rest was computed."""

    num_cached_tokens: int  # found there
    num_pinned_tokens: int  # written and pinned


@dataclass(slots=True)  # not frozen: one per row and step, and five times faster to make
class RequestDelta:
    """What one step added to one request, or why the request ended."""

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
    refused: str | None = None  # the limit of the queue that caused the refusal
    prompt: PromptUse | None = None  # with the first token
    resendable: bool = False  # it was lost with its engine, and may be sent again
    complete: bool = False  # it stopped because its structured text is complete, without stop token
    page_source: PageSource | None = None  # with the last delta of a request that lends its pages
    handed: Handover | None = None  # with the last delta, if another engine continues it


def last_deltas(
    request_id: str,
    siblings: Iterable[int],
    now: float,
    error: str | None,
    *,
    reason: FinishReason = FinishReason.ERROR,
    refused: str | None = None,
) -> list[RequestDelta]:
    """Return the last deltas of siblings that end before they reach the scheduler."""
    report = RequestReport(now, None, None, now, 0, 0)
    return [
        RequestDelta(request_id, index, [], reason, error=error, report=report, refused=refused)
        for index in siblings
    ]


@dataclass(frozen=True, slots=True)
class Handover:
    """What another engine needs to know to continue one of the n outputs of a request."""

    output_token_ids: list[int]  # its tokens so far, all of them delivered
    seed: int  # seed of its tokens
    source: PageSource | None  # where the computed pages are; None: they are computed again
    report: RequestReport  # times and counts so far
    index: int = 0  # number of the output among the n


@dataclass(frozen=True, slots=True)
class RequestReport:
    """Times of a request, in seconds of the engine's clock, and its token counts."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    num_cached_tokens: int
    num_preemptions: int
    speculation: RequestSpeculation | None = None  # None: no speculation
    num_pinned_tokens: int = 0  # of the prompt, written and pinned by this request
    serial: int = -1  # the request's number since the engine started
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @classmethod
    def of(cls, request: Request, finished: float) -> RequestReport:
        names = [field.name for field in fields(cls) if field.name != "finished"]
        return cls(finished=finished, **{name: getattr(request, name) for name in names})
