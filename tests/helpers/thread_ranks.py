"""A group whose ranks are threads of one process, which exchange tensors in memory, not by gloo."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers.thread_stages import SECONDS, ThreadStages
from torch import Tensor

from kvik.config.config import ResolvedConfig
from kvik.kernels.torch_group import TorchGroup
from kvik.spec.shares import PipelineStage
from kvik.worker.group import GroupMember, Message, RankSetup, decode, encode
from kvik.worker.ranks import make_rank


class Board:
    """The tensors that threads exchange, one for each thread."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.parts: list[Any] = [None] * size


class ThreadGroup(TorchGroup):
    def __init__(self, board: Board, rank: int) -> None:
        super().__init__(None, rank, len(board.parts))
        self._board = board

    def gather(self, own: Tensor) -> Tensor:
        return torch.stack(self._exchanged(own))

    def spread(self, tensor: Tensor) -> Tensor:
        first = self._exchanged(tensor)[0]
        return tensor if tensor is first else tensor.copy_(first)

    def swap(self, parts: Tensor) -> Tensor:
        return torch.stack([others[self.rank] for others in self._exchanged(parts)])

    def _exchanged(self, own: Tensor) -> list[Tensor]:
        board = self._board
        board.parts[self.rank] = own
        board.barrier.wait()
        parts = list(board.parts)
        board.barrier.wait()  # all have read the parts before any thread replaces its own
        return parts


class ThreadRanks:
    """Replaces `RankProcesses`."""

    lost = ""
    boards: ClassVar[dict[int, Board]] = {}
    numbers = count()

    def __init__(
        self, resolved: ResolvedConfig, stage: PipelineStage | None, cores: Sequence[int] = ()
    ) -> None:
        self._resolved, self._size, self._stage = resolved, resolved.runner.ranks, stage
        self._number = next(self.numbers)
        self.boards[self._number] = Board(self._size)
        self._inboxes: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(1, self._size)]
        self._digests: queue.Queue[object] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self._group: GroupMember | None = None
        self._error: BaseException | None = None

    @contextmanager
    def loading(self) -> Iterator[RankSetup]:
        none = np.zeros(0, np.uint8)
        for rank in range(1, self._size):
            runner = replace(self._resolved.runner, device=self._resolved.runner.device_of(rank))
            config = replace(self._resolved, runner=runner)
            setup = RankSetup(rank, self._size, none, file=str(self._number))
            self._threads.append(threading.Thread(target=self._serve, args=(config, setup)))
            self._threads[-1].start()
        try:
            yield RankSetup(0, self._size, none, self, str(self._number))
        except BaseException:
            self.stop()
            raise

    def _serve(self, config: ResolvedConfig, setup: RankSetup) -> None:
        inbox = self._inboxes[setup.rank - 1]

        def receive() -> Message:
            if not (data := inbox.get()):
                raise EOFError
            return decode(data)

        try:
            with torch.inference_mode():
                rank = make_rank(config, setup, self._stage, None)
            self._digests.put(rank.digest)
            rank.serve(receive, lambda reply: None)
        except EOFError:
            pass
        except BaseException as error:
            self._digests.put(error)
            self._error = error
            self.boards[self._number].barrier.abort()

    def wait_loaded(self, group: GroupMember) -> None:
        self._group = group
        found = {self._digests.get(timeout=SECONDS) for _ in self._threads}
        assert found == {group.digest}, found

    def send(self, message: Message) -> None:
        for inbox in self._inboxes:
            inbox.put(encode(message))

    @contextmanager
    def jointly(self, message: Message) -> Iterator[None]:
        self.send(message)
        try:
            yield
        except threading.BrokenBarrierError:
            raise RuntimeError("a rank failed") from self._error

    def begin(self) -> None:
        pass

    def share(self, hidden: Tensor) -> Tensor:
        return self._group.share(hidden)

    def spread(self, hidden: Tensor) -> Tensor:
        return self._group.spread(hidden)

    def stop(self) -> None:
        for inbox in self._inboxes:
            inbox.put(b"")
        for thread in self._threads:
            thread.join(SECONDS)
        self.boards.pop(self._number, None)


def connect(device: object, file: str, rank: int, size: int, lost: object) -> TorchGroup:
    return ThreadGroup(ThreadRanks.boards[int(file)], rank)


def use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the ranks of new groups that exchange by torch, and the stages of new pipelines with
    torch's kernels, as threads."""
    monkeypatch.setattr("kvik.stage_process.StageProcesses", ThreadStages)
    monkeypatch.setattr("kvik.rank_process.RankProcesses", ThreadRanks)
    monkeypatch.setattr("kvik.kernels.torch_group.connect", connect)
