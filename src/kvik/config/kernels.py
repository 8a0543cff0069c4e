"""Which kernels run: native ones (C++), or torch's. Decided from facts, with reasons."""

from __future__ import annotations

from typing import Protocol

from kvik.config.config import EngineConfig
from kvik.config.errors import ConfigError
from kvik.config.hardware import Hardware
from kvik.config.memory import ModelSizes

NATIVE_DTYPES = ("float32", "bfloat16")
LANES = 16  # keys of a block and elements of a head come in multiples of this
MAX_HEAD_DIM = 256
ASKED = "as asked"


class Note(Protocol):
    def __call__(self, name: str, value: str, reason: str) -> str:
        """Write a decision down and return its value."""
        ...


def native_reason(hardware: Hardware) -> str | None:
    """Why the native kernels are no good here; None if they are."""
    if not hardware.native:
        return "kvik was installed without its native kernels: was there a C++20 compiler?"
    if hardware.native_isa == "portable" and "asimd" not in hardware.isa:
        return "this CPU is not known to have AVX2"
    return None


def choose_kernels(
    config: EngineConfig, hardware: Hardware, device: str, dtype: str, note: Note
) -> str:
    """ "native" or "torch".

    Raises:
        ConfigError: native kernels were asked for and cannot run.
    """
    refusal = None
    if device != "cpu":
        refusal = "native kernels are for CPUs"
    elif dtype not in NATIVE_DTYPES:
        refusal = f"native kernels have no {dtype}, only {' and '.join(NATIVE_DTYPES)}"
    elif not hardware.native:
        refusal = native_reason(hardware)
    if config.kernels == "native" and refusal is not None:
        raise ConfigError("kernels", f"native: {refusal}")
    if config.kernels != "auto":
        return note("kernels", config.kernels, ASKED)
    refusal = refusal or native_reason(hardware)
    if refusal is not None:
        return note("kernels", "torch", refusal)
    isa = hardware.native_isa
    return note("kernels", "native", "C++" if isa == "portable" else f"C++; this CPU has {isa}")


def choose_attention(config: EngineConfig, model: ModelSizes, kernels: str, note: Note) -> str:
    """The attention backend.

    Raises:
        ConfigError: "cpu" was asked for and cannot serve this model or block size.
    """
    refusal = None
    if kernels != "native":
        refusal = "it needs the native kernels"
    elif config.kv_cache_dtype == "fp16":
        refusal = "its cache has no fp16"
    elif config.block_size % LANES:
        refusal = f"block_size {config.block_size} is no multiple of {LANES}"
    elif model.head_dim % LANES or model.head_dim > MAX_HEAD_DIM:
        refusal = f"head_dim {model.head_dim} is no multiple of {LANES} up to {MAX_HEAD_DIM}"
    if config.attention_backend == "cpu" and refusal is not None:
        raise ConfigError("attention_backend", f"cpu: {refusal}")
    if config.attention_backend != "auto":
        return note("attention_backend", config.attention_backend, ASKED)
    if refusal is None:
        return note("attention_backend", "cpu", "native kernels on a cache laid out for them")
    reason = "the fastest of torch" if kernels != "native" else f"not cpu, as {refusal}"
    return note("attention_backend", "sdpa", reason)
