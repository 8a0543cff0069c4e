"""Embeddings from the hidden states of chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvik.core.plan import ModelRunnerOutput, NewRequest, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.worker.graphs import StepOutput
from kvik.worker.input_batch import build_input_batch
from kvik.worker.model_runner import RunningStep
from kvik.worker.prompt_outputs import Pooling
from kvik.worker.request_table import RequestTable
from kvik.worker.step_inputs import AtOnce, FreshInputs

HIDDEN = 48
LENGTH = 200


class Rig:
    """Slots of requests with given hidden states."""

    def __init__(self) -> None:
        self.table = RequestTable(4, 256, 1, 16)
        network: Any = SimpleNamespace(pooling=None, pooled=None)
        self.pooling = Pooling(network, AtOnce())

    def enter(self, slot: int, pooling: str | None, length: int = LENGTH, computed: int = 0):
        blocks = [list(range(1, 17))]
        params = SamplingParams()
        new = NewRequest(
            slot, [1] * length, length, computed, blocks, params, frozenset(), 0, pooling=pooling
        )
        self.table.add(new)
        self.pooling.enter(new)

    def step(self, rows: dict[int, Tensor], errors: dict[int, str] | None = None):
        """Pool a chunk for each of some slots."""
        slots, sizes = list(rows), [len(hidden) for hidden in rows.values()]
        plan = SchedulerOutput(0, slots, sizes, [0] * len(slots), [False] * len(slots))
        batch = build_input_batch(plan, self.table, FreshInputs(torch.device("cpu")))
        self.table.num_computed[slots] += np.array(sizes, np.int32)
        hidden = torch.cat(list(rows.values()))
        output = StepOutput(hidden, *[torch.empty(0)] * 3)
        result = ModelRunnerOutput(0, [], errors={} if errors is None else errors)
        step = RunningStep(plan, 0.0, batch, result, output)
        self.pooling.read(step, self.pooling.launch(step))
        return result.embeddings


@pytest.fixture
def hidden() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(LENGTH, HIDDEN, generator=generator) * 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_has_the_same_bits_for_all_chunk_sizes(hidden, dtype):
    hidden = hidden.to(dtype)
    found = []
    for chunk in (1, 7, 64, 65, LENGTH):
        rig = Rig()
        rig.enter(2, "mean")
        parts = hidden.split(chunk)
        assert all(rig.step({2: part}) == {} for part in parts[:-1])
        found.append(rig.step({2: parts[-1]})[0])
    assert all(vector == found[0] for vector in found)
    wanted = hidden.double().mean(0).float()
    torch.testing.assert_close(torch.tensor(found[0]), wanted, atol=0, rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 64, LENGTH])
def test_the_first_the_last_and_the_largest(hidden, chunk):
    rig = Rig()
    wanted = {"cls": hidden[0], "last": hidden[-1], "max": hidden.amax(0)}
    for slot, kind in enumerate(wanted):
        rig.enter(slot, kind)
    for part in hidden.split(chunk):
        found = rig.step(dict.fromkeys(range(3), part))
    assert found == {row: vector.tolist() for row, vector in enumerate(wanted.values())}


def test_rows_of_a_step_are_pooled_separately(hidden):
    rig = Rig()
    rig.enter(0, None)
    rig.enter(1, "last", length=30, computed=16)
    rig.enter(3, "mean", length=5)
    found = rig.step({0: hidden[:9], 1: hidden[10:24], 3: hidden[30:35]})
    assert sorted(found) == [1, 2]
    assert found[1] == hidden[23].tolist()
    torch.testing.assert_close(torch.tensor(found[2]), hidden[30:35].mean(0))


def test_a_preempted_request_restarts_its_pooling(hidden):
    rig = Rig()
    rig.enter(0, "mean", length=50)
    rig.step({0: hidden[100:130]})
    rig.pooling.leave(0)
    rig.enter(0, "mean", length=50)
    rig.step({0: hidden[:30]})
    found = rig.step({0: hidden[30:50]})[0]
    torch.testing.assert_close(torch.tensor(found), hidden[:50].mean(0))
    rig.pooling.leave(0)
    rig.enter(0, None)
    assert rig.step({0: hidden}) == {}


def test_an_error_of_one_request_affects_no_other(hidden):
    rig = Rig()
    for slot in range(3):
        rig.enter(slot, "mean", length=4)
    rig.pooling._requests[1].sums = np.zeros(HIDDEN + 1)  # only a bug could cause this
    errors = {0: "it was set up wrongly"}
    found = rig.step(dict.fromkeys(range(3), hidden[:4]), errors)
    assert sorted(found) == [2]
    assert errors[0] == "it was set up wrongly" and errors[1].startswith("ValueError: ")
