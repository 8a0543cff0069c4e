"""A whole engine on Triton's kernels without a GPU, in Triton's interpreter on CPU tensors.

Only tests need this, so the engine has no flag for it: it is resolved for a CPU, and then gets the
platform of a GPU.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest
from triton.runtime.interpreter import GridExecutor

from kvik.attention.triton import TritonAttention
from kvik.config.config import ResolvedConfig
from kvik.worker.platforms import Platform, TritonPlatform


def interpret_engines(patch: pytest.MonkeyPatch, torch_prompts: int | None = None) -> None:
    """Make new engines with device="cpu" compute with Triton's kernels.

    Args:
        torch_prompts: length from which torch computes the attention of fresh prompts.
    """
    everywhere = replace(TritonAttention.caps, devices=frozenset({"cpu", "cuda"}))
    patch.setattr(TritonAttention, "caps", everywhere)
    launch, alone = GridExecutor.__call__, threading.Lock()  # the interpreter has global state

    def launch_alone(self: GridExecutor, *args: object, **options: object) -> None:
        with alone:
            launch(self, *args, **options)

    patch.setattr(GridExecutor, "__call__", launch_alone)
    for module in ("worker", "ranks"):
        patch.setattr(f"kvik.worker.{module}.platform", partial(_interpreted, torch_prompts))


def _interpreted(
    torch_prompts: int | None,
    config: ResolvedConfig,
    memory: object = None,
    setup: object = None,
) -> Platform:
    backend = "triton" if torch_prompts is None else "triton+sdpa"
    runner = replace(
        config.runner, kernels="triton", attention_backend=backend, torch_prompts=torch_prompts
    )
    return TritonPlatform(replace(config, runner=runner))
