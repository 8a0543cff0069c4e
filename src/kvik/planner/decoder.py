"""A config.json and its family's row -> the shape of the decoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvik.errors import shown
from kvik.planner.family_table import Family
from kvik.planner.formats import weight_format
from kvik.planner.layers import LayerPart, Sizes, attention, latent_attention, mlp
from kvik.planner.shape import CacheShape, MatrixGroup, ModelShape
from kvik.spec.fields import Fields
from kvik.spec.kv import Window
from kvik.spec.model import DTYPE_BYTES, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from kvik.spec.rope import MAX_POSITIONS

# What a quantization_config says of its method, format or bits, and the weight format nearest.
STORED: Mapping[str | int, str] = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "float-quantized": "fp8",
    "mxfp4": "mxfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "int-quantized": "int8",
    "pack-quantized": "int4",
    4: "int4",
    8: "int8-weight-only",
}
FULL, SLIDING = "full_attention", "sliding_attention"


def uncounted(fields: Fields) -> tuple[str, ...]:
    """Return a note on the layers that predict further tokens, if there are some."""
    extra = fields.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0)
    return (f"layers for multi-token prediction are not counted: {extra}",) if extra else ()


def read_decoder(fields: Fields, family: Family, name: str, architecture: str) -> ModelShape:
    """Return the shape of a decoder of a family.

    Raises:
        ModelError: a field that is missing or cannot be.
    """
    sizes = Sizes(fields, family)
    hidden = sizes.integer("hidden_size", MAX_WIDTH)
    layers = sizes.integer("num_hidden_layers", MAX_LAYERS)
    heads = sizes.integer("num_attention_heads", MAX_HEADS)
    vocab = sizes.integer("vocab_size", MAX_VOCAB)
    context = sizes.integer("max_position_embeddings", MAX_POSITIONS)
    tied = fields.boolean("tie_word_embeddings", family.tied)
    dtype, stored, notes = stored_format(fields)
    notes += uncounted(fields)

    of_layers = latent_attention if "kv_lora_rank" in fields else attention
    attending = of_layers(sizes, layers, hidden, heads)
    mlps, width = mlp(sizes, layers, hidden)
    tables = _tables(sizes, vocab, hidden, context, tied)
    parts = (tables, attending.part, mlps)
    norms_of = family.computed.get("norms")
    norms = layers * (norms_of(fields) if norms_of else family.norms)
    norms += 1 + family.embedding_norm
    return ModelShape(
        name=name,
        architecture=architecture,
        attention=attending.kind,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=attending.kv_heads,
        head_dim=attending.head_dim,
        v_head_dim=attending.v_head_dim,
        max_context=context,
        dtype=dtype,
        stored=stored,
        gated_mlp=family.gated_mlp,
        tied=tied,
        matrices=tuple(m for part in parts for m in part.matrices if m.count),
        other_parameters=norms * hidden * family.norm_vectors + sum(p.others for p in parts),
        caches=tuple(
            CacheShape(count, attending.elements, attending.vectors, window)
            for window, count in Counter(_windows(sizes, layers)).items()
        ),
        latent_dim=attending.latent_dim,
        notes=notes,
    )


def stored_format(fields: Fields) -> tuple[str, str, tuple[str, ...]]:
    """The dtype of a checkpoint, the weight format it comes nearest to, and notes on both."""
    key = "dtype" if "dtype" in fields else "torch_dtype"
    dtype = fields.choice(key, tuple(DTYPE_BYTES), "float32")
    plain = weight_format(dtype)
    if "quantization_config" not in fields:
        return dtype, plain, () if key in fields else (f"no dtype is given: {dtype} taken",)
    config = fields.inside("quantization_config")
    method = config.raw("quant_method")
    # compressed-tensors is one method for all, and says in "format" what it made
    for said in (method, config.raw("format"), config.raw("bits")):
        nearest = STORED.get(said) if isinstance(said, str | int) else None
        if nearest == "fp8":
            return dtype, nearest, ()
        if nearest is not None:
            return dtype, nearest, (f"quantised by {shown(method)}: counted as {nearest}",)
    return dtype, plain, (f"quantised by {shown(method)}, which is not known: {plain} taken",)


def _tables(sizes: Sizes, vocab: int, hidden: int, context: int, tied: bool) -> LayerPart:
    """Embedding, learned positions, head."""
    family = sizes.family
    matrices = [MatrixGroup("head", 1, hidden, vocab)]
    if not tied:
        matrices.append(MatrixGroup("embedding", 1, hidden, vocab, multiplied=False))
    if family.positions is not None:
        rows = context + family.positions
        matrices.append(MatrixGroup("positions", 1, hidden, rows, multiplied=False))
    return LayerPart(tuple(matrices), 0)


def _windows(sizes: Sizes, layers: int) -> tuple[Window | None, ...]:
    """Return the sliding window of each layer; None: it sees everything."""
    fields, family = sizes.fields, sizes.family
    types = fields.strings("layer_types")
    if types and len(types) != layers:
        raise fields.error("layer_types", f"must have {layers} entries, not {len(types)}")
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise fields.error(
                "layer_types", f"must hold {FULL} or {SLIDING}: {shown(kind)} cannot be planned"
            )
    given = "sliding_window" in fields or "sliding_window" in family.defaults
    used = family.windows and given and not fields.is_null("sliding_window")
    window = None
    if used and fields.boolean("use_sliding_window", True):
        window = Window(sizes.integer("sliding_window", MAX_POSITIONS))
    if types:
        return tuple(window if kind == SLIDING else None for kind in types)
    return (window,) * layers
