"""What a model must be like to be divided among processes."""

from __future__ import annotations

from kvik.config.compute import Compute
from kvik.config.config import ASKED, EngineConfig
from kvik.config.hardware import Hardware
from kvik.errors import ConfigError
from kvik.models.model_spec import ModelSpec
from kvik.spec.model import DTYPE_BYTES
from kvik.spec.shares import HeadShare

OPTION = "tensor_parallel_size"


def check_group(
    config: EngineConfig,
    spec: ModelSpec,
    compute: Compute,
    hardware: Hardware,
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
    if spec.built is not None or config.engine_cache is not None:
        raise ConfigError(OPTION, "must be 1 with an engine folder, whose matrices are whole")


def share_reason(spec: ModelSpec, threads: int, ranks: int) -> str:
    """Return what each process has, as the reason of the decision."""
    shares = [HeadShare.of(spec.num_heads, spec.num_kv_heads, rank, ranks) for rank in range(ranks)]
    heads = sorted({end - first for first, end in (share.heads for share in shares)})
    kv_heads = sorted({end - first for first, end in (share.kv_heads for share in shares)})
    return (
        f"{ASKED}: each process has {_some(heads)} of {spec.num_heads} heads, {_some(kv_heads)} of "
        f"{spec.num_kv_heads} heads of keys, as much of each matrix, and {threads // ranks} of "
        f"{threads} threads"
    )


def whole_bytes(spec: ModelSpec, dtype: str) -> int:
    """Return the bytes of tables that each process has whole: of tokens where the head has a matrix
    of its own, and of positions."""
    tables = (table for table in spec.declaration.tables if not table.tied)
    return DTYPE_BYTES[dtype] * sum(table.num_parameters for table in tables)


def _some(counts: list[int]) -> str:
    return " or ".join(map(str, counts))
