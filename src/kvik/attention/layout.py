"""The layout of a step: its tokens, sequences and blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.frozen import frozen
from kvik.kernels.ops import Sequences


@frozen
class StepLayout:
    """The tokens of one step and their places in the KV cache."""

    query_start_loc: Tensor  # [num_seqs + 1] int32, first token of each sequence in the flat batch
    seq_lens: Tensor  # [num_seqs] int32, keys of each sequence once this step's tokens are written
    block_table: Tensor  # [num_seqs, max_blocks] int32 for one KV group, padded with 0
    # [tokens] int64, KV position of each token: block_id * block_size + offset.
    slot_mapping: Tensor
    num_scheduled: tuple[int, ...]  # query length of each sequence, on the host
    contexts: tuple[int, ...]  # seq_lens on the host
    block_size: int
    # [tokens] int64, or None where no sequence has a tree. 0 for tokens of plain sequences. The
    # tokens of a tree's sequence are its nodes: bit j of a token's word is set if the j-th node is
    # the token itself or one of its ancestors. A node of depth d (d ancestors in the tree) attends
    # as if only its path followed the cached keys: its position is that of the first node plus d,
    # and a window counts from there.
    tree: Tensor | None = None
    tree_words: tuple[int, ...] = ()  # tree on the host
    # [num_seqs] int32, row of each sequence's state, or of its last queries; None: no layer keeps
    # any.
    state_rows: Tensor | None = None
    # state_pending, state_drafts: [num_seqs] int32, see `Sequences`; None: states have no drafts.
    state_pending: Tensor | None = None
    state_drafts: Tensor | None = None
    # [num_seqs] int32, the first key of each sequence that its queries see; None: 0, or as the
    # window says.
    first_keys: Tensor | None = None
    firsts: tuple[int, ...] = ()  # first_keys on the host; (): None
    # [tokens] int64, number of each token's adapter, or `NO_ADAPTER`; None: no token has one.
    adapters: Tensor | None = None

    def first_key(self, sequence: int) -> int:
        """Return the first key that the queries of a sequence see, apart from windows."""
        return self.firsts[sequence] if self.firsts else 0

    def slots(self, sequence: int) -> Tensor:
        """Return the KV positions of the keys of a sequence, [keys] int64."""
        return self.slots_of(sequence, range(self.contexts[sequence]))

    def slots_of(self, sequence: int, tokens: range) -> Tensor:
        """Return the KV positions of some tokens of a sequence, [tokens] int64."""
        stop = max(tokens.start, tokens.stop)
        device = self.slot_mapping.device
        places = torch.arange(tokens.start, stop, tokens.step, device=device)
        blocks = self.block_table[sequence].index_select(0, places // self.block_size)
        return blocks.long() * self.block_size + places % self.block_size

    @property
    def sequences(self) -> Sequences:
        """Return the sequences for layers that keep a state."""
        assert self.state_rows is not None
        places = self.query_start_loc, self.seq_lens, self.state_rows
        longest = max(self.num_scheduled, default=0)
        return Sequences(*places, longest, self.state_pending, self.state_drafts)

    def nodes(self, start: int, length: int) -> tuple[int, ...]:
        """Return the words of the tree of the tokens from `start` on; empty without a tree."""
        words = self.tree_words[start : start + length]
        return words if words and words[0] else ()
