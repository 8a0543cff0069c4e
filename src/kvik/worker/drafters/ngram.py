"""Prompt lookup: what followed when the last tokens stood there before (Saxena 2023).

The whole text of a request is searched in every step, with vector instructions. That costs a few
microseconds, grows with the text as the model's attention does, only far slower, and needs neither
memory nor an index that would have to be made when a long prompt comes in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvik.worker.drafters.base import DraftRows, Drafts
from kvik.worker.request_table import RequestTable

_Ids = NDArray[np.int64]


class NgramDrafter:
    def __init__(self, table: RequestTable, min_ngram: int, max_ngram: int) -> None:
        """
        Args:
            min_ngram, max_ngram: how many tokens at the end of a text must, and at most are to, be
                found in it.
        """
        self._table = table
        self._min, self._max = min_ngram, max_ngram

    def enter(self, slot: int) -> None:
        """Nothing is kept of a request."""

    def leave(self, slot: int) -> None:
        """Nothing was."""

    def propose(self, rows: DraftRows) -> Drafts:
        counts = self._table.num_tokens[rows.slots].astype(np.int64)
        texts = self._table.token_ids
        ends = latest_matches(texts, rows.slots, counts, self._min, self._max)
        found = continued(texts, rows.slots, counts, ends, int(rows.limits.max())).tolist()
        return Drafts(
            [
                tokens[:limit] if end else []
                for tokens, limit, end in zip(
                    found, rows.limits.tolist(), ends.tolist(), strict=True
                )
            ]
        )


def latest_matches(
    texts: NDArray[np.integer], slots: _Ids, counts: _Ids, shortest: int, longest: int
) -> _Ids:
    """Where in each text the longest possible run of its last tokens ends that stands there before,
    at the latest such place: [rows], index of the token after it. 0 if fewer than `shortest` do.

    Args:
        texts: [slots, tokens]. slots, counts: [rows], a text is the first tokens of its slot.
    """
    newest = texts[slots, counts - 1]
    places = [
        (texts[slot, : count - 1] == token).nonzero()[0]
        for slot, count, token in zip(slots.tolist(), counts.tolist(), newest, strict=True)
    ]
    rows = np.arange(len(slots)).repeat([len(found) for found in places])
    last = np.concatenate(places)  # [matches], where the newest token of each's row stands
    back = np.arange(1, longest)  # before the newest token
    before = last[:, None] - back  # [matches, longest - 1]
    tails = texts[slots[:, None], counts[:, None] - 1 - back]  # [rows, longest - 1]
    same = texts[slots[rows, None], before] == tails[rows]
    same &= before >= 0
    lengths = 1 + np.logical_and.accumulate(same, axis=1).sum(axis=1)
    best = np.zeros(len(slots), np.int64)
    np.maximum.at(best, rows, lengths * texts.shape[1] + last)
    length, end = np.divmod(best, texts.shape[1])
    ends: _Ids = np.where(length >= shortest, end + 1, 0)
    return ends


def continued(
    texts: NDArray[np.integer], slots: _Ids, counts: _Ids, starts: _Ids, most: int
) -> NDArray[np.integer]:
    """[rows, most], the tokens of each text from `starts` on. At its end it goes on with what was
    just written, so a text that repeats itself is continued for ever.

    Args:
        texts, slots, counts: see `latest_matches`. starts: [rows], below the counts.
    """
    places = starts[:, None] + np.arange(most) % (counts - starts)[:, None]
    found: NDArray[np.integer] = texts[slots[:, None], places]
    return found
