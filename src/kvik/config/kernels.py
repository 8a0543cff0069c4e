"""Which kernels run: native ones (C++), Triton's on a GPU, or torch's. Decided from facts, with
reasons."""

from __future__ import annotations

from typing import Protocol

from kvik.config.config import EngineConfig
from kvik.config.hardware import Gpu, Hardware
from kvik.config.memory import TRITON_SDPA, ModelSizes
from kvik.config.model_spec import SHORT_DTYPES
from kvik.config.notes import ASKED
from kvik.config.quantization import matrix_scheme
from kvik.errors import ConfigError

NATIVE_DTYPES = ("float32", "bfloat16")
LANES = 16  # keys of a block and elements of a head come in multiples of this
MAX_HEAD_DIM = 256
# Of Triton's kernels: inputs that share a scale come in multiples of this; GPUs that have bfloat16.
TRITON_GROUP = 16
TRITON_CAPABILITY = (8, 0)
# Tokens from which torch's attention takes prompts where it is asked for and nothing was measured.
TORCH_FROM = 2048
FUSED_DTYPES = ("bfloat16", "float16")  # of torch's fused attention


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


def triton_reason(
    config: EngineConfig, hardware: Hardware, model: ModelSizes, device: str
) -> str | None:
    """Why Triton's kernels are no good here; None if they are."""
    if device == "cpu":
        return "Triton's kernels are for GPUs"
    if not hardware.triton:
        return "Triton is not installed: pip install 'kvik[gpu]'"
    _, _, index = device.partition(":")
    for gpu in hardware.gpus:
        if gpu.index == int(index or 0) and gpu.capability < TRITON_CAPABILITY:
            have, need = (".".join(map(str, c)) for c in (gpu.capability, TRITON_CAPABILITY))
            return f"{gpu.name} has capability {have}, and Triton's kernels need {need}"
    for like in model.linear_layers():
        scheme = matrix_scheme(config.quantization, like.inputs, like.stored, head=like.head)
        if scheme is not None and scheme.group % TRITON_GROUP:
            return f"weights in groups of {scheme.group}, which is no multiple of {TRITON_GROUP}"
    return None


def choose_kernels(
    config: EngineConfig,
    hardware: Hardware,
    model: ModelSizes,
    device: str,
    dtype: str,
    note: Note,
) -> str:
    """ "native", "triton" or "torch".

    Raises:
        ConfigError: kernels were asked for that cannot run.
    """
    triton = triton_reason(config, hardware, model, device)
    if config.kernels == "triton" and triton is not None:
        others = "auto, native or torch" if device == "cpu" else "auto or torch"
        raise ConfigError("kernels", f"triton: {triton}; must be {others} here")
    if config.kernels == "auto" and triton is None:
        return note("kernels", "triton", "compiled for this GPU when they first run")
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
    if device != "cpu":
        return note("kernels", "torch", str(triton))
    refusal = refusal or native_reason(hardware)
    if refusal is not None:
        return note("kernels", "torch", refusal)
    isa = hardware.native_isa
    return note("kernels", "native", "C++" if isa == "portable" else f"C++; this CPU has {isa}")


def choose_attention(
    config: EngineConfig,
    model: ModelSizes,
    kernels: str,
    dtype: str,
    gpu: Gpu | None,
    note: Note,
) -> str:
    """The attention backend.

    Args:
        kernels, dtype, gpu: that the engine runs with; no GPU: on the CPU.

    Raises:
        ConfigError: "cpu", "triton" or "triton+sdpa" was asked for and cannot serve this model,
            dtype or block size.
    """
    if kernels == "triton" or config.attention_backend in ("triton", TRITON_SDPA):
        return _triton_or_sdpa(config, model, kernels, dtype, gpu, note)
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


def torch_prompts(backend: str, model: ModelSizes, gpu: Gpu | None) -> int | None:
    """From how many tokens on torch's attention takes fresh prompts beside Triton's; None: none."""
    if backend != TRITON_SDPA:
        return None
    measured = None if gpu is None else dict(gpu.torch_prompts).get(model.head_dim)
    return measured or TORCH_FROM


def _triton_or_sdpa(
    config: EngineConfig, model: ModelSizes, kernels: str, dtype: str, gpu: Gpu | None, note: Note
) -> str:
    dim, refusal = model.head_dim, None
    # Rotation and rounding work on halves of a head; of four bits a half is whole bytes.
    multiple = 4 if config.kv_cache_dtype == "int4" else 2
    if kernels != "triton":
        refusal = "it needs the Triton kernels"
    elif dim % multiple or dim > MAX_HEAD_DIM:
        refusal = f"head_dim {dim} is no multiple of {multiple} up to {MAX_HEAD_DIM}"
    unfit = refusal or _no_torch_prompts(config, dtype)
    asked = config.attention_backend
    if asked == "triton" and refusal is not None:
        raise ConfigError("attention_backend", f"triton: {refusal}")
    if asked == TRITON_SDPA and unfit is not None:
        raise ConfigError("attention_backend", f"{TRITON_SDPA}: {unfit}")
    if asked == "cpu":
        raise ConfigError("attention_backend", "cpu: it needs the native kernels")
    if asked != "auto":
        return note("attention_backend", asked, ASKED)
    if refusal is not None:
        return note("attention_backend", "sdpa", f"not triton, as {refusal}")
    least = None if gpu is None else dict(gpu.torch_prompts).get(dim)
    if gpu is not None and least is not None and unfit is None:
        reason = f"torch's was measured faster for prompts of {least} tokens and more"
        return note("attention_backend", TRITON_SDPA, f"{reason} on {gpu.name}")
    return note("attention_backend", "triton", "reads the paged cache in place")


def _no_torch_prompts(config: EngineConfig, dtype: str) -> str | None:
    """Why torch's fused kernels cannot take prompts; None if they can."""
    kv = config.kv_cache_dtype
    if dtype not in FUSED_DTYPES:
        return f"torch's fused kernels have no {dtype}"
    if kv not in ("auto", SHORT_DTYPES[dtype]):
        return f"keys that are stored as {kv} are read by Triton's alone"
    return None
