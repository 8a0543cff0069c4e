"""Qwen2 and Qwen2.5 (Yang et al. 2024): a Llama with biases on q, k and v."""

from __future__ import annotations

from kvik.config.model_spec import ModelSpec
from kvik.models.llama import Llama
from kvik.nn.builder import Builder


def qwen2(spec: ModelSpec, builder: Builder) -> Llama:
    """The biases are `spec.qkv_bias`; some layers may see a window, as `spec.windows` says."""
    return Llama(spec, builder)
