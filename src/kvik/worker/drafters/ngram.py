"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens (Saxena
2023).

Every step searches the whole text of a request with vector instructions. That takes a few
microseconds and grows with the text far more slowly than attention does. It needs no memory, and no
index that would have to be built for a long prompt.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.request_table import RequestTable


class NgramDrafter(Drafter):
    def __init__(self, table: RequestTable, min_ngram: int, max_ngram: int) -> None:
        """
        Args:
            min_ngram, max_ngram: least and most tokens at the end of a text to search for.
        """
        self._table = table
        self._min, self._max = min_ngram, max_ngram

    def propose(self, rows: DraftRows) -> Drafts:
        texts, counts = self._table.token_ids, self._table.num_tokens[rows.slots].tolist()
        drafts = []
        for slot, count, limit in zip(
            rows.slots.tolist(), counts, rows.limits.tolist(), strict=True
        ):
            text = texts[slot, :count]
            end = latest_match(text, self._min, self._max)
            drafts.append(continued(text, end, limit) if end else [])
        return Drafts.of(drafts)


def latest_match(text: NDArray[np.integer], shortest: int, longest: int) -> int:
    """Find the latest earlier occurrence of the longest possible run of a text's last tokens.

    Returns:
        The index of the token after it; 0 if no run of at least `shortest` tokens occurs.

    Args:
        text: [tokens].
    """
    ends = (text[:-1] == text[-1]).nonzero()[0]  # where such a run ends, ascending
    if not len(ends):
        return 0
    length = 1
    while length < longest and (len(ends) > 1 or length < shortest):
        longer = ends if ends[0] >= length else ends[1:]  # only the first can be too early
        longer = longer[text[longer - length] == text[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return int(ends[-1]) + 1 if length >= shortest else 0


def continued(text: NDArray[np.integer], start: int, count: int) -> list[int]:
    """Return `count` tokens of a text from `start` on. Beyond its end the text continues with the
    returned tokens, so a periodic text continues endlessly.

    Args:
        text: [tokens]. start: below their number.
    """
    tokens: list[int] = text[start : start + count].tolist()
    while len(tokens) < count:
        tokens += tokens[: count - len(tokens)]
    return tokens
