"""CUDA devices as the driver's own tool describes them, for decisions made without torch."""

from __future__ import annotations

import subprocess
from dataclasses import replace

from kvik.config.env import visible_gpus
from kvik.config.hardware import Gpu, is_cuda_build
from kvik.config.prompt_attention import load, prompt_attention_path
from kvik.config.units import MIB

FIELDS = "index,name,memory.total,memory.free,compute_cap"


def find_gpus() -> tuple[Gpu, ...]:
    """The devices that the installed torch could use, with what was measured of them; none if
    anything is in doubt."""
    if not is_cuda_build():
        return ()
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    path = prompt_attention_path()
    return tuple(
        replace(gpu, torch_prompts=load(gpu.name, path))
        for gpu in parse_gpus(answer.stdout, visible_gpus())
    )


def parse_gpus(table: str, visible: tuple[int, ...] | None) -> tuple[Gpu, ...]:
    """Lines of `FIELDS` -> devices, numbered as CUDA numbers the visible ones."""
    found: dict[int, Gpu] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            index, name, total, free, capability = cells
            major, _, minor = capability.partition(".")
            found[int(index)] = Gpu(
                int(index), name, int(total) * MIB, int(free) * MIB, (int(major), int(minor))
            )
        except ValueError:
            continue  # "[N/A]", or a message in place of a table
    order = sorted(found) if visible is None else [i for i in visible if i in found]
    return tuple(replace(gpu, index=rank) for rank, gpu in enumerate(found[i] for i in order))
