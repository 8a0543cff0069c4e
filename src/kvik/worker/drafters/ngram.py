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
        texts, counts = self._table.token_ids, self._table.num_tokens[rows.slots].tolist()
        found = []
        for slot, count, limit in zip(
            rows.slots.tolist(), counts, rows.limits.tolist(), strict=True
        ):
            text = texts[slot, :count]
            end = latest_match(text, self._min, self._max)
            found.append(continued(text, end, limit) if end else [])
        return Drafts.of(found)


def latest_match(text: NDArray[np.integer], shortest: int, longest: int) -> int:
    """Return where the longest possible run of the last tokens of a text ends that stands there
    before, at the latest such place: index of the token after it. 0 if fewer than `shortest` do.

    Args:
        text: [tokens].
    """
    found = (text[:-1] == text[-1]).nonzero()[0]  # where such a run ends, ascending
    if not len(found):
        return 0
    length = 1
    while length < longest and (len(found) > 1 or length < shortest):
        longer = found if found[0] >= length else found[1:]  # only the first can be too early
        longer = longer[text[longer - length] == text[-1 - length]]
        if not len(longer):
            break
        found, length = longer, length + 1
    return int(found[-1]) + 1 if length >= shortest else 0


def continued(text: NDArray[np.integer], start: int, most: int) -> list[int]:
    """So many tokens of a text from `start` on. At its end it goes on with what was just written,
    so a text that repeats itself is continued for ever.

    Args:
        text: [tokens]. start: below their number.
    """
    found: list[int] = text[start : start + most].tolist()
    while len(found) < most:
        found += found[: most - len(found)]
    return found
