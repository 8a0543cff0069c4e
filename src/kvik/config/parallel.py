"""What a model must be like to be divided among processes."""

from __future__ import annotations

from kvik.config.compute import Compute
from kvik.config.config import EngineConfig
from kvik.config.hardware import Hardware
from kvik.config.speculative import MODEL_METHODS, SpeculativeConfig
from kvik.errors import ConfigError
from kvik.models.model_spec import ModelSpec

OPTION = "tensor_parallel_size"


def check_group(
    config: EngineConfig,
    spec: ModelSpec,
    compute: Compute,
    hardware: Hardware,
    asked: SpeculativeConfig | None,
) -> None:
    """Check that each process of a group has something to compute, and can.

    Raises:
        ConfigError: naming what is in the way.
    """
    ranks = config.tensor_parallel_size
    if ranks == 1:
        return
    if compute.kernels != "native" or compute.attention != "cpu":
        found = f"{compute.kernels} kernels with {compute.attention} attention"
        raise ConfigError(OPTION, f"must be 1 with {found}: the native kernels alone are divided")
    heads, threads = spec.num_heads, config.threads or hardware.threads
    if ranks > heads:
        raise ConfigError(OPTION, f"must be at most {heads}, its heads of queries, not {ranks}")
    if ranks > threads:
        raise ConfigError(OPTION, f"must be at most {threads}, as there are threads, not {ranks}")
    kinds = {
        "latent attention": spec.latent is not None,
        "routed experts": any(layer.experts for layer in spec.layers),
        "states": bool(spec.states),
    }
    for kind, there in kinds.items():
        if there:
            raise ConfigError(OPTION, f"must be 1: layers with {kind} are not divided")
    if spec.built is not None or config.engine_cache is not None:
        raise ConfigError(OPTION, "must be 1 with an engine folder, whose matrices are whole")
    if asked is not None and asked.method in MODEL_METHODS:
        raise ConfigError(OPTION, f"must be 1 with {asked.method}, whose model is not divided")
