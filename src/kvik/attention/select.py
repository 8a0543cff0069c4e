"""Choosing a backend by its declared capabilities."""

from __future__ import annotations

import torch

from kvik.attention.base import AttentionBackend, BackendCaps
from kvik.attention.reference import ReferenceAttention
from kvik.attention.sdpa import SdpaAttention
from kvik.config.errors import ConfigError
from kvik.kernels.select import select as select_ops

_FASTEST_FIRST = (SdpaAttention, ReferenceAttention)


def select(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The named backend, or for "auto" the fastest that can serve this device and dtype.

    Raises:
        ConfigError: `name` is unknown, or nothing that matches can serve device and dtype.
    """
    names = [backend.caps.name for backend in _FASTEST_FIRST]
    if name != "auto" and name not in names:
        known = ", ".join(repr(known) for known in ["auto", *names])
        raise ConfigError("attention_backend", f"must be one of {known}, not {name!r}")
    for backend in _FASTEST_FIRST:
        if name in ("auto", backend.caps.name) and _serves(backend.caps, device, dtype):
            return backend(select_ops(device))
    short = str(dtype).removeprefix("torch.")
    raise ConfigError("attention_backend", f"{name!r} cannot serve {short} on {device.type}")


def _serves(caps: BackendCaps, device: torch.device, dtype: torch.dtype) -> bool:
    return device.type in caps.devices and dtype in caps.dtypes
