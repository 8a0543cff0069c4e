"""What an idle engine runs so that no request waits for it to be compiled: steps of nothing.

Triton compiles a kernel when it is first launched, for the types and constants of that launch, and
keeps it on disk: seconds once on a machine, some hundredths in each process after that. So while
nobody asks for anything, a step is run for each class of lengths for which other kernels run; its
tokens are stored nowhere. What is asked meanwhile waits for one of these steps at most, which
compiles what it would have compiled itself. An engine without idle time (`LLM`) compiles what its
requests need, and nothing else.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from kvik.attention.base import StepLayout
from kvik.kernels.draws import Draws, Truncation
from kvik.kernels.ops import Ops
from kvik.worker.graphs import Network

log = logging.getLogger(__name__)


class Resting(Protocol):
    def rest(self) -> bool:
        """See `Graph.rest`."""
        ...


class WarmUp:
    """Calls, one for each moment of rest."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._calls = deque(calls)

    def rest(self) -> bool:
        if self._calls:
            try:
                self._calls.popleft()()
            except Exception:  # nothing depends on it: requests may be luckier, or be told
                self._calls.clear()
                log.warning("kernels are compiled when they are first needed", exc_info=True)
        return bool(self._calls)


def forwards(network: Network, lengths: Sequence[int], block_size: int, max_context: int) -> WarmUp:
    """Steps of one request of so many tokens, behind no others and behind as many as there may be:
    which kernels run depends on both.

    Args:
        lengths: none exceeds max_context.
    """
    return WarmUp(
        [
            partial(_forward, network, length, block_size, context, max_context)
            for length in lengths
            for context in sorted({length, max_context})
        ]
    )


def _forward(
    network: Network, length: int, block_size: int, context: int, max_context: int
) -> None:
    """The device is told of a request without others before it, whose keys nobody has written: what
    it attends to lies in block 0, which is nobody's. Only the host believes in the context."""
    device = network.kv[0].k.device
    layout = StepLayout(
        query_start_loc=torch.tensor([0, length], dtype=torch.int32, device=device),
        seq_lens=torch.full((1,), length, dtype=torch.int32, device=device),
        block_table=torch.zeros(1, -(-max_context // block_size), dtype=torch.int32, device=device),
        slot_mapping=torch.full((length,), -1, dtype=torch.int64, device=device),
        num_scheduled=(length,),
        contexts=(context,),
        block_size=block_size,
    )
    network.forward(
        torch.zeros(length, dtype=torch.int64, device=device),
        torch.arange(length, device=device),
        [layout] * len(network.groups),
        torch.full((1,), length - 1, dtype=torch.int64, device=device),
    )


def draws(ops: Ops, vocab_size: int, device: torch.device) -> WarmUp:
    """Tokens of a row of equal logits, by the rules that requests have most: a temperature alone,
    top_p, top_k and top_p."""
    top_k = torch.full((1,), 20, dtype=torch.int64, device=device)
    top_p = torch.full((1,), 0.9, dtype=torch.float64, device=device)
    rules = (Truncation(), Truncation(top_p=top_p), Truncation(top_k=top_k, top_p=top_p))

    def draw(rule: Truncation) -> None:
        logits = torch.zeros(1, vocab_size, device=device)
        temperature = torch.ones(1, device=device)
        ops.draw(
            logits, Draws(temperature, torch.zeros(1, dtype=torch.float64, device=device), rule)
        )

    return WarmUp([partial(draw, rule) for rule in rules])
