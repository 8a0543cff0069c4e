"""What the KV cache is stored in: as asked, checked against the model."""

from __future__ import annotations

from kvik.config.config import EngineConfig
from kvik.config.errors import ConfigError
from kvik.config.kernels import Note
from kvik.config.kv_formats import AUTO, KV_FORMATS
from kvik.config.model_spec import ModelSpec


def choose_kv_format(config: EngineConfig, spec: ModelSpec, dtype: str, note: Note) -> None:
    """Write down what was asked for.

    Raises:
        ConfigError: the model has no such layers, or heads that the format cannot store.
    """
    name, skipped = config.kv_cache_dtype, sorted(set(config.kv_cache_dtype_skip_layers))
    for layer in skipped:
        if layer >= spec.num_layers:
            raise ConfigError(
                "kv_cache_dtype_skip_layers",
                f"must name layers from 0 to {spec.num_layers - 1}, not {layer}",
            )
    if name == AUTO:
        if skipped:
            raise ConfigError("kv_cache_dtype_skip_layers", "needs a kv_cache_dtype to keep out of")
        note("kv_cache_dtype", dtype, f"the model's{_calibrated(spec)}")
        return
    if name == "int4" and spec.head_dim % 2:
        raise ConfigError("kv_cache_dtype", f"int4 needs heads of even size, not {spec.head_dim}")
    reason = f"as asked: keys and values {KV_FORMATS[name].meaning}"
    if skipped:
        reason += f"; layers {', '.join(map(str, skipped))} in {dtype}"
    note("kv_cache_dtype", name, reason + _calibrated(spec))


def _calibrated(spec: ModelSpec) -> str:
    """What becomes of scales that the checkpoint has for keys and values."""
    if spec.quantization is None or not spec.quantization.kv_scales:
        return ""
    return "; the checkpoint's calibrated scales are not needed: each vector has its own"
