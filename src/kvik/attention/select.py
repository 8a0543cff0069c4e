"""The attention backends by name, checked against what they declare they can do."""

from __future__ import annotations

import torch

from kvik.attention.base import AttentionBackend
from kvik.attention.reference import ReferenceAttention
from kvik.attention.sdpa import SdpaAttention
from kvik.config.errors import ConfigError
from kvik.kernels.ops import Ops

BACKENDS = (SdpaAttention, ReferenceAttention)


def select(name: str, ops: Ops, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The named backend.

    Raises:
        ConfigError: `name` is unknown, or the backend cannot serve device and dtype.
    """
    for backend in BACKENDS:
        if backend.caps.name == name:
            if device.type in backend.caps.devices and dtype in backend.caps.dtypes:
                return backend(ops)
            short = str(dtype).removeprefix("torch.")
            raise ConfigError(
                "attention_backend", f"{name!r} cannot serve {short} on {device.type}"
            )
    known = ", ".join(repr(backend.caps.name) for backend in BACKENDS)
    raise ConfigError("attention_backend", f"must be one of {known}, not {name!r}")
