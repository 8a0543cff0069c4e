"""Choice of the device, the dtype, the kernels (native C++, Triton's on a GPU, or torch's), the
attention backend and the format of the KV cache. Each decision has a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvik.config.config import ASKED, EngineConfig, Notes, requested_speculation
from kvik.config.hardware import Gpu, Hardware
from kvik.config.memory import Limit
from kvik.config.speculative import TREE_METHODS
from kvik.config.step_memory import PROMPT_PADDING, TRITON_SDPA
from kvik.config.units import show_bytes
from kvik.errors import ConfigError
from kvik.models.model_spec import ModelSpec
from kvik.spec.engine_folder import Built
from kvik.spec.kv import AUTO, ENTRY_TOKENS, KV_FORMATS
from kvik.spec.model import SHORT_DTYPES
from kvik.spec.weights import SCHEMES, matrix_kind

TRANSFORMERS = "transformers"  # the kernels of a model that kvik does not implement
NATIVE_DTYPES = ("float32", "bfloat16")
LANES = 16  # keys of a block and elements of a head come in multiples of this
MAX_HEAD_DIM = 512  # of the kernels, native and Triton's; torch takes larger ones
# For Triton's kernels: number of inputs that share a scale is a multiple of this; oldest GPUs.
TRITON_GROUP = 16
TRITON_CAPABILITY = (8, 0)
# Shortest prompt for torch's attention if it is requested but was not measured.
TORCH_FROM = 2048
# The same where keys and values of all heads are made from latent vectors. Prompts are lengthened
# to multiples of as many; of DeepSeek-V3 a head then has 0.40 billion operations in place of 0.57.
LATENT_TORCH_FROM = PROMPT_PADDING
# Of torch's fused attention.
FUSED_DTYPES, MAX_FUSED_HEAD_DIM = ("bfloat16", "float16"), 256


@dataclass(frozen=True, slots=True)
class Compute:
    """Device, dtype, kernels and attention backend of an engine."""

    device: str  # "cpu" or "cuda:N"
    gpu: Gpu | None  # its facts; None for the CPU
    dtype: str  # "float32", "bfloat16" or "float16"
    kernels: str  # "native", "triton" or "torch"; `TRANSFORMERS`
    attention: str  # the backend

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda"."""
        return self.device.partition(":")[0]


def choose_compute(
    config: EngineConfig, spec: ModelSpec, hardware: Hardware, notes: Notes
) -> tuple[Compute, Limit]:
    """Choose device, dtype, kernels and attention, and the memory that may be planned with.

    Raises:
        ConfigError: a requested choice is unavailable, or cannot serve this model.
    """
    device, gpu = choose_device(config, hardware, notes)
    limit = _memory_limit(config, hardware, gpu, notes)
    if spec.fallback is not None:
        plain = replace(config, kernels="torch")  # the kernels of the library
        dtype = choose_dtype(plain, spec, hardware, gpu, limit, notes)
        notes.add("quantization", "none", SCHEMES["none"])
        attention = "reference" if spec.fallback.scores else "sdpa"  # it takes as much memory
        return Compute(device, gpu, dtype, TRANSFORMERS, attention), limit
    dtype = choose_dtype(config, spec, hardware, gpu, limit, notes)
    compute = computing_in(dtype, config, spec, hardware, device, gpu, notes)
    origin = ASKED if config.quantization != "none" else "the default"
    words = SCHEMES[config.quantization]
    words += f" ({spec.quantization})" if spec.quantization else ""
    notes.add("quantization", config.quantization, f"{origin}: {words}")
    return compute, limit


def computing_in(
    dtype: str,
    config: EngineConfig,
    model: ModelSpec,
    hardware: Hardware,
    device: str,
    gpu: Gpu | None,
    notes: Notes,
) -> Compute:
    """Choose kernels, attention backend and KV format for a model in this dtype on this device."""
    kernels = choose_kernels(config, hardware, model, device, dtype, notes)
    attention = choose_attention(config, model, kernels, dtype, gpu, notes)
    _check_trees(config, model)
    if model.compressed:
        _check_compressed(config, model, dtype)
    _choose_kv_format(config, model, dtype, notes)
    return Compute(device, gpu, dtype, kernels, attention)


def _check_trees(config: EngineConfig, model: ModelSpec) -> None:
    """Raise ConfigError if trees are drafted for a model that sums up tokens."""
    speculation = requested_speculation(config)
    if speculation is None or speculation.method not in TREE_METHODS:
        return
    if model.compressed or model.pools:
        made = "entries" if model.compressed else "pools"
        reason = f"{model.architecture} keeps {made} that sum up tokens"
        raise ConfigError("spec_method", f"must be one without trees: {reason}")


def _check_compressed(config: EngineConfig, model: ModelSpec, dtype: str) -> None:
    """Raise ConfigError if a model whose cache has entries cannot run with these options."""
    stored = AUTO, SHORT_DTYPES[dtype]
    for wrong, field, allowed in (
        (config.kv_cache_dtype not in stored, "kv_cache_dtype", f"{' or '.join(stored)}"),
        (config.block_size % ENTRY_TOKENS, "block_size", f"a multiple of {ENTRY_TOKENS}"),
    ):
        if wrong:
            reason = f"{model.architecture} keeps entries that sum up tokens"
            raise ConfigError(field, f"must be {allowed}: {reason}")


def choose_device(config: EngineConfig, hardware: Hardware, notes: Notes) -> tuple[str, Gpu | None]:
    """Choose "cpu", or "cuda:N" with its facts."""
    gpus = {gpu.index: gpu for gpu in hardware.gpus}
    if config.device == "cpu" or (config.device == "auto" and not gpus):
        reason = ASKED if config.device == "cpu" else "no CUDA device is visible"
        return notes.add("device", "cpu", reason), None
    _, _, number = config.device.partition(":")
    index = int(number) if number else min(gpus, default=0)
    if index not in gpus:
        visible = ", ".join(f"cuda:{i}" for i in sorted(gpus)) or "none"
        raise ConfigError("device", f"{config.device} does not exist (CUDA devices: {visible})")
    reason = ASKED if number else gpus[index].name
    return notes.add("device", f"cuda:{index}", reason), gpus[index]


def _memory_limit(config: EngineConfig, hardware: Hardware, gpu: Gpu | None, notes: Notes) -> Limit:
    free = gpu.free_memory if gpu else hardware.memory_limit
    source_of_free = "free GPU memory" if gpu else hardware.memory_reason
    limit = int(free * config.memory_utilization)
    source = f"{config.memory_utilization:.0%} of {show_bytes(free)} ({source_of_free})"
    notes.add("memory", show_bytes(limit), source)
    return Limit(limit, source)


def choose_dtype(
    config: EngineConfig,
    spec: ModelSpec,
    hardware: Hardware,
    gpu: Gpu | None,
    limit: Limit,
    notes: Notes,
) -> str:
    if config.dtype != "auto":
        return notes.add("dtype", config.dtype, ASKED)
    if gpu and spec.dtype == "bfloat16" and gpu.capability < (8, 0):
        return notes.add("dtype", "float16", f"{gpu.name} has no bfloat16")
    if gpu:
        return notes.add("dtype", spec.dtype, "the checkpoint's")
    fewer, stored_wide = "half the bytes to read", spec.dtype == "float32"
    if not stored_wide and hardware.fast_bf16:
        return notes.add("dtype", "bfloat16", f"{fewer}, and this CPU has bfloat16 arithmetic")
    if not stored_wide and native_reason(hardware) is None and config.kernels != "torch":
        return notes.add("dtype", "bfloat16", f"{fewer}, widened as they are read")
    full = spec.weight_bytes("float32", config.quantization)
    if full <= limit.size // 2:
        reason = "the checkpoint's" if stored_wide else "this CPU has no bfloat16 arithmetic"
        return notes.add("dtype", "float32", reason)
    return notes.add("dtype", "bfloat16", f"float32 would take {show_bytes(full)}")


def native_reason(hardware: Hardware) -> str | None:
    """Return why the native kernels cannot run on this machine; None if they can."""
    if not hardware.native:
        return "kvik was installed without its native kernels: was there a C++20 compiler?"
    if hardware.native_isa == "portable":
        return "this CPU is not known to have AVX2 or NEON"
    return None


def triton_reason(
    config: EngineConfig, hardware: Hardware, model: ModelSpec, device: str
) -> str | None:
    """Return why Triton's kernels cannot run on this machine; None if they can."""
    if device == "cpu":
        return "Triton's kernels are for GPUs"
    if not hardware.triton:
        return "Triton is not installed: pip install 'kvik[gpu]'"
    _, _, index = device.partition(":")
    for gpu in hardware.gpus:
        if gpu.index == int(index or 0) and gpu.capability < TRITON_CAPABILITY:
            have, need = (".".join(map(str, c)) for c in (gpu.capability, TRITON_CAPABILITY))
            return f"{gpu.name} has capability {have}, and Triton's kernels need {need}"
    for like in model.linear_layers:
        kind = matrix_kind(config.quantization, like.inputs, like.stored, head=like.head)
        if kind is not None and kind.group % TRITON_GROUP:
            return f"weights in groups of {kind.group}, which is not a multiple of {TRITON_GROUP}"
    return None


def choose_kernels(
    config: EngineConfig,
    hardware: Hardware,
    model: ModelSpec,
    device: str,
    dtype: str,
    notes: Notes,
) -> str:
    """Choose "native", "triton" or "torch"; raise ConfigError if the requested ones cannot run."""
    triton = triton_reason(config, hardware, model, device)
    if config.kernels == "triton" and triton is not None:
        allowed = "auto, native or torch" if device == "cpu" else "auto or torch"
        raise ConfigError("kernels", f"triton: {triton}; must be {allowed} here")
    if config.kernels == "auto" and triton is None:
        return notes.add("kernels", "triton", "compiled for this GPU when they first run")
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
        return notes.add("kernels", config.kernels, ASKED)
    if device != "cpu":
        return notes.add("kernels", "torch", str(triton))
    refusal = refusal or native_reason(hardware)
    if refusal is not None:
        return notes.add("kernels", "torch", refusal)
    return notes.add("kernels", "native", f"C++; this CPU has {hardware.native_isa}")


def choose_attention(
    config: EngineConfig, model: ModelSpec, kernels: str, dtype: str, gpu: Gpu | None, notes: Notes
) -> str:
    """Choose the attention backend.

    Args:
        kernels, dtype, gpu: of the engine; gpu is None on the CPU.

    Raises:
        ConfigError: "cpu", "triton" or "triton+sdpa" was requested and does not support this model,
            dtype or block size.
    """
    cpu = _unfit_for_cpu(config, model, kernels)
    triton = _unfit_for_triton(config, model, kernels, dtype)
    fused = triton or _no_torch_prompts(config, model, dtype)
    refusals = {"cpu": cpu, "triton": triton, TRITON_SDPA: fused}
    requested = config.attention_backend
    if requested != "auto":
        if (refusal := refusals.get(requested)) is not None:
            raise ConfigError("attention_backend", f"{requested}: {refusal}")
        return notes.add("attention_backend", requested, ASKED)
    threshold = None if gpu is None else dict(gpu.torch_prompts).get(max(model.head_dims))
    backend = "sdpa"
    if cpu is None:
        backend, reason = "cpu", "native kernels on a cache in their layout"
    elif kernels != "triton":
        reason = "torch's fastest attention" if kernels != "native" else f"not cpu, as {cpu}"
    elif model.encoder:
        reason = "not triton, whose kernels do not let queries see later keys"
    elif triton is not None:
        reason = f"not triton, as {triton}"
    elif model.latent is not None and fused is None:
        backend = TRITON_SDPA
        reason = f"torch's for prompts of {LATENT_TORCH_FROM} tokens and more, with keys and values"
        reason += " of all heads: fewer operations than over latent vectors"
    elif gpu is not None and threshold is not None and fused is None:
        backend = TRITON_SDPA
        reason = f"torch's was measured faster for prompts of {threshold} tokens and more"
        reason += f" on {gpu.name}"
    else:
        backend, reason = "triton", "reads the paged cache in place"
    return notes.add("attention_backend", backend, reason)


def _unfit_for_cpu(config: EngineConfig, model: ModelSpec, kernels: str) -> str | None:
    """Return why the native kernels cannot compute attention; None if they can."""
    if kernels != "native":
        return "it needs the native kernels"
    if config.kv_cache_dtype == "fp16":
        return "its cache has no fp16"
    if model.compressed:
        return _unfit_heads(model, LANES)
    if config.block_size % LANES:
        return f"block_size {config.block_size} is not a multiple of {LANES}"
    if model.latent is None:
        return _unfit_heads(model, LANES)
    rank, rope = model.latent.rank, model.latent.rope
    if rank % LANES or rope % LANES:
        return f"latent vectors are not multiples of {LANES}, of {rank} and {rope} channels"
    return None


def _unfit_for_triton(
    config: EngineConfig, model: ModelSpec, kernels: str, dtype: str
) -> str | None:
    """Return why Triton's kernels cannot compute attention; None if they can."""
    if kernels != "triton":
        return "it needs the Triton kernels"
    if model.latent is None:
        # Rotation and rounding work on halves of a head; with four bits a half must be whole bytes.
        return _unfit_heads(model, 4 if config.kv_cache_dtype == "int4" else 2)
    if config.kv_cache_dtype not in (AUTO, SHORT_DTYPES[dtype]):
        return f"its latent vectors are stored in {dtype} only"
    return None


def torch_prompts(backend: str, model: ModelSpec, gpu: Gpu | None) -> int | None:
    """Return the length from which torch's attention computes fresh prompts; None: never."""
    if backend != TRITON_SDPA:
        return None
    if model.latent is not None:
        return LATENT_TORCH_FROM
    measured = {} if gpu is None else dict(gpu.torch_prompts)
    return measured.get(max(model.head_dims)) or TORCH_FROM


def _unfit_heads(model: ModelSpec, multiple: int) -> str | None:
    """Return why kernels do not support a model's heads; None if they do."""
    for dim in model.head_dims:
        if dim % multiple or dim > MAX_HEAD_DIM:
            return f"head_dim {dim} is not a multiple of {multiple} up to {MAX_HEAD_DIM}"
    return None


def _no_torch_prompts(config: EngineConfig, model: ModelSpec, dtype: str) -> str | None:
    """Return why torch's fused kernels cannot take prompts; None if they can."""
    kv, latent = config.kv_cache_dtype, model.latent
    if model.compressed:
        return "only Triton's kernels read entries that sum up tokens"
    wide = 0 if latent is None else max(latent.query, latent.value)
    if wide > MAX_FUSED_HEAD_DIM:
        return f"torch's fused kernels have no heads of {wide}"
    if dtype not in FUSED_DTYPES:
        return f"torch's fused kernels have no {dtype}"
    if kv not in ("auto", SHORT_DTYPES[dtype]):
        return f"only Triton's kernels read keys stored as {kv}"
    return None


BUILT_IN = "as the engine folder was built"
# Values that leave the choice to kvik.
LEFT_OPEN: Mapping[str, str] = {
    "dtype": "auto",
    "kernels": "auto",
    "quantization": "none",
    "device": "auto",
}
REBUILD = "build another one from the model itself: kvik build MODEL -o ENGINE"


def built_in(built: Built) -> dict[str, Any]:
    """Return the fields of `EngineConfig` that an engine folder fixes, with their values."""
    values = {"dtype": built.dtype, "kernels": built.kernels, "quantization": built.quantization}
    return values | {"device": "cpu"} if built.kernels == "native" else values


def settled(config: EngineConfig, built: Built, hardware: Hardware) -> EngineConfig:
    """Return the options with the fields that an engine folder fixes filled in.

    Raises:
        ConfigError: a different value was requested, or the folder cannot run on this machine.
    """
    values = built_in(built)
    for name, value in values.items():
        requested = getattr(config, name)
        if requested not in (value, LEFT_OPEN[name]):
            raise ConfigError(
                name,
                f"is {value} in this engine folder, not {requested}: leave it out, or {REBUILD} "
                f"--{name} {requested}",
            )
    if built.quantization not in SCHEMES:
        raise ConfigError(
            "quantization",
            f"{built.quantization!r} of this engine folder is unknown to this kvik: {REBUILD}",
        )
    if built.kernels == "native" and not hardware.native:
        raise ConfigError(
            "kernels",
            "this engine folder is for the native kernels, which kvik was installed without: "
            f"{REBUILD}",
        )
    if built.kernels == "triton" and not hardware.triton:
        raise ConfigError(
            "kernels",
            "this engine folder is for Triton's kernels, and Triton is not installed: "
            f"pip install 'kvik[gpu]', or {REBUILD}",
        )
    return replace(config, **values)


def check_draft(built: Built, dtype: str, kernels: str, quantization: str) -> None:
    """Check that a draft model in an engine folder can run with a model.

    Args:
        dtype, kernels: of the model.
        quantization: requested for the draft model.

    Raises:
        ConfigError: it cannot.
    """
    required = {"dtype": dtype, "kernels": kernels}
    if quantization != LEFT_OPEN["quantization"]:
        required["quantization"] = quantization
    values = built_in(built)
    for name, value in required.items():
        if values[name] != value:
            raise ConfigError(
                "spec_model",
                f"{name} is {values[name]} in its engine folder and must be {value}: {REBUILD} "
                f"--{name} {value}",
            )


def _choose_kv_format(config: EngineConfig, spec: ModelSpec, dtype: str, notes: Notes) -> None:
    """Note the format of the KV cache. Raises ConfigError if the model has no such layers, or its
    heads cannot be stored in the format."""
    name, skipped = config.kv_cache_dtype, sorted(set(config.kv_cache_dtype_skip_layers))
    for layer in skipped:
        if layer >= spec.num_layers:
            raise ConfigError(
                "kv_cache_dtype_skip_layers",
                f"must name layers from 0 to {spec.num_layers - 1}, not {layer}",
            )
        if not spec.layers[layer].attends:
            raise ConfigError(
                "kv_cache_dtype_skip_layers", f"must name layers with attention, not {layer}"
            )
        if (owner := spec.layers[layer].kv_from) is not None:
            raise ConfigError(
                "kv_cache_dtype_skip_layers",
                f"must name layers that store keys, not {layer}, which reads those of {owner}",
            )
    if name == AUTO:
        if skipped:
            raise ConfigError(
                "kv_cache_dtype_skip_layers", "needs a kv_cache_dtype other than auto"
            )
        notes.add("kv_cache_dtype", dtype, f"the model's{_calibrated(spec)}")
        return
    if name == "int4" and spec.latent:
        raise ConfigError("kv_cache_dtype", "int4 cannot store latent vectors: use int8 or fp8")
    if name == "int4" and (odd := [dim for dim in spec.head_dims if dim % 2]):
        raise ConfigError("kv_cache_dtype", f"int4 needs heads of even size, not {odd[0]}")
    reason = f"as asked: keys and values {KV_FORMATS[name].meaning}"
    if skipped:
        reason += f"; layers {', '.join(map(str, skipped))} in {dtype}"
    notes.add("kv_cache_dtype", name, reason + _calibrated(spec))


def _calibrated(spec: ModelSpec) -> str:
    """Return a remark on the checkpoint's scales for keys and values, which are not used."""
    if spec.quantization is None or not spec.quantization.kv_scales:
        return ""
    return "; the checkpoint's calibrated scales are not needed: each vector has its own"
