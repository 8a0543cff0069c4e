"""How a reader drives a worker: plans, chunks, few rows of logits at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from kvik import launch
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.hardware import Gpu, Hardware
from kvik.config.memory import PROMPT_ROWS
from kvik.core.plan import SchedulerOutput
from kvik.errors import ConfigError
from kvik.evaluate.windows import Reader, Window, check_room, read_together, resolve_reader

WINDOW = 200
VOCAB = 2048


@pytest.fixture(scope="module")
def resolved() -> ResolvedConfig:
    config = EngineConfig(device="cpu", threads=1, max_num_batched_tokens=70, block_size=16)
    return resolve_reader(config, WINDOW)


def test_no_memory_is_put_aside_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked of a server: nothing that reads is captured."""
    gpus = (Gpu(0, "H100", 80 << 30, 78 << 30, (9, 0)),)
    there = Hardware("PC", 8, 16 << 30, "RAM", frozenset(), gpus=gpus, triton=True)
    monkeypatch.setattr(launch, "find_gpus", lambda: gpus)
    monkeypatch.setattr(launch, "detect", lambda found: there)
    config = EngineConfig(graph_memory=8 << 30)
    assert launch.resolve_config(config).runner.graph_sizes
    runner = resolve_reader(config, WINDOW).runner
    assert (runner.kernels, runner.graph_sizes, runner.graph_memory) == ("triton", (), 0)


@dataclass
class Positions:
    """A worker whose hidden states are positions, and whose logits name them."""

    plans: list[SchedulerOutput] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    position: int = 0

    def read(self, plan: SchedulerOutput) -> Tensor:
        self.plans.append(plan)
        if plan.new_requests:
            self.position = 0
        (count,) = plan.num_scheduled_tokens
        hidden = torch.arange(self.position, self.position + count)[:, None]
        self.position += count
        return hidden  # [tokens, 1]

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        return hidden.float().expand(-1, VOCAB)


def test_a_window_is_read_in_chunks_and_scored_in_pieces(resolved: ResolvedConfig) -> None:
    model = Positions()
    reader = Reader(resolved, model)
    ids = tuple(range(1000, 1000 + WINDOW))
    pieces = list(read_together([reader], Window(ids, 90)))
    assert [plan.num_scheduled_tokens for plan in model.plans] == [[70], [70], [59]]
    assert all(plan.slots == [0] and plan.samples == [False] for plan in model.plans)
    (new,) = model.plans[0].new_requests
    assert (new.token_ids, new.num_computed_tokens) == (list(ids), 0)
    assert [len(plan.new_requests) for plan in model.plans] == [1, 0, 0]
    assert max(model.rows) <= PROMPT_ROWS and sum(model.rows) == WINDOW - 90
    assert torch.cat([piece.ids for piece in pieces]).tolist() == list(ids[90:])
    seen = torch.cat([piece.logits[0][:, 0] for piece in pieces])
    assert seen.tolist() == list(range(89, WINDOW - 1))  # each from the position before it


def test_every_window_begins_with_an_empty_slot(resolved: ResolvedConfig) -> None:
    model = Positions()
    reader = Reader(resolved, model)
    for length in (WINDOW, 3, 2):
        list(read_together([reader], Window(tuple(range(length)), 1)))
    begun = [plan for plan in model.plans if plan.new_requests]
    assert [plan.freed_slots for plan in begun] == [[], [0], [0]]
    assert [plan.step for plan in model.plans] == list(range(len(model.plans)))


def test_the_blocks_of_a_window_are_there(resolved: ResolvedConfig) -> None:
    new = Reader(resolved, Positions()).begin(range(WINDOW))
    used = [block for group in new.block_ids for block in group]
    assert len(new.block_ids) == len(resolved.cache.groups)
    assert len(set(used)) == len(used) == len(resolved.cache.groups) * -(-WINDOW // 16)
    assert min(used) == 1 and max(used) == resolved.cache.num_blocks - 1
    assert resolved.scheduler.max_num_seqs == 1


def test_models_take_the_chunks_that_both_can(resolved: ResolvedConfig) -> None:
    small = replace(resolved, scheduler=replace(resolved.scheduler, max_num_batched_tokens=33))
    models = (Positions(), Positions())
    readers = [Reader(resolved, models[0]), Reader(small, models[1])]
    for piece in read_together(readers, Window(tuple(range(WINDOW)), 1)):
        assert torch.equal(piece.logits[0], piece.logits[1])
        assert piece.logits[0].shape == (len(piece.ids), VOCAB)
    for model in models:
        assert max(plan.num_tokens for plan in model.plans) == 33


def test_two_models_that_do_not_fit_together_are_refused(resolved: ResolvedConfig) -> None:
    half = resolved.memory.limit * 6 // 10
    large = replace(resolved, memory=replace(resolved.memory, weights=half))
    check_room(large, resolved)
    with pytest.raises(ConfigError, match=r"reference: and the model take .* together, of .*"):
        check_room(large, large)
    check_room(large, replace(large, runner=replace(large.runner, device="cuda:0")))
