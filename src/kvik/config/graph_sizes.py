"""Which forwards are captured on a GPU, and what that takes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

# What a driver keeps of a kernel in a captured graph: its arguments, its launch, and its place
# among the others. Not measured yet; a guess on the safe side. No more is captured than what it
# comes to (`GraphMemory`).
BYTES_PER_KERNEL = 16 << 10
# What all graphs share beside their tensors: the workspace of cuBLAS on the stream that captures
# (32 MiB on Hopper), and what the allocator takes more than it is asked for, in segments of 20 MiB.
POOL_BYTES = 96 << 20
KERNELS_PER_LAYER, OTHER_KERNELS = 16, 32  # launched by one forward
LONGEST = 64  # tokens of a row, which attention takes by one kernel (kernels/triton)


@dataclass(frozen=True, slots=True)
class GraphSize:
    """Of a captured forward, which serves whatever is no larger.

    Attributes:
        rows: requests. tokens: of all of them. longest: of one of them.
        samples: rows of logits.
        tree: the tokens of a row are those of a tree, if it has several.
    """

    rows: int
    tokens: int
    longest: int
    samples: int
    tree: bool = False

    def serves(self, rows: int, tokens: int, longest: int, samples: int, *, tree: bool) -> bool:
        """Whether a step of this kind can be padded to it. Each request of padding takes a token,
        and what is left belongs to none."""
        return (
            rows <= self.rows
            and tokens + self.rows - rows <= self.tokens
            and longest <= self.longest
            and samples <= self.samples
            and tree == self.tree
        )


def decoding_sizes(max_num_seqs: int) -> tuple[GraphSize, ...]:
    """Of one token a request: powers of two up to 8, then multiples of it. Above, padding adds an
    eighth at most on average, and weights are read once whatever the size."""
    counts = itertools.chain(*_decoding_counts(max_num_seqs))
    return tuple(GraphSize(n, n, 1, n) for n in counts)


def num_decoding_sizes(max_num_seqs: int) -> int:
    """How many there are, of which the last is the largest. A planner asks for thousands of
    requests, thousands of times, so none is made."""
    return sum(map(len, _decoding_counts(max_num_seqs)))


def _decoding_counts(max_num_seqs: int) -> tuple[Sequence[int], ...]:
    small = [size for size in (1, 2, 4) if size < max_num_seqs]
    return small, range(8, max_num_seqs, 8), (max_num_seqs,)


def drafting_sizes(
    max_num_seqs: int, draft_tokens: int, max_draft_rows: int, *, tree: bool
) -> tuple[GraphSize, ...]:
    """Of steps that judge drafts: powers of two of requests, and of drafts for each on average. A
    single request may have all that it ever gets, whatever the others have.

    Args:
        draft_tokens: most drafts of a request. max_draft_rows: of all of them.
    """
    longest = min(1 + draft_tokens, LONGEST)
    sizes: dict[GraphSize, None] = {}
    for rows in _powers(max_num_seqs):
        for drafts in _powers(longest - 1):
            tokens = rows + min(rows * drafts, max_draft_rows)
            sizes[GraphSize(rows, tokens, longest, tokens, tree)] = None
    return tuple(sizes)


def catching_up_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[GraphSize, ...]:
    """Of a draft model all of whose drafts were right: it lacks the last one and the token after
    it."""
    fitting = (rows for rows in _powers(max_num_seqs) if 2 * rows <= max_num_batched_tokens)
    return tuple(GraphSize(rows, 2 * rows, 2, rows) for rows in fitting)


def heads_sizes(max_num_seqs: int) -> tuple[GraphSize, ...]:
    """Of draft heads."""
    return tuple(GraphSize(rows, rows, 1, rows) for rows in _powers(max_num_seqs))


def _powers(most: int) -> list[int]:
    """Of two, below the most, and that."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


def graph_bytes(layers: int) -> int:
    """Of one captured forward, beside the memory that all share."""
    return (KERNELS_PER_LAYER * layers + OTHER_KERNELS) * BYTES_PER_KERNEL
