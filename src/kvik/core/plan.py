"""The interface between scheduler and worker: one step's plan and its result, in plain integers.

A plan is a diff. Workers keep each running request's tokens, block tables and parameters in a slot
of their own table, so a decoding row costs a few integers and sampled tokens are not sent back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import PageSource, TokenLogprobs
from kvik.frozen import frozen
from kvik.spec.adapters import NO_ADAPTER


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters (or re-enters) a slot, as the worker needs it."""

    slot: int
    token_ids: list[int]  # prompt and, after a preemption, the output so far
    num_prompt_tokens: int
    num_computed_tokens: int  # found in the cache: their K/V is not computed again
    block_ids: list[list[int]]  # per KV group
    params: SamplingParams
    stop_ids: frozenset[int]  # masked until min_tokens
    seed: int
    cache_salt: str = ""  # drafters use what they learn from it only for the same salt
    pooling: str | None = None  # see `EngineRequest`
    second_text: int = 0  # see `EngineRequest`
    adapter: int = NO_ADAPTER  # slot of its adapter


# Moves: copies of blocks between the KV cache and its tiers (`core/moves.py`).

# KV group, hash of the tokens up to the end of the page. The number after those of all groups is
# that of states: the state of a prefix is several pages, with hashes made of the prefix's.
PageKey = tuple[int, bytes]
NOWHERE = -1  # as a place: not in the memory tier
AT_PEER = -2  # as a place: in another engine
MEMORY, DISK, PEER = "memory", "disk", "peer"  # names of tiers
WAIT_SECONDS = 0.05  # that a plan of moves alone waits for loads; requests may arrive meanwhile


@frozen
class PageStore:
    """A block to store as a page, or a part of a row of the pool of states."""

    key: PageKey
    parent: bytes  # hash of the block before it, or of the prefix of a state
    block: int  # for states, row of the pool * number of pages of a state + number of the page
    place: int  # in the memory tier; `NOWHERE`: it is not stored there
    on_disk: bool  # whether to store it in the disk tier


@frozen
class PageLoad:
    """Pages to copy into blocks that no request uses until that is done."""

    ticket: int  # a unique number. A load that is sent again has the same ticket.
    # Key, block (see `PageStore`), and place in the memory tier; `NOWHERE`: it is read from the
    # disk tier; `AT_PEER`: from `source`.
    pages: list[tuple[PageKey, int, int]]
    source: PageSource | None = None


@frozen
class PageLease:
    """Pages of the memory tier that another engine may fetch.

    They stay where they are until the lease has ended."""

    name: str
    pages: list[tuple[PageKey, bytes, int]]  # key, hash of the block before, place


@frozen
class Moved:
    """Results of moves since the last step result."""

    # Tickets of loads that are done, each with the indices of pages that failed.
    loaded: list[tuple[int, list[int]]] = field(default_factory=list)
    stored: list[PageKey] = field(default_factory=list)  # pages that the disk tier has from now on
    # Pages that the disk tier does not have (any more).
    lost: list[PageKey] = field(default_factory=list)
    # Pages that were found in the disk tier, least recently used first.
    found: list[PageKey] = field(default_factory=list)
    # Of loads: tier, bytes, seconds.
    rates: list[tuple[str, int, float]] = field(default_factory=list)
    off: str = ""  # why the disk tier was turned off; "": it was not
    scanned: bool = False  # the listing of what the disk tier had at the start is complete
    address: tuple[str, int] | None = None  # where this engine serves pages to others; sent once
    # Leases that ended without a plan ending them.
    returned: list[str] = field(default_factory=list)


@frozen
class BudgetCut:
    """A move of the tokens that the layers of a group keep (`Budget`) to other blocks, once
    a request has computed more than that."""

    slot: int
    group: int
    end: int  # number of computed tokens
    first_key: int  # the kept tokens take the places from here up to `end`
    block_ids: list[int]  # new entries of the table, from block `first_key // block_size` on


@frozen
class SchedulerOutput:
    """One step. Row i of the step is the request in `slots[i]`.

    Order of application: `drops`, `ended_leases`, `stores`, `leases`, `sources`, `loads` (which
    continue while steps run), `left_sources`, `freed_slots`, `state_copies`, `new_requests`,
    `new_blocks`, `budget_cuts`, `block_copies`, forward. A cut reads blocks that later cuts, copies
    and the forward may write. A plan without rows has only moves, and its result waits for loads.
    """

    step: int
    slots: list[int]
    num_scheduled_tokens: list[int]
    num_draft_tokens: list[int]  # how many of the scheduled tokens are drafts
    samples: list[bool]  # the row reaches the end of what is known, so a token is sampled
    new_requests: list[NewRequest] = field(default_factory=list)
    new_blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)  # slot, group, ids
    freed_slots: list[int] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # source id, target id
    # Source and target rows of the pool of states, in order. The row of a running request is its
    # slot; the rows of checkpoints follow those of all slots.
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    budget_cuts: list[BudgetCut] = field(default_factory=list)
    drops: list[PageKey] = field(default_factory=list)  # pages of the disk tier to delete
    stores: list[PageStore] = field(default_factory=list)
    loads: list[PageLoad] = field(default_factory=list)
    leases: list[PageLease] = field(default_factory=list)
    ended_leases: list[str] = field(default_factory=list)
    sources: list[PageSource] = field(default_factory=list)  # must keep pages for requests
    left_sources: list[PageSource] = field(default_factory=list)  # need not keep them any longer

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)


@frozen
class DraftTimes:
    """Seconds of speculation in a step."""

    proposing: float  # time to make the drafts of the step, even if none result
    # `proposing` plus the step itself, without making drafts of the next one. 0.0 if no drafts were
    # made, the step had chunks of prompts, or `plain` is unknown.
    checking: float = 0.0
    plain: float = 0.0  # measured time of steps without drafts for the same number of tokens


@frozen
class GraphCounts:
    """CUDA graphs that are captured, and their memory."""

    captured: int  # number of graphs
    # taken, planned: bytes used, and bytes planned for them.
    taken: int
    planned: int


@dataclass(slots=True)
class ModelRunnerOutput:
    """The result of one step, row by row in the plan's order."""

    step: int
    token_ids: list[list[int]]  # accepted drafts + 1 for sampling rows, empty for others
    num_draft_tokens: list[int] | None = None  # proposed for each row's next step
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row
    embeddings: dict[int, list[float]] = field(default_factory=dict)  # by row, with its last token
    errors: dict[int, str] = field(default_factory=dict)  # rows whose own code failed
    # Rows whose structured text is complete with their last token.
    ended: set[int] = field(default_factory=set)
    seconds: float = 0.0  # of the step, including making drafts
    # Of the step without making drafts, plus the engine's work before it, if a row sampled and
    # there is speculation; else 0.0.
    turn_seconds: float = 0.0
    # None: no speculation, or the step neither had nor made drafts.
    draft_times: DraftTimes | None = None
    # If drafts form a tree: [n] is the depth of the first n drafts; None: each draft follows the
    # one before it.
    draft_places: Sequence[int] | None = None
    graphs: GraphCounts | None = None  # None: unchanged, or nothing is captured on this device
    # Number of compute threads from now on; None: unchanged, or no native kernels.
    threads: int | None = None
    moved: Moved | None = None  # results of moves; None: there are none
