"""A loaded model that reads: windows of tokens go in, the logits of each position come out.

The plans are made here, for one request in one slot; everything below them is what serves users:
kernels, weight and KV formats, chunks, replayed graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.memory import PROMPT_ROWS
from kvik.config.units import show_bytes
from kvik.core.plan import NewRequest, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.errors import ConfigError
from kvik.evaluate.windows import Window
from kvik.launch import load_worker, resolve_config


class EvaluatedModel(Protocol):
    """What a reader needs of a worker."""

    def read(self, plan: SchedulerOutput) -> Tensor:
        """[tokens, hidden] of the plan's tokens, valid until the next call."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] fp32."""
        ...

    def enter(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Tokens [rows] at positions [rows], as the model takes them in: [rows, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive positions of a window.

    Attributes:
        ids: [rows] int64, the token that came at each.
        logits: of each model [rows, vocab], what it expected there.
    """

    ids: Tensor
    logits: tuple[Tensor, ...]


class Reader:
    """One model, which reads one window at a time."""

    def __init__(self, resolved: ResolvedConfig, model: EvaluatedModel) -> None:
        self.resolved = resolved
        self.model = model
        self.tokens_at_once = resolved.scheduler.max_num_batched_tokens
        self._step = 0
        self._used = False

    def begin(self, ids: Sequence[int]) -> NewRequest:
        """A request for these tokens, whatever was read before forgotten."""
        cache = self.resolved.cache
        count = -(-len(ids) // cache.block_size)
        blocks = [
            list(range(1 + group * count, 1 + (group + 1) * count))
            for group in range(len(cache.groups))
        ]
        params = SamplingParams(temperature=0.0)
        return NewRequest(0, list(ids), len(ids), 0, blocks, params, frozenset(), 0)

    def read(self, ids: Sequence[int], start: int, end: int) -> Tensor:
        """Tokens [start, end) of a window whose tokens before `start` were read by the calls
        before. Returns [end - start, hidden], valid until the next call."""
        first = start == 0
        plan = SchedulerOutput(
            step=self._step,
            slots=[0],
            num_scheduled_tokens=[end - start],
            num_draft_tokens=[0],
            samples=[False],
            new_requests=[self.begin(ids)] if first else [],
            freed_slots=[0] if first and self._used else [],
        )
        self._step += 1
        self._used = True
        return self.model.read(plan)


def longest_window(config: EngineConfig) -> int:
    """Tokens that the model, or the user, lets a reader read at once. Nothing is loaded."""
    return resolve_config(_for_one(config)).scheduler.max_model_len


def resolve_reader(config: EngineConfig, window: int) -> ResolvedConfig:
    """A reader of windows: one request, and the KV blocks of a window.

    Raises:
        KvikError: the model cannot be used, or does not fit.
    """
    wanted = replace(_for_one(config), max_model_len=window)
    groups = len(resolve_config(wanted).cache.groups)
    num_blocks = 1 + groups * -(-window // config.block_size)
    return resolve_config(replace(wanted, num_blocks=num_blocks))


@contextmanager
def loaded_reader(resolved: ResolvedConfig) -> Iterator[Reader]:
    """The model in memory, freed at the end."""
    worker = load_worker(resolved)
    try:
        yield Reader(resolved, worker)
    finally:
        worker.stop()


def check_room(resolved: ResolvedConfig, reference: ResolvedConfig) -> None:
    """Raises ConfigError when both are on one device and together do not fit it."""
    if resolved.runner.device != reference.runner.device:
        return
    needed = resolved.memory.total + reference.memory.total
    limit = min(resolved.memory.limit, reference.memory.limit)
    if needed > limit:
        raise ConfigError(
            "reference",
            f"and the model take {show_bytes(needed)} together, of {show_bytes(limit)} allowed; "
            "without it there is perplexity alone",
        )


def read_together(readers: Sequence[Reader], window: Window) -> Iterator[Piece]:
    """All models read a window in step, so that no more than a few rows of logits are in memory.

    The window's last token predicts nothing that is scored, so it is not read.
    """
    ids, end = window.token_ids, len(window.token_ids) - 1
    chunk = min(reader.tokens_at_once for reader in readers)
    targets = torch.tensor(ids)
    for start in range(0, end, chunk):
        stop = min(start + chunk, end)
        hidden = [reader.read(ids, start, stop) for reader in readers]
        for row in range(max(start, window.first_scored - 1), stop, PROMPT_ROWS):
            last = min(row + PROMPT_ROWS, stop)
            logits = [
                reader.model.logits(states[row - start : last - start])
                for reader, states in zip(readers, hidden, strict=True)
            ]
            yield Piece(
                targets[row + 1 : last + 1].to(logits[0].device),
                (logits[0], *(other.to(logits[0].device) for other in logits[1:])),
            )


def _for_one(config: EngineConfig) -> EngineConfig:
    return replace(
        config,
        max_num_seqs=1,
        num_blocks=None,
        kv_cache_memory=None,
        graph_memory=0,  # what reads is no decoding step, and never captured
        speculative_config=None,
        spec_method=None,
        spec_model=None,
        spec_tokens=None,
    )
