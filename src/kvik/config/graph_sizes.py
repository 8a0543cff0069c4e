"""Sizes of the forwards that are captured on a GPU, and their memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

# Bytes that a driver keeps per kernel of a captured graph: arguments, launch, dependencies. An H200
# kept 3.1 KiB.
BYTES_PER_KERNEL = 4 << 10
# Bytes that all graphs share in addition to their tensors: the workspace of cuBLAS on the capturing
# stream (32 MiB on Hopper), parts of its sums, and the rounding of the allocator, whose segments
# are 20 MiB. With it, plans exceeded what was taken on an H200 by 8 to 13 % for floats, and by more
# for quantised weights. Capturing stops when the estimate is used up (`GraphMemory`).
POOL_BYTES = 256 << 20
KERNELS_PER_LAYER, OTHER_KERNELS = 16, 32  # launched by one forward
LONGEST = 64  # tokens of a row that one attention kernel supports (kernels/triton)


@dataclass(frozen=True, slots=True)
class GraphSize:
    """Size of a captured forward, which serves every smaller step of its kind."""

    rows: int  # number of requests
    tokens: int  # tokens of all requests
    longest: int  # most tokens of one request
    samples: int  # rows of logits
    tree: bool = False  # whether the tokens of a row form a tree

    def serves(self, rows: int, tokens: int, longest: int, samples: int, *, tree: bool) -> bool:
        """Return whether a step can be padded to this size. Each padding request takes one token;
        the other padding tokens belong to no request."""
        return (
            rows <= self.rows
            and tokens + self.rows - rows <= self.tokens
            and longest <= self.longest
            and samples <= self.samples
            and tree == self.tree
        )


def decoding_sizes(max_num_seqs: int) -> tuple[GraphSize, ...]:
    """Return the sizes of steps with one token per request: powers of two up to 8, then multiples
    of 8. Padding then adds an eighth at most on average, and weights are read once anyway."""
    counts = itertools.chain(*_decoding_counts(max_num_seqs))
    return tuple(GraphSize(n, n, 1, n) for n in counts)


def num_decoding_sizes(max_num_seqs: int) -> int:
    """Return the number of `decoding_sizes`, the last of which is the largest, without creating
    them: a planner calls this thousands of times."""
    return sum(map(len, _decoding_counts(max_num_seqs)))


def _decoding_counts(max_num_seqs: int) -> tuple[Sequence[int], ...]:
    small = [size for size in (1, 2, 4) if size < max_num_seqs]
    return small, range(8, max_num_seqs, 8), (max_num_seqs,)


def drafting_sizes(
    max_num_seqs: int, draft_tokens: int, max_draft_rows: int, *, tree: bool
) -> tuple[GraphSize, ...]:
    """Return the sizes of steps that verify drafts: powers of two of requests, and of drafts per
    request on average. A single request may have the maximum number of drafts in each of them.

    Args:
        draft_tokens: maximum number of drafts of a request.
        max_draft_rows: maximum number of drafts of all requests.
    """
    longest = min(1 + draft_tokens, LONGEST)
    sizes: dict[GraphSize, None] = {}
    for rows in _powers(max_num_seqs):
        for drafts in _powers(longest - 1):
            tokens = rows + min(rows * drafts, max_draft_rows)
            sizes[GraphSize(rows, tokens, longest, tokens, tree)] = None
    return tuple(sizes)


def catching_up_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[GraphSize, ...]:
    """Return the sizes of steps of a draft model whose drafts were all accepted: it has not yet
    seen the last draft and the token after it."""
    fitting = (rows for rows in _powers(max_num_seqs) if 2 * rows <= max_num_batched_tokens)
    return tuple(GraphSize(rows, 2 * rows, 2, rows) for rows in fitting)


def heads_sizes(max_num_seqs: int) -> tuple[GraphSize, ...]:
    """Return the sizes of steps of draft heads."""
    return tuple(GraphSize(rows, rows, 1, rows) for rows in _powers(max_num_seqs))


def _powers(limit: int) -> list[int]:
    """Return the powers of two below `limit`, and `limit`."""
    return [*(1 << i for i in range(limit.bit_length()) if 1 << i < limit), limit]


def graph_bytes(layers: int) -> int:
    """Return the bytes of one captured forward, without the memory shared by all."""
    return (KERNELS_PER_LAYER * layers + OTHER_KERNELS) * BYTES_PER_KERNEL
