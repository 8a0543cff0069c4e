"""`kvik calibrate`: measures the limits of this machine, and saves them for the planner; for a GPU,
it measures the thresholds by which the engine chooses kernels."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvik.cli.flags import Parser
from kvik.cli.terminal import say, say_report, share_bar
from kvik.config.compute import TRITON_CAPABILITY
from kvik.config.env import environment_options
from kvik.config.hardware import (
    Gpu,
    Thresholds,
    detect,
    find_gpus,
    prompt_attention_path,
    save_thresholds,
)
from kvik.config.units import show_bytes
from kvik.errors import CapacityError, ConfigError
from kvik.files import can_write
from kvik.planner.calibration import Calibration, ReadRate, calibration_path, save
from kvik_bench.cli.output import integer_up_to
from kvik_bench.report.result import Figure
from kvik_bench.report.table import show_figure

if TYPE_CHECKING:
    from kvik_bench.machine.prompt_attention import PromptTimes


# `kvik calibrate` on a GPU: whether Triton's or torch's attention is faster for long prompts.


def usable_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that Triton's kernels can run on."""
    if not detect().triton:
        return ()
    return tuple(gpu for gpu in find_gpus() if gpu.capability >= TRITON_CAPABILITY)


def calibrate_gpu(gpu: Gpu, *, quick: bool) -> None:
    """Measure a GPU, print the figures and save its thresholds."""
    import torch

    from kvik_bench.machine import prompt_attention as prompts

    dims = prompts.QUICK_HEAD_DIMS if quick else prompts.HEAD_DIMS
    lengths = prompts.QUICK_LENGTHS if quick else prompts.LENGTHS
    with share_bar(redraws=False) as progress:
        device = torch.device("cuda", gpu.index)
        measurements = prompts.measure_prompts(device, dims, lengths, progress)
    torch_from = prompts.thresholds(measurements)
    say_report(gpu_as_text(gpu.name, measurements, torch_from))
    path = prompt_attention_path()
    save_thresholds(gpu.name, torch_from, path)
    say(f"\nsaved in {path}")


def gpu_as_text(gpu: str, measurements: Sequence[PromptTimes], torch_from: Thresholds) -> str:
    """Return the measurements as text."""
    lines = [f"prompts on {gpu}: ms of a layer's attention, Triton's / torch's"]
    for dim, measured in groupby(measurements, lambda times: times.head_dim):
        cells = (
            f"{times.tokens} tokens {times.triton * 1e3:.3f} / "
            + ("-" if times.torch is None else f"{times.torch * 1e3:.3f}")
            for times in measured
        )
        threshold = dict(torch_from).get(dim)
        chosen = "Triton's" if threshold is None else f"torch's from {threshold} tokens on"
        lines.append(f"  heads of {dim:<6}{', '.join(cells)}: {chosen}")
    return "\n".join(lines)


MAX_THREADS = 1024
DISTURBED = 1  # exit code
SHOWN_ROWS = (1, 8, 32, 128, 512)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "calibrate",
        "",
        "Measure this machine's memory, arithmetic and kernels, and what the engine adds to them; "
        "on GPUs, whether torch's or Triton's attention is faster for long prompts, which decides "
        "the engine's choice. Nothing else should run on the machine.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer figures, in a few seconds")
    parser.add_argument(
        "--only", choices=("cpu", "gpu"), help="measure only this part of the machine"
    )
    parser.add_argument(
        "--force", action="store_true", help="save the result even if other processes disturbed it"
    )
    parser.add_argument(
        "--threads",
        type=integer_up_to(MAX_THREADS),
        metavar="N",
        help="CPU threads (default: KVIK_THREADS, or all cores)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"file for the result (default: {calibration_path()}, which kvik reads)".replace(
            "%", "%%"
        ),
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    gpus = () if arguments.only == "cpu" else usable_gpus()
    for name in ("output", "threads", "force"):
        if arguments.only == "gpu" and getattr(arguments, name):
            raise ConfigError(name, "is for the CPU, which --only gpu leaves out")
    if arguments.only == "gpu" and not gpus:
        raise ConfigError("only", "there is no GPU here that Triton's kernels can run on")
    path = prompt_attention_path()
    if gpus and not can_write(path, parents=True):
        elsewhere = "XDG_CACHE_HOME names another folder, --only cpu leaves GPUs out"
        raise ConfigError("calibration", f"cannot write {str(path)!r}: {elsewhere}")
    code = 0 if arguments.only == "gpu" else _calibrate_cpu(arguments)
    for gpu in {gpu.name: gpu for gpu in gpus}.values():  # one of each kind
        calibrate_gpu(gpu, quick=arguments.quick)
    return code


def _calibrate_cpu(arguments: argparse.Namespace) -> int:
    hardware = detect()  # before torch takes memory

    from kvik_bench.machine.calibrate import calibrate
    from kvik_bench.machine.stage import FULL, QUICK

    set_outside: dict[str, Any] = environment_options()
    threads: int = arguments.threads or set_outside.get("threads") or hardware.cores
    path = arguments.output or calibration_path()
    if not can_write(path, parents=True):
        raise ConfigError("output", f"cannot write {str(path)!r}: -o names another file")
    effort = QUICK if arguments.quick else FULL
    if hardware.memory_limit < effort.memory:
        needed, left = show_bytes(effort.memory), show_bytes(hardware.memory_limit)
        raise CapacityError(
            "memory", f"{needed} are needed, {left} are left: {hardware.memory_reason}"
        )
    with share_bar(redraws=False) as progress:
        calibration, remarks = calibrate(hardware, threads, effort, progress)
    say_report(as_text(calibration))
    for remark in remarks:
        say(f"kvik: warning: {remark}", error=True)
    if calibration.disturbed and not arguments.force:
        # Every later prediction would be wrong, and an earlier good calibration would be lost.
        say("kvik: error: not saved, as it was disturbed; --force saves it", error=True)
        return DISTURBED
    save(calibration, path)
    say(f"\nsaved in {path}")
    if threads != hardware.cores:
        usual = f"kvik plans with {hardware.cores} threads and will not take this for {threads}"
        say(f"kvik: warning: {usual}", error=True)
    return 0


def as_text(calibration: Calibration) -> str:
    """Return the main figures as text."""
    machine = calibration.machine
    lines = [
        f"{'machine':20}{machine.cpu}, {machine.threads} threads, kernels: {machine.kernels}",
        f"{'memory':20}{_gigabytes(calibration.reads[-1])} GB/s",
        f"{'caches':20}"
        + ", ".join(f"{r.bytes >> 20} MiB {_gigabytes(r)}" for r in calibration.reads[:-1])
        + " GB/s",
        f"{'arithmetic':20}"
        + ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in calibration.peaks.items())
        + " T operations/s",
        "",
        "products from memory, G operations/s by rows",
    ]
    shown = [
        cost.rows for cost in next(iter(calibration.linears.values())) if cost.rows in SHOWN_ROWS
    ]
    lines.append(f"  {'':18}" + "".join(f"{rows:>8}" for rows in shown))
    for kind, costs in calibration.linears.items():
        rates = {p.rows: 2 * p.rows / p.streamed / 1e9 for p in costs if p.streamed}
        cells = "".join(f"{rates[rows]:8.0f}" if rows in rates else f"{'-':>8}" for rows in shown)
        lines.append(f"  {kind:18}{cells}")
    lines += ["", "attention by size of heads: keys and values in decoding, prompts"]
    for cost in calibration.attention:
        keys = f"{4 / cost.streamed / 1e9:.0f} GB/s" if cost.streamed else "as memory"
        if cost.share < 1:
            keys += f" or {cost.share:.0%} of memory's"
        lines.append(f"  {cost.head_dim:<18}{keys}, {cost.prefill / 1e9:.0f} G operations/s")
    lines += ["", "states, G operations/s: the first token of a sequence in a step, further tokens"]
    for kind, state in calibration.states.items():
        lines.append(f"  {kind:24}{state.first / 1e9:8.1f}{state.further / 1e9:8.1f}")
    host = calibration.host[-1]
    lines += [
        "",
        f"{'a small kernel':20}{calibration.launch * 1e6:.2f} us",
        f"{'a step, outside':20}{host.step * 1e6:.0f} us and {host.row * 1e6:.1f} us a sequence",
        f"{'a request, outside':20}{calibration.host_request * 1e6:.0f} us and "
        f"{calibration.host_token * 1e6:.2f} us a token of its prompt",
    ]
    if calibration.hop:
        exchanges = (f"of {e.processes} {e.seconds * 1e6:.2f} us" for e in calibration.exchanges)
        lines += [
            f"{'processes':20}exchanges {', '.join(exchanges) or 'need two threads'}; a message "
            f"{calibration.hop * 1e6:.0f} us and {calibration.hop_rate / 1e9:.1f} GB/s"
        ]
    return "\n".join(lines)


def _gigabytes(read: ReadRate) -> str:
    """Return a rate with the range of its samples."""
    samples = (read.low, read.rate, read.high) if read.high else (read.rate,)
    return show_figure(Figure("read", "GB/s", tuple(rate / 1e9 for rate in samples)))
