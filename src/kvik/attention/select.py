"""Select an attention backend by name, and check its declared abilities."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from kvik.attention.base import AttentionBackend, BackendCaps
from kvik.attention.fresh_prompts import FreshPrompts
from kvik.attention.reference import ReferenceAttention
from kvik.attention.sdpa import SdpaAttention
from kvik.errors import ConfigError
from kvik.kernels.ops import Ops

if TYPE_CHECKING:
    from kvik.kernels.cpu.native import Native

BACKENDS = (SdpaAttention, ReferenceAttention)
NATIVE = "cpu"  # its kernels may be missing in a build
TRITON = "triton"  # its package may be missing
TRITON_SDPA = "triton+sdpa"  # Triton, with torch's kernels for fresh prompts


def select(
    name: str,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    native: Native | None = None,
    torch_prompts: int | None = None,
) -> AttentionBackend:
    """Return the named backend.

    Args:
        native: the kernels for "cpu".
        torch_prompts: for "triton+sdpa": the length in tokens from which torch computes fresh
            prompts.

    Raises:
        ConfigError: `name` is unknown, or the backend cannot serve device and dtype.
    """
    if name == NATIVE and native is not None:
        from kvik.attention.cpu import CpuAttention

        return CpuAttention(native, ops)
    if name in (TRITON, TRITON_SDPA):
        if find_spec("triton") is None:
            raise ConfigError("attention_backend", f"{name!r} needs Triton: install kvik[gpu]")
        from kvik.attention.triton import TritonAttention

        _check(name, TritonAttention.caps, device, dtype)
        if name == TRITON or torch_prompts is None:
            return TritonAttention(ops)
        return TritonAttention(ops, FreshPrompts(torch_prompts))
    for backend in BACKENDS:
        if backend.caps.name == name:
            _check(name, backend.caps, device, dtype)
            return backend(ops)
    names = ", ".join(repr(backend.caps.name) for backend in BACKENDS)
    if name == NATIVE:
        raise ConfigError("attention_backend", f"{name!r} needs the native kernels, or {names}")
    names = f"{TRITON!r}, {TRITON_SDPA!r}, {names}"
    raise ConfigError("attention_backend", f"must be one of {names}, not {name!r}")


def _check(name: str, caps: BackendCaps, device: torch.device, dtype: torch.dtype) -> None:
    if device.type not in caps.devices or dtype not in caps.dtypes:
        short = str(dtype).removeprefix("torch.")
        raise ConfigError("attention_backend", f"{name!r} cannot serve {short} on {device.type}")
