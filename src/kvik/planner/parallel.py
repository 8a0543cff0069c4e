"""The part of a model on one of the devices that share it.

Tensor parallelism cuts each layer, as Megatron-LM does (Shoeybi et al. 2019): the first matrix of a
pair by its outputs, the second by its inputs, so that a pair ends in one sum over the devices.
Pipeline parallelism gives each stage whole layers.
"""

from __future__ import annotations

from dataclasses import replace

from kvik.errors import ConfigError
from kvik.planner.shape import CacheShape, MatrixGroup, ModelShape

MAX_DEVICES = 1024

# Whole on every device: too small to be worth a message, or (the latents of MLA) of no one head.
REPLICATED = frozenset({"router", "positions", "q_down", "kv_down"})
# Cut by inputs: the second matrix of each pair. Everything else is cut by outputs.
SECOND = frozenset({"o", "down", "expert_down", "shared_down"})
# Only at an end of the pipeline.
ENDS = frozenset({"embedding", "head"})


def check_parallel(shape: ModelShape, tp: int, pp: int) -> None:
    """Raise ConfigError if `tp` devices cannot share a layer, or `pp` stages the layers."""
    for name, value in (("tp", tp), ("pp", pp)):
        if not 1 <= value <= MAX_DEVICES:
            raise ConfigError(name, f"must be an integer in [1, {MAX_DEVICES}], not {value}")
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    if heads % tp:
        raise ConfigError("tp", f"must divide the {heads} query heads, not {tp}")
    if not shape.latent_dim and kv_heads % tp and tp % kv_heads:
        raise ConfigError(
            "tp", f"must divide the {kv_heads} key/value heads or be a multiple of them, not {tp}"
        )
    if pp > shape.num_layers:
        raise ConfigError("pp", f"must be at most the {shape.num_layers} layers, not {pp}")


def can_share(shape: ModelShape, tp: int, pp: int = 1) -> bool:
    """Return whether `check_parallel` accepts it."""
    try:
        check_parallel(shape, tp, pp)
    except ConfigError:
        return False
    return True


def share(shape: ModelShape, tp: int, pp: int) -> ModelShape:
    """Return the part on the fullest device, as a smaller model.

    K and V of a head are copied where there are more devices than KV heads; the latent of MLA
    serves all heads and is copied to all. The fullest stage of a pipeline has the most layers, and
    is taken to have the larger of embedding and head. Of states each device has those of its heads.

    Raises:
        ConfigError: the model cannot be cut so.
    """
    check_parallel(shape, tp, pp)
    if tp == pp == 1:
        return shape
    kv_heads = -(-shape.num_kv_heads // tp)
    stage = -(-shape.num_layers // pp)
    kept = _kept_end(shape) if pp > 1 else ENDS
    matrices = tuple(
        replace(_cut(matrix, shape, tp), count=_in_stage(matrix, stage, shape.num_layers))
        for matrix in shape.matrices
        if matrix.role not in ENDS or matrix.role in kept
    )
    return replace(
        shape,
        intermediate_size=-(-shape.intermediate_size // tp),
        num_layers=stage,
        num_heads=shape.num_heads // tp,
        num_kv_heads=kv_heads,
        matrices=matrices,
        other_parameters=-(-shape.other_parameters * stage // shape.num_layers),
        caches=tuple(
            _cut_cache(
                replace(
                    cache,
                    layers=-(-cache.layers * stage // shape.num_layers),
                    shared_by=-(-cache.shared_by * stage // shape.num_layers),
                ),
                1 if shape.latent_dim else tp,
            )
            for cache in shape.caches
        ),
        state_bytes=-(-shape.state_bytes * stage // (shape.num_layers * tp)),
        state_width=-(-shape.state_width // tp),
        state_flops=-(-shape.state_flops * stage // (shape.num_layers * tp)),
        spec=None,
    )


def _kept_end(shape: ModelShape) -> frozenset[str]:
    ends = [matrix for matrix in shape.matrices if matrix.role in ENDS]
    largest = max(ends, key=lambda matrix: matrix.parameters, default=None)
    return frozenset({largest.role}) if largest else frozenset()


def _cut(matrix: MatrixGroup, shape: ModelShape, tp: int) -> MatrixGroup:
    if matrix.role in REPLICATED:
        return matrix
    if matrix.role in SECOND:
        return replace(matrix, inputs=-(-matrix.inputs // tp))
    if matrix.role == "qkv":
        pair = shape.head_dim + shape.v_head_dim
        queries = matrix.outputs - shape.num_kv_heads * pair
        kept = -(-shape.num_kv_heads // tp) * pair
        return replace(matrix, outputs=-(-queries // tp) + kept)
    return replace(matrix, outputs=-(-matrix.outputs // tp))


def _in_stage(matrix: MatrixGroup, stage: int, layers: int) -> int:
    """Return how many of them the fullest stage holds."""
    if matrix.role in ENDS or matrix.role == "positions":
        return matrix.count
    each = matrix.experts or 1  # of one layer
    return -(-(matrix.count // each) * stage // layers) * each


def _cut_cache(cache: CacheShape, tp: int) -> CacheShape:
    """Return the cache of one rank of `tp`, each of which has as many KV heads."""
    kv_heads = max(1, cache.vectors // 2)
    kept = -(-kv_heads // tp)
    return replace(
        cache,
        elements=cache.elements // kv_heads * kept,
        vectors=cache.vectors // kv_heads * kept,
    )
