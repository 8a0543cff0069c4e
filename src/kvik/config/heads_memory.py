"""How many bytes draft heads take, before they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from kvik.config.draft_heads import MEDUSA, HeadsSpec
from kvik.config.graph_sizes import graph_bytes
from kvik.config.model_spec import DTYPE_BYTES
from kvik.config.step_memory import LOGIT_BYTES

# Of one row of logits while the likeliest are looked for, a value and an index each; and in how
# many rows at once.
RANKED_BYTES, RANKED_ROWS = 16, 16


@dataclass(frozen=True, slots=True)
class HeadsFootprint:
    """Heads are never quantised, and run through Python.

    Attributes:
        drafts: most of a request in one step.
    """

    spec: HeadsSpec
    dtype: str
    drafts: int

    @property
    def weights(self) -> int:
        spec, hidden = self.spec, self.spec.hidden_size
        if spec.kind == MEDUSA:
            each = spec.layers * (hidden * hidden + hidden)
            each += hidden * spec.vocab_size if spec.own_logits else 0
            return spec.depth * each * DTYPE_BYTES[self.dtype]
        joined = 2 * hidden * hidden + hidden
        return (joined + hidden + 3 * hidden * spec.inner_size) * DTYPE_BYTES[self.dtype]

    @property
    def graph(self) -> int:
        """Captured once: a layer or two for each depth at which tokens are guessed."""
        return graph_bytes(2 * self.spec.depth)

    def step(self, rows: int) -> int:
        """Peak of drafting for so many requests at once."""
        spec, hidden, item = self.spec, self.spec.hidden_size, DTYPE_BYTES[self.dtype]
        if spec.kind == MEDUSA:
            guesses = rows * spec.depth
            widths = 5 * hidden  # before, inside and after a block, and put together
            copies = 2 if spec.own_logits else 1  # of logits: of each head, and put together
        else:
            # Nodes that have children are at most half of a tree, but for a chain's.
            guesses = rows * max(1, self.drafts // 2)
            widths = 7 * hidden + 3 * spec.inner_size
            copies = 1
        logits = copies * guesses * LOGIT_BYTES + min(guesses, RANKED_ROWS) * RANKED_BYTES
        return rows * hidden * item + guesses * widths * item + logits * spec.vocab_size
