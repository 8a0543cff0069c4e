"""Decoding steps as replays: same bits as without, and a capture that fails harms nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.captured import Again, captured_steps
from helpers.drafted_columns import EAGER, METHODS
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

from kvik.config import resolve
from kvik.config.graph_sizes import GraphSize, decoding_sizes
from kvik.config.kv_budget import KVBudgets, fingerprint_of, save_budgets
from kvik.config.model_source import BUNDLED as STORIES
from kvik.core.plan import GraphCounts
from kvik.model_files import model_files
from kvik.spec.kv import KVCacheSpec, group_layers
from kvik.spec.visible_keys import Budget
from kvik.worker.captures import (
    MIN_MISSES,
    NO_CAPTURE_PEERS,
    TIME_SHARE,
    Captured,
    CapturePeers,
    GraphMemory,
)
from kvik.worker.graphs import Eager, StepOutput
from kvik.worker.input_batch import StepTensors
from kvik.worker.replays import DecodeGraphs
from kvik.worker.step_inputs import DeviceInputs, FreshInputs, StepSizes

CPU = torch.device("cpu")
REFERENCE = {"dtype": "float32", "kernels": "native", "attention_backend": "reference"}
COLUMNS = [
    Column("batch"),
    Column("preemption", SQUEEZED, must="preemptions"),
    Column("two steps in flight, siblings", siblings=2, in_flight=2),
]


@pytest.mark.full
@needs_native
@pytest.mark.each(2)  # what a column adds hardly depends on the layers of a model
@pytest.mark.parametrize("name", [*MODELS, "adapted bundled"])
@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_logprobs_are_the_same_to_the_bit(name, column, tmp_path) -> None:
    model, sampling = make_model(name, tmp_path), params_with_logprobs(column.siblings)
    right = run_column(column, sampling, model, **REFERENCE)
    with captured_steps(1, 2, 4, 8, 16) as made:
        found = run_column(column, sampling, model, **REFERENCE)
    ((graphs, again),) = made
    assert again.replayed > MIN_MISSES and len(graphs.captured) >= 1
    for output, expected in zip(found, right, strict=True):
        assert output.prompt_logprobs == expected.prompt_logprobs
        for completion, wanted in zip(output.outputs, expected.outputs, strict=True):
            assert completion.token_ids == wanted.token_ids
            assert completion.logprobs == wanted.logprobs


@pytest.mark.full
@needs_native
def test_layers_with_budgets_begin_where_they_kept(tmp_path, monkeypatch) -> None:
    spec, file = model_files(Path(STORIES)).spec(), tmp_path / "b.json"
    facts = spec.architecture, fingerprint_of(spec), "entropy", 0.25, 160, "", 0
    layers = spec.num_layers
    scores, budgets = (1.0,) * layers, tuple(36 + 8 * (i % 2) for i in range(layers))
    save_budgets(KVBudgets(*facts, scores=scores, budgets=budgets), file)
    monkeypatch.setattr(resolve, "Budget", partial(Budget, every=6))
    model = {"model": BUNDLED, "kv_budget": str(file)}
    # Beams compute all of a text that was cut again, in every step.
    beams = {"num_beams": 1, "temperature": 0.0}
    sampling = [s.with_changes(**beams) if s.num_beams > 1 else s for s in params_with_logprobs()]
    right = run_column(COLUMNS[0], sampling, model, **REFERENCE)
    with captured_steps(1, 2, 4, 8, 16) as made:
        found = run_column(COLUMNS[0], sampling, model, **REFERENCE)
    ((_, again),) = made
    assert again.replayed > MIN_MISSES
    for output, expected in zip(found, right, strict=True):
        assert output.outputs[0].logprobs == expected.outputs[0].logprobs


@pytest.mark.full
@needs_native
@pytest.mark.parametrize("drafter", METHODS)
def test_steps_with_drafts_are_replayed(drafter, monkeypatch) -> None:
    """They say what steps without any say. So do those of the draft model that lacks two tokens."""
    column = Column("drafts", {"max_num_batched_tokens": 64, "max_num_seqs": 8})
    options = {**REFERENCE, **EAGER, **METHODS[drafter], "spec_method": drafter, "spec_tokens": 3}
    sampling, model = params_with_logprobs(), {"model": BUNDLED}
    right = run_column(column, sampling, model, **REFERENCE)
    eager: list[tuple[Eager, int]] = []  # and most tokens of a request
    forward = Eager.forward

    def noted(self: Eager, step: StepTensors) -> StepOutput:
        eager.append((self, max(step.layouts[0].num_scheduled)))
        return forward(self, step)

    monkeypatch.setattr(Eager, "forward", noted)
    heads: list[Again] = []
    with captured_steps(1, 2, 4, 8, drafts=3, heads=heads) as made:
        found = run_column(column, sampling, model, **options)
    assert (len(made), len(heads)) == (1 + (drafter == "draft_model"), drafter == "medusa")
    assert all(again.replayed > MIN_MISSES for again in heads)
    for (graphs, again), longest in zip(made, (4, 2), strict=False):
        assert again.replayed > MIN_MISSES and not graphs.idle_step()
        prompts = [tokens for runner, tokens in eager if runner is graphs._eager]
        assert prompts and min(prompts) > longest
    assert sum(output.num_accepted_tokens for output in found) > 0
    for output, expected in zip(found, right, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


# ------------------------------------------------------------------ when what is captured


MIB = 1 << 20
STEP = 70  # bytes


class Network:
    """The output tells what was computed: each token's id and position."""

    groups = group_layers([KVCacheSpec(1, 16, 64)])

    def forward(self, step: StepTensors) -> StepOutput:
        hidden = torch.stack((step.input_ids, step.positions), 1).float()
        logits = hidden.index_select(0, step.logits_indices)
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
        self.size = self.left = 1

    def capture(self, call: Callable[[], None], peers: CapturePeers = NO_CAPTURE_PEERS) -> Captured:
        if self.fails:
            raise RuntimeError("no room for a graph")
        call()
        self.clock.now += 1.0

        def replay() -> None:
            self.replays += 1
            call()

        return Captured(replay, self.size, self.left)


class Rig:
    def __init__(
        self, *sizes: int, judging: Sequence[GraphSize] = (), memory: int = 1 << 40
    ) -> None:
        self.clock = Clock()
        self.capturer = Taking(self.clock)
        ladder = [*(GraphSize(n, n, 1, n) for n in sizes), *judging]
        self.inputs = DeviceInputs(StepSizes(64, 17, 18), 1, 8, CPU, ladder)
        self.memory = GraphMemory(memory, STEP)
        self.graphs = DecodeGraphs(
            Network(), self.inputs, self.capturer, ladder, 4, 32, self.clock, self.memory
        )

    @property
    def output_bytes(self) -> int:
        output = self.graphs._output
        return sum(tensor.nbytes for tensor in output.tensors)

    def step(self, *lengths: int) -> None:
        """A step of rows of so many tokens; its output must be that of its own inputs."""
        self.graphs.prepare()
        rows = len(lengths)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        ids = np.arange(starts[-1]) + 5
        put = self.inputs.put
        put("query_start_loc", starts.astype(np.int32))
        put("seq_lens", np.full(rows, 9, np.int32))
        put("block_table 0", np.ones((rows, 3), np.int32))
        put("slot_mapping 0", ids)
        step = StepTensors(
            put("input_ids", ids),
            put("positions", ids + 100),
            (SimpleNamespace(tree=None, num_scheduled=lengths),),
            put("logits_indices", starts[1:] - 1),
        )
        self.inputs.send()
        output = self.graphs.forward(step)
        assert output.hidden.tolist() == [[i, i + 100] for i in ids.tolist()]
        last = ids[starts[1:] - 1]
        assert (
            output.top.tolist() == (last + 100).tolist() and output.top_ids.tolist() == [1] * rows
        )

    def steps(self, count: int, rows: int) -> None:
        for _ in range(count):
            self.step(*[1] * rows)

    @property
    def captured(self) -> list[int]:
        return [size.tokens for size in self.graphs.captured]


def test_frequent_sizes_are_captured_first_within_a_share_of_time() -> None:
    rig = Rig(1, 2, 4, 8)
    rig.steps(MIN_MISSES, 3)
    assert rig.captured == [] and rig.clock.now == 0  # the first steps just run
    rig.steps(1, 3)
    assert rig.captured == [4] and rig.capturer.replays == 1
    rig.steps(MIN_MISSES + 1, 7)
    rig.steps(MIN_MISSES + 3, 1)
    assert rig.captured == [4]  # it is not time
    rig.clock.now += 1 / TIME_SHARE
    rig.steps(1, 1)
    assert rig.captured == [4, 1]
    rig.clock.now += 1 / TIME_SHARE
    rig.steps(1, 8)
    assert rig.captured == [4, 1, 8]
    replays = rig.capturer.replays
    rig.steps(1, 2)  # as 4
    rig.steps(1, 8)
    assert rig.capturer.replays == replays + 2
    rig.step(3, 3)
    rig.steps(MIN_MISSES, 12)
    assert rig.capturer.replays == replays + 2 and rig.captured == [4, 1, 8]


def test_rows_of_several_tokens_share_captured_sizes() -> None:
    rig = Rig(4, judging=[GraphSize(4, 10, 4, 10)])
    while rig.graphs.idle_step():
        pass
    for lengths in ((1, 4), (2, 2, 2), (4, 1, 1, 4), (3, 1, 1), (1, 1, 1)):
        rig.step(*lengths)
    assert rig.capturer.replays == 5
    rig.step(4, 4, 1)  # with one of padding it just fits
    assert rig.capturer.replays == 6
    for lengths in ((5, 1), (4, 4, 2), (1, 1, 1, 1, 2)):
        rig.step(*lengths)
    assert rig.capturer.replays == 6


def test_an_idle_engine_captures_all_there_is() -> None:
    rig = Rig(1, 2, 4, 8)
    rig.steps(1, 3)
    assert [rig.graphs.idle_step() for _ in range(5)] == [True, True, True, False, False]
    assert rig.captured == [8, 4, 1, 2]  # in the memory of the largest; then what was missed
    rig.steps(1, 3)
    assert rig.capturer.replays == 1


def test_an_idle_engine_stops_after_a_failed_capture(caplog) -> None:
    rig = Rig(1, 2, 4)
    assert rig.graphs.idle_step()
    rig.capturer.fails = True
    assert not rig.graphs.idle_step() and not rig.graphs.idle_step()
    assert len(caplog.records) == 1 and rig.captured == [4]


def test_a_step_is_not_padded_too_far() -> None:
    rig = Rig(1, 2, 4, 8, 16)
    rig.steps(MIN_MISSES + 1, 16)
    assert rig.captured == [16] and rig.capturer.replays == 1
    rig.steps(1, 5)
    assert rig.capturer.replays == 2
    rig.steps(1, 4)
    assert rig.capturer.replays == 2


def test_a_size_that_cannot_be_captured_runs_eagerly(caplog) -> None:
    rig = Rig(1, 2, 4)
    rig.steps(MIN_MISSES + 1, 2)
    rig.capturer.fails = True
    rig.clock.now += 1 / TIME_SHARE
    rig.steps(3 * MIN_MISSES, 4)
    rig.steps(3 * MIN_MISSES, 1)
    (record,) = caplog.records
    assert "run eagerly" in record.message and "no room" in record.exc_text
    assert rig.captured == [2]
    rig.steps(1, 2)
    assert rig.capturer.replays > 1


def test_no_more_is_captured_than_the_plan_put_aside(caplog) -> None:
    """Whatever a graph really takes. The first one brings the memory that all share."""
    rig = Rig(1, 2, 4, 8, 12, 16, memory=1000 * MIB)
    rig.capturer.size = 600 * MIB
    assert rig.graphs.idle_step()
    rig.capturer.size = 150 * MIB
    assert [rig.graphs.idle_step() for _ in range(4)] == [True, True, False, False]
    assert rig.captured == [16, 1, 2]  # one more would not fit
    assert rig.memory.used == 900 * MIB + rig.output_bytes > 900 * MIB
    (record,) = caplog.records
    for part in ("3 CUDA graphs take 900.0 MiB", "one more about 150.0", "1000.0 MiB are planned"):
        assert part in record.message
    assert "graph_memory" in record.message
    rig.steps(1, 2)
    rig.steps(1, 12)  # as 16
    assert rig.capturer.replays == 2
    rig.clock.now += 1 / TIME_SHARE
    rig.steps(3 * MIN_MISSES, 3)  # it is too small for that
    assert rig.capturer.replays == 2 and len(rig.captured) == 3 and len(caplog.records) == 1


@pytest.mark.parametrize(("left", "kept"), [(STEP, [2]), (STEP - 1, [])])
def test_a_graph_that_is_far_too_large_is_not_kept(caplog, left: int, kept) -> None:
    rig = Rig(2, 8, memory=1000)
    rig.capturer.size, rig.capturer.left = 5000, left  # more than anybody thought
    rig.steps(MIN_MISSES + 1, 2)
    assert rig.captured == kept and rig.capturer.replays == len(kept)
    rig.clock.now += 1 / TIME_SHARE
    rig.steps(2 * MIN_MISSES, 7)
    assert rig.captured == kept and rig.memory.used == 5000 * len(kept) + rig.output_bytes
    (record,) = caplog.records  # of one that was kept nobody knows what others will take
    assert not rig.graphs.idle_step() and ("one more about" in record.message) == (not kept)
    assert len(caplog.records) == 1


def test_memory_of_graphs_is_reported_once_after_each_change() -> None:
    memory = GraphMemory(100, 0)
    assert memory.changes() == GraphCounts(0, 0, 100) and memory.changes() is None
    memory.keep(30)
    memory.keep(0)
    assert memory.changes() == GraphCounts(2, 30, 100) and memory.changes() is None
    memory.share(5)
    assert memory.changes() == GraphCounts(2, 35, 100) and memory.changes() is None


def test_the_output_that_all_write_to_is_counted_once() -> None:
    """It is planned for with the graphs, and allocated outside of what a capture takes."""
    first = Rig(4)
    assert not first.graphs.idle_step() and first.memory.used == 1 + first.output_bytes
    for left, captured in ((300, [4, 1, 2]), (299, [4, 1])):
        rig = Rig(1, 2, 4, memory=600 + first.output_bytes + left)
        rig.capturer.size = 300
        assert [rig.graphs.idle_step() for _ in range(3)] == [True, True, False]
        assert rig.captured == captured


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
    assert [size.rows for size in decoding_sizes(most)] == list(expected)


# ------------------------------------------------------------------ inputs at fixed places


def test_inputs_are_sent_together_and_padded() -> None:
    captured = [GraphSize(4, 4, 1, 4), GraphSize(2, 6, 3, 5, tree=True)]
    inputs = DeviceInputs(StepSizes(12, 5, 6, trees=True), 2, 4, CPU, captured)
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
        assert inputs.padded("input_ids", 12).tolist() == list(range(12))
    for name, array in arrays.items():
        inputs.put(name, array)
    inputs.send()
    assert inputs.padded("input_ids", 6).tolist() == [40, 41, 0, 0, 0, 0]
    assert inputs.padded("tree", 6).tolist() == [1, 1, 0, 0, 0, 0]
    assert inputs.padded("seq_lens", 4).tolist() == [3, 5, 0, 0]
    assert inputs.padded("slot_mapping 1", 6).tolist() == [7, 9, -1, -1, -1, -1]
    assert inputs.padded("query_start_loc", 5).tolist() == [0, 1, 2, 3, 4]
    assert inputs.padded("logits_indices", 5).tolist() == [0, 1, 0, 0, 0]
    assert inputs.padded("block_table 1", 2).tolist() == [[1, 2, 0, 0], [3, 4, 0, 0]]
    with pytest.raises(ValueError, match="input_ids has room for 12, not 13"):
        inputs.put("input_ids", np.arange(13))
