"""Storage formats of weights and KV cache, their sizes, and the units that multiply them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvik.errors import ConfigError
from kvik.spec.kv import KV_FORMATS, KVFacts
from kvik.spec.model import SHORT_DTYPES


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """A weight format."""

    name: str
    units: Mapping[str, str]  # kind of device -> the unit that multiplies, a key of `Device.rates`
    quantization: str = ""  # its name in `EngineConfig.quantization`; "": not quantised
    dtype: str = ""  # the dtype of the whole model, if the format is a plain dtype; else ""
    head: bool = True  # whether checkpoints in this format also store the head in it


WEIGHT_FORMATS: Mapping[str, WeightFacts] = {
    facts.name: facts
    for facts in (
        WeightFacts("fp32", {"cpu": "fp32", "cuda": "fp32"}, dtype="float32"),
        WeightFacts("bf16", {"cpu": "bf16", "cuda": "bf16"}, dtype="bfloat16"),
        WeightFacts("fp16", {"cpu": "fp16", "cuda": "fp16"}, dtype="float16"),
        WeightFacts("int8", {"cpu": "int8", "cuda": "int8"}, "int8"),
        WeightFacts("int8-weight-only", {"cpu": "bf16", "cuda": "bf16"}, "int8-weight-only"),
        WeightFacts("fp8", {"cpu": "bf16", "cuda": "fp8"}, "fp8", head=False),
        # On a CPU, activations are rounded to 8 bits; on a GPU, weights are widened.
        WeightFacts("int4", {"cpu": "int8", "cuda": "bf16"}, "int4"),
        WeightFacts("mxfp4", {"cpu": "int8", "cuda": "bf16"}, "mxfp4"),
    )
}


def weight_facts(name: str) -> WeightFacts:
    """Raises ConfigError, which names the formats there are."""
    if name not in WEIGHT_FORMATS:
        raise ConfigError("dtype", f"must be one of {', '.join(WEIGHT_FORMATS)}, not {name!r}")
    return WEIGHT_FORMATS[name]


def kv_facts(name: str) -> KVFacts:
    """Raises ConfigError, which names the formats there are."""
    if name not in KV_FORMATS:
        raise ConfigError("kv_cache_dtype", f"must be one of {', '.join(KV_FORMATS)}, not {name!r}")
    return KV_FORMATS[name]


def weight_format(dtype: str, quantization: str = "none") -> str:
    """Return the format's name for a resolved dtype ("bfloat16", ...) and
    `EngineConfig.quantization`."""
    return SHORT_DTYPES[dtype] if quantization == "none" else quantization


def arithmetic(weight_format: str, device_kind: str) -> str:
    """Return the unit that multiplies weights of a format on a "cpu" or "cuda" device."""
    return weight_facts(weight_format).units[device_kind]
