"""Which decoding rows are padded to a common width, so that little time goes into padding."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 16  # keys; see `DecodeRow.padded_width`
MAX_PADDING = 1024  # padded keys of a batch: about what the calls of one more batch cost
MAX_KEYS = 16384  # gathered keys of a batch with several rows: bounds the workspace


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One query.

    Attributes:
        seq, token: index of its sequence, and its own in the flat batch.
        first, visible: the first position that it sees, and how many.
        path: of a tree's node, where the last of these stand: the sequence's places of the path to
            the node, in place of the positions themselves.
    """

    seq: int
    token: int
    first: int
    visible: int
    path: tuple[int, ...] = ()

    @property
    def padded_width(self) -> int:
        """Whole vectors only: with a partial last vector, torch's kernels sum a row in another
        order when it is padded further, and the result would depend on the row's companions."""
        return -(-self.visible // ALIGNMENT) * ALIGNMENT


def split(rows: list[DecodeRow]) -> list[list[DecodeRow]]:
    """Batches of rows, the widest row of each first unless all rows share one batch.

    A batch grows, from wide rows to narrow ones, until its padding or its size is at the limit.
    """
    batches: list[list[DecodeRow]] = []
    width = padding = 0
    for row in sorted(rows, key=lambda row: row.padded_width, reverse=True):
        padding += width - row.padded_width
        full = not batches or padding > MAX_PADDING or (len(batches[-1]) + 1) * width > MAX_KEYS
        if full:
            batches.append([])
            width, padding = row.padded_width, 0
        batches[-1].append(row)
    return [rows] if len(batches) == 1 else batches
