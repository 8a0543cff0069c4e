"""A whole engine on Triton's kernels without a GPU: in its interpreter, on CPU tensors.

Nobody wants that but tests, so no flag of the engine asks for it: it is resolved for a CPU, and
then gets the platform of a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from kvik.attention.triton import TritonAttention
from kvik.config.config import ResolvedConfig
from kvik.worker.platforms import Platform, TritonPlatform


def interpret_engines(patch: pytest.MonkeyPatch, torch_prompts: int | None = None) -> None:
    """Engines that are made from now on, with device="cpu", compute with Triton's kernels.

    Args:
        torch_prompts: fresh prompts of so many tokens are torch's.
    """
    everywhere = replace(TritonAttention.caps, devices=frozenset({"cpu", "cuda"}))
    patch.setattr(TritonAttention, "caps", everywhere)
    patch.setattr("kvik.worker.worker.platform", partial(_interpreted, torch_prompts))


def _interpreted(
    torch_prompts: int | None,
    config: ResolvedConfig,
    memory: object = None,
    seat: object = None,
) -> Platform:
    backend = "triton" if torch_prompts is None else "triton+sdpa"
    runner = replace(
        config.runner, kernels="triton", attention_backend=backend, torch_prompts=torch_prompts
    )
    return TritonPlatform(replace(config, runner=runner))
