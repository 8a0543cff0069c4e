"""A short calibration: plausible figures on any machine under any load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from helpers.calibrations import calibration
from helpers.configs import small
from helpers.optional_native import needs_native
from hypothesis import given
from hypothesis import strategies as st

from kvik.config.hardware import Hardware, detect
from kvik.planner.calibration import ReadRate, interpolate, load, save, stale, this_machine
from kvik.planner.devices import Setting, cpu_device
from kvik.planner.families import read_shape
from kvik.planner.roofline import decode, prefill, step_time
from kvik.spec.weights import layer_kind
from kvik_bench.machine import kernels, stage
from kvik_bench.machine.calibrate import (
    calibrate,
    hop_seconds,
    line_through,
    make_stage,
    measure_exchanges,
    remarks,
)
from kvik_bench.machine.kernels import (
    SMALL,
    STATES,
    Readings,
    _inputs,
    measure_attention,
    nonnegative_fit,
)
from kvik_bench.machine.stage import FULL, KINDS, QUICK, Attended, TorchStage

MIB = 1 << 20
TINY = replace(
    QUICK,
    reads=(MIB, 4 * MIB, 8 * MIB),
    streamed=4 * MIB,
    rows=(1, 8),
    kinds=("bf16", "int8"),
    head_dims=(32, 64),
    samples=1,
    batches=(1, 2),
    tokens=8,
    flushed=(0, MIB),
)
HARDWARE = detect()


@pytest.fixture(autouse=True)
def small_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes seconds for a large one in few bits on a CPU without instructions for it."""
    monkeypatch.setattr(stage, "MATRIX", 128)


def without_native(hardware: Hardware) -> Hardware:
    return replace(hardware, native=False)


@pytest.mark.full
@pytest.mark.parametrize(
    "hardware",
    [pytest.param(HARDWARE, marks=needs_native, id="native"), without_native(HARDWARE)],
)
def test_everything_is_measured_and_can_be_used(hardware: Hardware, tmp_path: Path) -> None:
    progress: list[tuple[float, str]] = []
    found, _ = calibrate(hardware, 1, TINY, lambda what, share: progress.append((share, what)))
    assert [share for share, _ in progress] == sorted({share for share, _ in progress})
    assert progress[0][0] == 0.0 and progress[-1][0] == 1.0

    save(found, tmp_path / "calibration.json")
    assert load(tmp_path / "calibration.json") == found  # it refuses impossible figures
    assert stale(found, this_machine(hardware, 1, "")) is None
    assert [read.bytes for read in found.reads] == list(TINY.reads)
    assert found.linears.keys() == set(TINY.kinds)
    assert [cost.rows for cost in found.linears["int8"]] == [1, 8]
    assert [cost.head_dim for cost in found.attention] == [32, 64]
    assert found.states.keys() == {kind for spec in STATES for kind in spec.flops}
    assert [host.bytes for host in found.host] == [1, MIB]
    assert (found.hop > 0) == hardware.native and found.exchanges == ()  # of one thread

    device = cpu_device(found, found.machine, 1 << 30)
    for step in (decode(4, 100), prefill(100)):
        time = step_time(read_shape(""), Setting(device, "bf16", "bf16"), step)
        assert 0 < time.floor <= time.expected < 10


@needs_native
def test_exchanges_are_measured_of_as_many_processes_as_have_a_thread() -> None:
    for threads, counts in ((1, []), (2, [2]), (7, [2, 4])):
        found = [cost.processes for cost in measure_exchanges(threads, samples=1)]
        assert found == counts
    (cost,) = measure_exchanges(2, samples=3)
    assert 0 < cost.seconds < 0.1


@pytest.mark.full
def test_messages_between_processes_are_measured() -> None:
    hop, rate = hop_seconds(messages=20)
    assert 0 < hop < 0.1 and rate > 1e6


def test_every_kind_is_measured_with_its_group_size() -> None:
    for kind in KINDS:
        for about, _, _ in SMALL:
            scheme = layer_kind("int4", _inputs(kind, about), head=False)
            assert scheme is not None
            if kind.startswith("int4"):
                assert kind == f"int4-g{scheme.group}"


def test_the_efforts_are_in_order() -> None:
    for effort in (FULL, QUICK, TINY):
        for run in (effort.reads, effort.rows, effort.head_dims, effort.flushed, effort.batches):
            assert list(run) == sorted(set(run))
        assert effort.streamed < effort.reads[-1]


costs = st.floats(1e-9, 1e-3)


@given(costs, costs, costs)
def test_costs_are_recovered(a: float, b: float, c: float) -> None:
    columns = np.array([[1, 1, 1, 1, 1], [1, 2, 4, 9, 1], [3, 1, 4, 1, 5]], dtype=float)
    seconds = (np.array([a, b, c]) @ columns).tolist()
    assert nonnegative_fit(columns.tolist(), seconds) == pytest.approx([a, b, c], rel=1e-4)


def test_a_cost_is_never_negative() -> None:
    """Falling times would make the second cost negative: it is omitted, and the first refitted."""
    first, second = nonnegative_fit([[1, 1, 1], [1, 2, 3]], [3.0, 2.9, 2.8])
    assert second == 0.0
    assert first == pytest.approx(2.9, rel=0.01)


def test_a_line_through_steps() -> None:
    assert line_through((1, 8, 32), [12.0, 26.0, 74.0]) == pytest.approx((10.0, 2.0))
    assert line_through((1, 2), [5.0, 4.0]) == pytest.approx((4.5, 0.0))


def test_disturbed_measurements_are_reported() -> None:
    assert remarks(0.0, [50e9] * 20) == ()
    busy, changing = remarks(0.5, [50e9] * 10 + [76e9] * 10)
    assert busy.startswith("other processes took 50% of the cores")
    assert "at 50 to 76 GB/s" in changing


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])
def test_stages_time_the_given_sizes(native: bool) -> None:
    hardware = HARDWARE if native else without_native(HARDWARE)
    stage = make_stage(hardware, 1, TINY)
    assert isinstance(stage, TorchStage) is not native
    x, weight = torch.randn(8, 64), torch.ones(64)
    track = stage.track([lambda rows: stage.ops.rms_norm(x[:rows], weight, 1e-5)] * 3, 8)
    for rows in (1, 8):
        times = track(rows)
        assert len(times) == 3 and all(0 < seconds < 10 for seconds in times)
    keys = torch.randn(8, 2, 32).bfloat16()
    slots = [torch.arange(8), torch.arange(8) * 16]
    assert len(stage.store(keys, slots)(8)) == 2
    for queries in (1, 20):
        assert 0 < stage.attention(Attended(2, queries, 40, (4, 2), 32))() < 10
    assert stage.limits.read_rate(MIB) > 0 and stage.limits.memory_rate() > 0
    assert all(stage.limits.peak(arithmetic) > 0 for arithmetic in ("fp32", "bf16", "int8"))


def test_attention_work_is_counted() -> None:
    work = Attended(3, 4, 10, (8, 2), 16)
    assert work.key_elements == 3 * 10 * 2 * 16
    assert work.score_elements == 3 * (7 + 8 + 9 + 10) * 8 * 16


class Memory:
    """A machine with 32 MiB of caches whose attention kernels are bound by memory, at `reached` of
    its rate. A set of keys is as large as all prepared works."""

    RATES = ((8 * MIB, 40e9), (16 * MIB, 38e9), (32 * MIB, 30e9), (48 * MIB, 9e9), (64 * MIB, 8e9))
    CALL, SEQUENCE, ELEMENT, SCORE = 2e-7, 1e-6, 120e-12, 1e-12

    def __init__(self, reached: float, speed: float = 1.0) -> None:
        self.reached, self.speed, self.limits = reached, speed, self
        self._prepared: dict[int, int] = {}

    def rate(self, num_bytes: float) -> float:
        rates = [(size, rate * self.speed ** (size > 32 * MIB)) for size, rate in self.RATES]
        return interpolate(rates, num_bytes)

    def memory_rate(self) -> float:
        return self.rate(512 * MIB)

    def keys_seconds(self, elements: float, working_set: float) -> float:
        reached = interpolate([(8 * MIB, 1.0), (64 * MIB, self.reached)], working_set)
        reading = 4 * elements / (self.rate(working_set) * reached)
        return max(elements * self.ELEMENT, reading)

    def attention(self, work: Attended):
        key = id(work)
        self._prepared[key] = self._prepared.get(key, 0) + 4 * work.key_elements

        def seconds() -> float:
            keys = self.keys_seconds(work.key_elements, self._prepared[key])
            beside = self.CALL + work.sequences * self.SEQUENCE
            return beside + keys + work.score_elements * self.SCORE

        return seconds


@pytest.mark.parametrize("reached", [1.0, 0.85, 0.5])
@pytest.mark.parametrize("speed", [1.0, 3.0])
def test_keys_are_bound_by_memory(reached, speed, monkeypatch, tmp_path) -> None:
    """At any context, also if a cache has a part of the keys, or memory is faster than when its
    rate was measured."""
    monkeypatch.setattr(kernels, "measure_positions", lambda *_: (0.0, 0.0, 0.0))
    stage = Memory(reached)
    cost = measure_attention(stage, 64, stage.CALL, FULL, Readings(stage))
    assert cost.share == pytest.approx(reached, rel=0.1)
    later = Memory(reached, speed)
    reads = tuple(ReadRate(size, later.rate(size)) for size, _ in stage.RATES)
    peaks = dict.fromkeys(calibration().peaks, 1e13)  # arithmetic is no limit
    facts = msgspec.structs.replace(calibration(), attention=(cost,), reads=reads, peaks=peaks)
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 64, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(small(**sizes)))
    shape, at = (
        read_shape(str(tmp_path)),
        Setting(cpu_device(facts, facts.machine, 0), "bf16", "bf16"),
    )
    for context in (4096, 16_384, 65_536, 80_000, 100_000, 400_000):
        parts = {part.name: part for part in step_time(shape, at, decode(1, context)).parts}
        elements = context * 2 * 64
        right = later.keys_seconds(elements, 4 * elements)
        right += stage.SEQUENCE + elements * 4 * stage.SCORE
        assert parts["kv cache"].expected == pytest.approx(right, rel=0.15), context
