"""`kvik calibrate` on a GPU: whose attention reads long prompts, Triton's or torch's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kvik.cli.share_bar import share_bar
from kvik.cli.terminal import say, say_report
from kvik.config.hardware import (
    Gpu,
    Thresholds,
    detect,
    find_gpus,
    prompt_attention_path,
    save_thresholds,
)
from kvik.config.kernels import TRITON_CAPABILITY

if TYPE_CHECKING:
    from kvik.bench.machine.prompt_attention import PromptPace


def usable_gpus() -> tuple[Gpu, ...]:
    """Those that Triton's kernels can run on."""
    if not detect().triton:
        return ()
    return tuple(gpu for gpu in find_gpus() if gpu.capability >= TRITON_CAPABILITY)


def calibrate_gpu(gpu: Gpu, *, quick: bool) -> None:
    """Measure, print and save_thresholds."""
    import torch

    from kvik.bench.machine import prompt_attention as prompts

    dims = prompts.QUICK_HEAD_DIMS if quick else prompts.HEAD_DIMS
    lengths = prompts.QUICK_LENGTHS if quick else prompts.LENGTHS
    with share_bar(redraws=False) as progress:
        device = torch.device("cuda", gpu.index)
        found = prompts.measure_prompts(device, dims, lengths, progress)
    torch_from = prompts.thresholds(found)
    say_report(as_text(gpu.name, found, torch_from))
    path = prompt_attention_path()
    save_thresholds(gpu.name, torch_from, path)
    say(f"\nsaved in {path}")


def as_text(gpu: str, found: Sequence[PromptPace], torch_from: Thresholds) -> str:
    """What was measured, for people."""
    lines = [f"prompts on {gpu}: ms of a layer's attention, Triton's / torch's"]
    for dim, paces in groupby(found, lambda pace: pace.head_dim):
        cells = (
            f"{pace.tokens} tokens {pace.triton * 1e3:.3f} / "
            + ("-" if pace.torch is None else f"{pace.torch * 1e3:.3f}")
            for pace in paces
        )
        least = dict(torch_from).get(dim)
        chosen = "Triton's" if least is None else f"torch's from {least} tokens on"
        lines.append(f"  heads of {dim:<6}{', '.join(cells)}: {chosen}")
    return "\n".join(lines)
