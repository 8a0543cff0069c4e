"""Tokens and blocks for guesses: what a step has left when everything known has its place.

Drafts are work that may be in vain, so they preempt nobody. They take part of a step's token budget
behind the next tokens of all decoding requests, and blocks behind all rows of the step.
"""

from __future__ import annotations

from kvik.core.kv_manager import KVCacheManager
from kvik.core.rows import Rows
from kvik.core.work import WorkMeter


def wish_drafts(rows: Rows, row: int, budget: int) -> int:
    """Note how many drafts a decoding row is to have, within its request's length and `budget`
    tokens. Returns how many; `place_drafts` decides whether there are blocks for them."""
    request = rows.requests[row]
    room = request.max_length - len(request.token_ids) - 1
    rows.drafts[row] = min(request.num_draft_tokens, room, budget)
    return rows.drafts[row]


def place_drafts(rows: Rows, kv: KVCacheManager, meter: WorkMeter) -> None:
    """Add the drafts that were wished for to the rows, once all rows have their blocks. Where too
    few blocks are left, drafts beyond those that their request holds are dropped."""
    for row, wished in enumerate(rows.drafts):
        if not wished:
            continue
        request, drafts = rows.requests[row], wished
        places = len(request.block_ids[0]) * kv.block_size - request.num_computed_tokens
        if drafts > places:
            new = kv.extend(request, request.num_computed_tokens + drafts)
            if new is None:
                drafts = places
            else:
                rows.extend(request, new)
        rows.drafts[row] = drafts
        rows.scheduled[row] += drafts
        request.num_computed_tokens += drafts
        request.num_pending_tokens += drafts
        meter.drafts(request, 1 + drafts)


def look_ahead(rows: Rows, kv: KVCacheManager, num_tokens: int) -> None:
    """Places for what a drafter computes beyond the step, if there are blocks to spare."""
    for request, samples in zip(rows.requests, rows.samples, strict=True):
        if samples and request.params.speculation:
            end = min(request.num_computed_tokens + num_tokens, request.max_length)
            if end > len(request.block_ids[0]) * kv.block_size:
                new = kv.extend(request, end)
                if new is not None:
                    rows.extend(request, new)
