"""Decoding steps as replays: same bits as without, and a capture that fails harms nobody."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.captured import captured_steps
from helpers.matrix import (
    BUNDLED,
    MODELS,
    SQUEEZED,
    Column,
    make_model,
    params_with_logprobs,
    run_column,
)
from helpers.optional_native import needs_native

from kvik.config.graph_sizes import graph_sizes
from kvik.config.model_source import BUNDLED as STORIES
from kvik.worker.cuda_graphs import OFTEN, SHARE, DecodeGraphs
from kvik.worker.device_inputs import DeviceInputs
from kvik.worker.graphs import StepOutput
from kvik.worker.step_inputs import FreshInputs, StepSizes

CPU = torch.device("cpu")
REFERENCE = {"dtype": "float32", "kernels": "native", "attention_backend": "reference"}
COLUMNS = [
    Column("batch"),
    Column("preemption", SQUEEZED, must="preemptions"),
    Column("two steps in flight, siblings", siblings=2, in_flight=2),
]


@needs_native
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_logprobs_are_the_same_to_the_bit(name, column, tmp_path) -> None:
    model, sampling = make_model(name, tmp_path), params_with_logprobs(column.siblings)
    right = run_column(column, sampling, model, **REFERENCE)
    with captured_steps(1, 2, 4, 8, 16) as made:
        found = run_column(column, sampling, model, **REFERENCE)
    ((graphs, again),) = made
    assert again.replayed > OFTEN and len(graphs.captured) >= 1
    for output, expected in zip(found, right, strict=True):
        assert output.prompt_logprobs == expected.prompt_logprobs
        for completion, wanted in zip(output.completions, expected.completions, strict=True):
            assert completion.token_ids == wanted.token_ids
            assert completion.logprobs == wanted.logprobs


DRAFTERS = {
    "lookup": {"spec_method": "ngram"},
    "a model": {
        "spec_method": "draft_model",
        "spec_model": str(STORIES.parent / "stories-draft"),
        "spec_tokens": 3,
        "speculative_config": {"adaptive": False},
    },
}


@needs_native
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_the_same_with_drafts(drafter) -> None:
    """A draft model's steps are replayed; those that judge drafts run eagerly."""
    column = Column("drafts", {"max_num_batched_tokens": 64, "max_num_seqs": 8})
    options = {**REFERENCE, **DRAFTERS[drafter]}
    sampling, model = params_with_logprobs(), {"model": BUNDLED}
    right = run_column(column, sampling, model, **REFERENCE)
    with captured_steps(1, 2, 4, 8) as made:
        found = run_column(column, sampling, model, **options)
    assert max(again.replayed for _, again in made) > OFTEN
    if drafter == "a model":
        assert len(made) == 2
        assert sum(output.num_accepted_tokens for output in found) > 0
    for output, expected in zip(found, right, strict=True):
        assert output.completions[0].token_ids == expected.completions[0].token_ids


# ------------------------------------------------------------------ when what is captured


class Network:
    """The output tells what was computed: each token's id and position."""

    groups = (None,)

    def forward(self, input_ids, positions, layouts, logits_indices) -> StepOutput:
        hidden = torch.stack((input_ids, positions), 1).float()
        logits = hidden.index_select(0, logits_indices)
        return StepOutput(hidden, logits, *logits.max(-1))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Taking:
    """Captures take a second, or fail."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.fails = False
        self.replays = 0

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        if self.fails:
            raise RuntimeError("no room for a graph")
        call()
        self.clock.now += 1.0

        def replay() -> None:
            self.replays += 1
            call()

        return replay


class Rig:
    def __init__(self, *sizes: int) -> None:
        self.clock = Clock()
        self.capturer = Taking(self.clock)
        self.inputs = DeviceInputs(StepSizes(64, 17, 18), 1, 8, CPU, sizes[-1])
        self.graphs = DecodeGraphs(Network(), self.inputs, self.capturer, sizes, 4, 32, self.clock)

    def step(self, rows: int, tokens: int = 1) -> None:
        """A step of rows of so many tokens; its output must be that of its own inputs."""
        self.graphs.prepare()
        ids = np.arange(rows * tokens) + 5
        put = self.inputs.put
        starts = np.arange(rows + 1) * tokens
        put("query_start_loc", starts.astype(np.int32))
        put("seq_lens", np.full(rows, 9, np.int32))
        put("block_table 0", np.ones((rows, 3), np.int32))
        put("slot_mapping 0", ids)
        batch = SimpleNamespace(
            input_ids=put("input_ids", ids),
            positions=put("positions", ids + 100),
            logits_indices=put("logits_indices", starts[1:] - 1),
            slots=np.arange(rows),
            layouts=[SimpleNamespace(tree=None)],
        )
        self.inputs.send()
        output = self.graphs.run(batch)
        assert output.hidden.tolist() == [[i, i + 100] for i in ids.tolist()]
        last = ids.reshape(rows, tokens)[:, -1]
        assert (
            output.top.tolist() == (last + 100).tolist() and output.top_ids.tolist() == [1] * rows
        )

    def steps(self, count: int, rows: int) -> None:
        for _ in range(count):
            self.step(rows)

    @property
    def captured(self) -> list[int]:
        return list(self.graphs.captured)


def test_what_runs_often_is_captured_first_and_capturing_takes_little_time() -> None:
    rig = Rig(1, 2, 4, 8)
    rig.steps(OFTEN, 3)
    assert rig.captured == [] and rig.clock.now == 0  # the first steps just run
    rig.step(3)
    assert rig.captured == [4] and rig.capturer.replays == 1
    rig.steps(OFTEN + 1, 7)
    rig.steps(OFTEN + 3, 1)
    assert rig.captured == [4]  # it is not time
    rig.clock.now += 1 / SHARE
    rig.step(1)
    assert rig.captured == [4, 1]
    rig.clock.now += 1 / SHARE
    rig.step(8)
    assert rig.captured == [4, 1, 8]
    replays = rig.capturer.replays
    rig.step(2)  # as 4
    rig.step(8)
    assert rig.capturer.replays == replays + 2
    rig.step(2, tokens=3)
    rig.steps(OFTEN, 12)
    assert rig.capturer.replays == replays + 2 and rig.captured == [4, 1, 8]


def test_a_step_is_not_padded_too_far() -> None:
    rig = Rig(1, 2, 4, 8, 16)
    rig.steps(OFTEN + 1, 16)
    assert rig.captured == [16] and rig.capturer.replays == 1
    rig.step(5)
    assert rig.capturer.replays == 2
    rig.step(4)
    assert rig.capturer.replays == 2


def test_what_cannot_be_captured_runs_eagerly(caplog) -> None:
    rig = Rig(1, 2, 4)
    rig.steps(OFTEN + 1, 2)
    rig.capturer.fails = True
    rig.clock.now += 1 / SHARE
    rig.steps(3 * OFTEN, 4)
    rig.steps(3 * OFTEN, 1)
    (record,) = caplog.records
    assert "run eagerly" in record.message and "no room" in record.exc_text
    assert rig.captured == [2]
    rig.step(2)
    assert rig.capturer.replays > 1


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_the_ladder_ends_with_the_largest_step(most: int, expected: tuple[int, ...]) -> None:
    assert graph_sizes(most) == expected


# ------------------------------------------------------------------ inputs at fixed places


def test_inputs_are_sent_together_and_padded() -> None:
    inputs = DeviceInputs(StepSizes(12, 5, 6), 2, 4, CPU, 4, trees=True)
    fresh = FreshInputs(CPU)
    arrays = {
        "query_start_loc": np.array([0, 1, 2], np.int32),
        "seq_lens": np.array([3, 5], np.int32),
        "block_table 1": np.array([[1, 2], [3, 4]], np.int32),
        "slot_mapping 1": np.array([7, 9]),
        "input_ids": np.array([40, 41]),
        "logits_indices": np.array([0, 1]),
        "tree": np.array([1, 1]),
    }
    for _ in range(2):
        put = {name: inputs.put(name, array) for name, array in arrays.items()}
        inputs.send()
        for name, array in arrays.items():
            expected = fresh.put(name, array)
            assert torch.equal(put[name], expected) and put[name].dtype == expected.dtype
        # again after a larger step
        inputs.put("input_ids", np.arange(12))
        inputs.put("seq_lens", np.arange(1, 6).astype(np.int32))
        inputs.put("slot_mapping 1", np.arange(12))
        assert put["input_ids"].tolist() == [40, 41]  # until it is sent
        inputs.send()
        assert inputs.whole("input_ids", 12).tolist() == list(range(12))
    for name, array in arrays.items():
        inputs.put(name, array)
    inputs.send()
    assert inputs.whole("input_ids", 4).tolist() == [40, 41, 0, 0]
    assert inputs.whole("seq_lens", 4).tolist() == [3, 5, 0, 0]
    assert inputs.whole("slot_mapping 1", 4).tolist() == [7, 9, -1, -1]
    assert inputs.whole("query_start_loc", 5).tolist() == [0, 1, 2, 3, 4]
    assert inputs.whole("logits_indices", 4).tolist() == [0, 1, 2, 3]
    assert inputs.whole("block_table 1", 2).tolist() == [[1, 2, 0, 0], [3, 4, 0, 0]]
    with pytest.raises(ValueError, match="input_ids has room for 12, not 13"):
        inputs.put("input_ids", np.arange(13))
