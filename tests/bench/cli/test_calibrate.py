"""`kvik calibrate`: its measurements, output and files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as replace_gpu
from pathlib import Path

import pytest
from helpers.calibrations import MACHINE, calibration
from helpers.commands import Command
from helpers.optional_triton import NO_TRITON
from msgspec.structs import replace

import kvik_bench.machine.calibrate
from kvik.cli.main import main
from kvik.config.hardware import Gpu, Hardware, detect
from kvik.config.hardware import load_thresholds as load_prompts
from kvik.planner.calibration import calibration_path, load, save, this_machine
from kvik_bench.cli import calibrate
from kvik_bench.machine.stage import FULL, QUICK, Effort

HARDWARE = Hardware(
    "Some CPU", 2, 1 << 34, "RAM available", frozenset(("avx2", "fma")), native=True
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Effort]]:
    """Record the requested measurements instead of measuring."""
    calls: list[tuple[int, Effort]] = []

    def measured(
        hardware: Hardware, threads: int, effort: Effort, tell: Callable[[float, str], None]
    ):
        calls.append((threads, effort))
        tell("everything", 0.0)
        tell("", 1.0)
        return calibration(), ("the machine was busy",)

    monkeypatch.setattr(kvik_bench.machine.calibrate, "calibrate", measured)
    monkeypatch.setattr(calibrate, "detect", lambda: HARDWARE)
    return calls


def test_a_calibration_is_printed_and_saved(
    asked: list[tuple[int, Effort]], tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "mine.json"
    out, err = command("calibrate", "-o", str(path))
    assert asked == [(2, FULL)]
    assert load(path) == calibration()
    assert "Some CPU, 2 threads, kernels: avx2" in out
    assert "10 GB/s" in out and f"saved in {path}" in out
    assert "bf16" in out and "int4-g128" in out
    assert err == "kvik: warning: the machine was busy\n"


def test_a_calibration_is_saved_in_the_default_path(
    asked: list[tuple[int, Effort]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["calibrate", "--quick"]) == 0
    assert asked == [(2, QUICK)]
    assert load(tmp_path / "kvik" / "calibration.json").machine == MACHINE


def test_a_disturbed_one_is_not_saved_unless_forced(
    monkeypatch: pytest.MonkeyPatch,
    asked: list[tuple[int, Effort]],
    tmp_path: Path,
    command: Command,
) -> None:
    """An earlier good one is kept."""
    path = tmp_path / "mine.json"
    command("calibrate", "-o", str(path))
    disturbed = replace(calibration(), disturbed=True), ("too busy",)
    monkeypatch.setattr(kvik_bench.machine.calibrate, "calibrate", lambda *_: disturbed)
    out, err = command("calibrate", "-o", str(path), code=1)
    assert load(path) == calibration()
    assert out.count("memory              10 GB/s") == 1  # it is still shown
    assert "too busy" in err and "not saved" in err and "--force" in err
    command("calibrate", "-o", str(path), "--force")
    assert load(path) == disturbed[0]


@pytest.mark.parametrize(
    "verb",
    [
        ("plan",),
        ("advise",),
        pytest.param(("plan", "--json"), marks=pytest.mark.full),
        pytest.param(("advise", "--json"), marks=pytest.mark.full),
        ("bench", "latency", "--batch", "1", "--output-tokens", "2", "--repeats", "1"),
    ],
    ids=" ".join,
)
def test_commands_warn_of_a_disturbed_calibration(
    verb: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kvik.planner.plan.find_gpus", lambda: ())
    on_cpu = ("--device", "cpu") if verb[0] == "bench" else ()
    found = replace(calibration(), machine=this_machine(detect(), None, ""))
    words = "other processes disturbed the calibration of this machine"
    for disturbed in (False, True):
        save(replace(found, disturbed=disturbed), calibration_path())
        text = " ".join(command(*verb, *on_cpu).out.split())
        assert text.lower().count(words) == disturbed


def test_nothing_is_measured_that_cannot_be_saved(
    asked: list[tuple[int, Effort]], tmp_path: Path, command: Command
) -> None:
    (tmp_path / "file").write_bytes(b"")
    error = command.refusal("calibrate", "-o", str(tmp_path / "file" / "mine.json"))
    assert "--output: cannot write" in error
    assert asked == []


def test_nothing_is_measured_without_enough_memory(
    asked: list[tuple[int, Effort]], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """The system would kill the process."""
    small = replace_gpu(HARDWARE, memory_limit=FULL.memory - 1)
    monkeypatch.setattr(calibrate, "detect", lambda: small)
    error = command.refusal("calibrate")
    assert "memory: 1.8 GiB are needed, 1.8 GiB are left: RAM available" in error and not asked
    command("calibrate", "--quick")
    assert asked == [(2, QUICK)]


def test_the_environment_sets_the_threads(
    asked: list[tuple[int, Effort]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVIK_THREADS", "3")
    assert main(["calibrate", "-o", str(tmp_path / "one.json")]) == 0
    assert main(["calibrate", "--threads", "1", "-o", str(tmp_path / "two.json")]) == 0
    assert [threads for threads, _ in asked] == [3, 1]


def test_other_threads_are_warned_of(
    asked: list[tuple[int, Effort]], tmp_path: Path, command: Command
) -> None:
    error = command("calibrate", "--threads", "1", "-o", str(tmp_path / "one.json")).err
    assert asked[0][0] == 1
    assert "kvik plans with 2 threads" in error


@pytest.mark.parametrize("threads", ["0", "many", "2000"])
def test_threads_out_of_range(threads: str, command: Command) -> None:
    error = command.refusal("calibrate", "--threads", threads)
    assert "--threads: must be an integer in [1, 1024]" in error


class TestGpu:
    """On a machine with a GPU, with recorded measurements."""

    GPU = Gpu(0, "NVIDIA A", 1 << 30, 1 << 30, (9, 0))

    @pytest.fixture(autouse=True)
    def machine(
        self, asked: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> list[object]:
        pytest.importorskip("triton", reason=NO_TRITON)
        from kvik_bench.machine import prompt_attention

        timed: list[object] = []

        def measured(device: object, dims: tuple[int, ...], lengths: tuple[int, ...], tell: object):
            timed.append((str(device), dims, lengths))
            return tuple(
                prompt_attention.PromptTimes(d, n, 1.0, 0.5) for d in dims for n in lengths
            )

        old = replace_gpu(self.GPU, name="NVIDIA B", capability=(7, 5))
        gpus = (self.GPU, replace_gpu(self.GPU, index=1), old)
        monkeypatch.setattr(calibrate, "detect", lambda: replace_gpu(HARDWARE, triton=True))
        monkeypatch.setattr(calibrate, "find_gpus", lambda: gpus)
        monkeypatch.setattr(prompt_attention, "measure_prompts", measured)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        return timed

    def test_it_alone(
        self, asked: list[object], machine: list[object], tmp_path: Path, command: Command
    ) -> None:
        """Once for several equal ones."""
        out = command("calibrate", "--only", "gpu", "--quick").out
        assert not asked and machine == [("cuda:1", (64, 128), (2048, 8192))]
        assert "prompts on NVIDIA A" in out and "torch's from 2048 tokens on" in out
        assert load_prompts("NVIDIA A", tmp_path / "kvik" / "prompt-attention.json") == (
            (64, 2048),
            (128, 2048),
        )

    def test_an_unwritable_folder_is_reported_before_measuring(
        self,
        asked: list[object],
        machine: list[object],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        command: Command,
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        error = command.refusal("calibrate", "-o", str(tmp_path / "cpu.json"))
        assert not asked and not machine
        assert "--only cpu leaves GPUs out" in error

    def test_with_the_rest(self, asked: list[object], machine: list[object]) -> None:
        assert main(["calibrate", "--only", "cpu"]) == 0
        assert len(asked) == 1 and not machine
        assert main(["calibrate"]) == 0
        assert len(asked) == 2 and len(machine) == 1

    @pytest.mark.parametrize("option", [["-o", "x.json"], ["--threads", "1"], ["--force"]])
    def test_options_of_the_cpu_are_refused_for_gpus_only(
        self, option: list[str], machine: list[object], command: Command
    ) -> None:
        error = command.refusal("calibrate", "--only", "gpu", *option)
        assert not machine and "which --only gpu leaves out" in error

    def test_without_one(self, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
        monkeypatch.setattr(calibrate, "find_gpus", lambda: ())
        assert "--only: there is no GPU here" in command.refusal("calibrate", "--only", "gpu")
