"""Stages of a pipeline that are threads of one process. Needs no native module."""

from __future__ import annotations

import queue
import threading
from contextlib import nullcontext
from dataclasses import replace

import torch

from kvik.config.config import ResolvedConfig
from kvik.spec.shares import PipelineStage
from kvik.worker.group import IdleStep, Message, decode, encode
from kvik.worker.ranks import LeadingRank

SECONDS = 60.0  # limit of each wait for other threads


class ThreadStages:
    """Replaces `StageProcesses`."""

    lost, cores = "", ()

    def __init__(self, resolved: ResolvedConfig, launcher: object) -> None:
        self._resolved, self._stages = resolved, resolved.runner.stages[:-1]
        self._inboxes: list[queue.Queue[bytes]] = [queue.Queue() for _ in self._stages]
        self._hops: list[queue.Queue[bytes]] = [queue.Queue() for _ in self._stages]
        self._replies: queue.Queue[bytes] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._serve, args=[stage]) for stage in self._stages
        ]

    def load(self) -> None:
        for thread in self._threads:
            thread.start()

    def _serve(self, stage: PipelineStage) -> None:
        number, ranks = stage.number, None
        config = replace(self._resolved, runner=self._resolved.runner.of_stage(stage))

        def receive() -> Message:
            if not (data := self._inboxes[number].get()):
                raise EOFError
            return decode(data)

        def entered() -> bytes:
            return self._hops[number - 1].get(timeout=SECONDS) if number else b""

        try:
            if config.runner.ranks > 1:
                from kvik.rank_process import RankProcesses

                ranks = RankProcesses(config, stage)
            loading = nullcontext() if ranks is None else ranks.loading()
            with torch.inference_mode(), loading as setup:
                rank = LeadingRank(config, stage, setup)
            self._replies.put(b"")
            leave = self._hops[number].put
            rank.lead(receive, self._replies.put, entered, lambda data: leave(bytes(data)))
        except EOFError:
            pass
        except BaseException as error:
            self._replies.put(repr(error).encode())
            raise
        finally:
            if ranks is not None:
                ranks.stop()

    def wait_loaded(self) -> None:
        replies = {self._replies.get(timeout=SECONDS) for _ in self._stages}
        assert replies == {b""}, replies

    def send(self, message: Message) -> None:
        for inbox in self._inboxes:
            inbox.put(encode(message))

    def ask(self, message: Message) -> None:
        self.send(message)
        self.wait_loaded()

    def idle_step(self) -> bool:
        self.send(IdleStep())
        return bool(b"".join(self._replies.get(timeout=SECONDS) for _ in self._stages))

    def entered(self) -> bytes:
        return self._hops[-1].get(timeout=SECONDS)

    def give_up(self, reason: str) -> None:
        raise AssertionError(reason)

    def stop(self) -> None:
        for inbox in self._inboxes:
            inbox.put(b"")
        for thread in self._threads:
            thread.join(SECONDS)
