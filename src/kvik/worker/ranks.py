"""Processes that compute one model together: what the first tells the others, and what they do.

The first process (rank 0) plans, samples and drafts alone. It lays a step's inputs out in memory
that all share and tells the others how large the step is. They have a share of every matrix and of
the heads of the cache, run the same recorded forward, and meet the first one in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from kvik.config.config import ResolvedConfig
from kvik.spec.declare import ForwardContext
from kvik.spec.shares import cut_groups
from kvik.worker.graphs import EngineNetwork
from kvik.worker.group import (
    MESSAGES,
    CopyBlocks,
    CopyStates,
    Enter,
    GiveBack,
    Message,
    MoveTokens,
    ReadLogits,
    RunStep,
    Seat,
)
from kvik.worker.loading import load_network
from kvik.worker.platforms import NativePlatform
from kvik.worker.step_inputs import StepSizes


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode((type(message).__name__, message))


def decode(data: bytes) -> Message:
    name, fields = msgspec.msgpack.decode(data)
    message: Message = msgspec.convert(fields, MESSAGES[name])
    return message


class Rank:
    """Another process than the first: its share of the model, and what it does with it."""

    def __init__(self, config: ResolvedConfig, seat: Seat) -> None:
        """
        Raises:
            ModelError: the weights do not fit the spec.
        """
        torch.set_num_threads(1)
        runner, cache = config.runner, config.cache
        self._platform = NativePlatform(config, seat=seat)
        groups = cut_groups(cache.groups, seat.rank, seat.size)
        path = Path(runner.model_path)
        self._network: EngineNetwork = load_network(
            config, self._platform, config.model, path, groups, runner.quantization
        )
        trees = config.speculation is not None and config.speculation.trees
        self._tape = self._platform.tape(self._network, StepSizes.of_engine(config), trees=trees)
        assert self._platform.group is not None
        self._group = self._platform.group
        self._hidden = config.model.hidden_size, self._platform.parts.dtype

    @property
    def digest(self) -> str:
        """Of what was recorded; equal in all processes of a group."""
        return self._group.digest

    def serve(self, receive: Callable[[], bytes]) -> None:
        """Do what the first process tells, until it has gone.

        Raises:
            EOFError: from `receive`, when it has.
        """
        while True:
            message = decode(receive())
            with torch.inference_mode():
                self._do(message)

    def _do(self, message: Message) -> None:
        match message:
            case RunStep(tokens, seqs, samples):
                self._tape.native.replay(self._tape.recording, (tokens, seqs, samples))
            case CopyBlocks(pairs):
                self._network.copy_blocks(pairs)
            case CopyStates(pairs):
                self._network.copy_states(pairs)
            case MoveTokens(group, places):
                self._network.move(group, np.array(places, np.int64))
            case ReadLogits(rows):
                width, dtype = self._hidden
                self._group.begin()
                self._network.model.logits(self._group.take((rows, width), dtype))
            case Enter(ids, positions):
                self._group.begin()
                ctx = ForwardContext(torch.tensor(positions), (), ())
                self._network.model.enter(torch.tensor(ids), ctx)
            case GiveBack(blocks):
                self._platform.give_back(self._network.kv.storages, blocks)
