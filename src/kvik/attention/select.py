"""The attention backends by name, checked against what they declare they can do."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from kvik.attention.base import AttentionBackend
from kvik.attention.reference import ReferenceAttention
from kvik.attention.sdpa import SdpaAttention
from kvik.config.errors import ConfigError
from kvik.kernels.ops import Ops

if TYPE_CHECKING:
    from kvik.attention.triton import TritonAttention
    from kvik.kernels.cpu.native import Native

BACKENDS = (SdpaAttention, ReferenceAttention)
NATIVE = "cpu"  # the backend whose kernels a build may lack
TRITON = "triton"  # the backend of a package that may be missing


def select(
    name: str,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    native: Native | None = None,
) -> AttentionBackend:
    """The named backend.

    Args:
        native: the kernels of "cpu".

    Raises:
        ConfigError: `name` is unknown, or the backend cannot serve device and dtype.
    """
    if name == NATIVE and native is not None:
        from kvik.attention.cpu import CpuAttention

        return CpuAttention(native, ops)
    backends: tuple[type[SdpaAttention | ReferenceAttention | TritonAttention], ...] = BACKENDS
    if name == TRITON:
        if find_spec("triton") is None:
            raise ConfigError("attention_backend", f"{name!r} needs Triton: install kvik[gpu]")
        from kvik.attention.triton import TritonAttention

        backends = (TritonAttention,)
    for backend in backends:
        if backend.caps.name == name:
            if device.type in backend.caps.devices and dtype in backend.caps.dtypes:
                return backend(ops)
            short = str(dtype).removeprefix("torch.")
            raise ConfigError(
                "attention_backend", f"{name!r} cannot serve {short} on {device.type}"
            )
    known = ", ".join(repr(backend.caps.name) for backend in BACKENDS)
    if name == NATIVE:
        raise ConfigError("attention_backend", f"{name!r} needs the native kernels, or {known}")
    raise ConfigError("attention_backend", f"must be one of {TRITON!r}, {known}, not {name!r}")
