"""Mistral (Jiang et al. 2023): a Llama whose layers attend to a sliding window of keys."""

from __future__ import annotations

from kvik.config.model_spec import ModelSpec
from kvik.models.llama import Llama
from kvik.nn.builder import Builder


def mistral(spec: ModelSpec, builder: Builder) -> Llama:
    """The window (section 2) is `spec.windows`; attention and cache read it from there."""
    return Llama(spec, builder)
