"""A step while it is planned."""

from __future__ import annotations

from kvik.core.plan import NewRequest
from kvik.core.types import Request


class Rows:
    """The rows of a step, and what the worker must be told before them."""

    __slots__ = (
        "chunks",
        "copies",
        "drafts",
        "made_room",
        "new_blocks",
        "new_requests",
        "preempted",
        "requests",
        "samples",
        "scheduled",
        "short",
        "slots",
    )

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.slots: list[int] = []
        self.scheduled: list[int] = []
        self.drafts: list[int] = []
        self.samples: list[bool] = []
        self.new_requests: list[NewRequest] = []
        self.new_blocks: list[tuple[int, int, list[int]]] = []  # slot, KV group, ids
        self.copies: list[tuple[int, int]] = []  # source block, target block
        self.chunks = 0  # rows that are part of a prompt
        self.made_room = False  # someone had to give way to another tenant before it began
        self.preempted = False  # someone lost his blocks to a row of this step
        self.short = False  # there were not blocks enough for all who would have had a row

    def extend(self, request: Request, new: list[list[int]]) -> None:
        """A running request was given blocks, per KV group."""
        self.new_blocks += [(request.slot, g, ids) for g, ids in enumerate(new)]

    def start(self, request: Request) -> None:
        """A request enters a slot, before anything of it is computed there."""
        self.new_requests.append(
            NewRequest(
                slot=request.slot,
                token_ids=request.token_ids[:],
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=[ids[:] for ids in request.block_ids],
                params=request.params,
                stop_ids=request.stop_ids,
                seed=request.seed,
                cache_salt=request.cache_salt,
                pooling=request.pooling,
            )
        )
