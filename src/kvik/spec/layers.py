"""The facts that differ between layers of a model, and reading them from config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvik.errors import shown
from kvik.spec.experts import ExpertsSpec
from kvik.spec.fields import Fields
from kvik.spec.kv import CompressedSpec, IndexSpec, StateSpec
from kvik.spec.rope import MAX_POSITIONS, RopeSpec, read_rope
from kvik.spec.visible_keys import Budget, Window

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Attention over keys that an indexer chooses, or over summaries of several keys, by `layer_types`,
# keys of config.json and names of architectures.
INDEXED, COMPRESSED = "indexed attention", "compressed attention"
INDEXED_TYPES = ("indexed_attention", "deepseek_sparse_attention")
COMPRESSED_TYPES = ("compressed_sparse_attention", "heavily_compressed_attention")
IN_BLOCKS = "minimax_m3_sparse"  # KV heads choose blocks of keys
SPARSE_TYPES: Mapping[str, str] = {
    **dict.fromkeys(INDEXED_TYPES, INDEXED),
    "qwen_sparse_attention": INDEXED,
    IN_BLOCKS: INDEXED,
    **dict.fromkeys(COMPRESSED_TYPES, COMPRESSED),
}
SPARSE_KEYS: Mapping[str, str] = {
    "index_topk": INDEXED,
    "sparse_attention_config": INDEXED,
    "compress_rates": COMPRESSED,
    "compress_ratios": COMPRESSED,
}
LINEAR, CONV = "linear_attention", "conv"
BESIDE = "hybrid"  # attention beside a state
MLP, EXPERTS = "mlp", "moe"  # of layers without attention or state
BLOCK_KINDS = "layers_block_type"  # key of models that have such layers, in place of `layer_types`
# Other names in `layer_types`, in old files.
LEGACY_TYPES: Mapping[str, str] = {"attention": FULL, "mamba": LINEAR}
# Names in `layer_types` of layers that keep a state, and of layers that attend to all visible keys.
STATE_TYPES, ATTENDING_TYPES = (LINEAR, CONV), (FULL, SLIDING)
DEFAULT_WINDOW = 4096  # of transformers, when the key is left out; null means no window
MAX_STREAMS = 16
# Of a row of the cache: latent and rotary key of DeepSeek-V3 (csrc/kv_cache.hpp).
MAX_LATENT_WIDTH = 576
MAX_QUERY_RANK = 1 << 20


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Attention over latent vectors (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434,
    section 2.1): keys and values of all heads are computed from one vector per token."""

    rank: int  # width of that vector
    rope: int  # rotated channels of a key, shared by all heads
    nope: int  # channels of a head's key that are computed from the vector
    value: int  # channels of a head's value
    # Width of the vector that queries are computed from; None: the hidden state itself.
    q_rank: int | None = None

    @property
    def width(self) -> int:
        """Cached width of a token: its vector and its rotated key."""
        return self.rank + self.rope

    @property
    def query(self) -> int:
        """Channels of a head's query and key."""
        return self.nope + self.rope


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Scales queries at position p by 1 + weight * log(1 + (p + first) // step), so that their
    softmax does not flatten with more keys (Llama 4; Nakanishi 2025, arXiv 2501.19399)."""

    step: int
    weight: float
    first: int = 1


@dataclass(frozen=True, slots=True)
class AltUpSpec:
    """Residual streams of which layers compute on one (Baykal et al. 2023, arXiv 2301.13310)."""

    count: int
    active: int  # number of that one
    scaled: bool  # what is read of it after a layer has learned gains


@dataclass(frozen=True, slots=True)
class HyperSpec:
    """Residual streams of which layers compute on sums, with weights that depend on the token
    (hyper-connections, Zhu et al. 2024, arXiv 2409.19606)."""

    count: int
    # largest, smallest: weights of a token; the smallest is also added to the largest.
    largest: float
    smallest: float
    # Of the weights by which the streams are mixed with each other (`Ops.stream_weights`); 0: they
    # are not mixed, else `smallest` is of what layers read and of these.
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The facts of one layer."""

    window: Window | None = None  # which keys a query sees; None: all
    rope: RopeSpec | None = None  # rotary positions of queries and keys; None: none
    slopes: tuple[float, ...] = ()  # of ALiBi, for each head (`alibi_slopes`); (): none
    distances: bool = False  # a learned number is added to scores, by the distance of a key
    experts: ExpertsSpec | None = None  # of its feed-forward part; None: a plain MLP
    latent: LatentSpec | None = None  # latent attention; None: keys and values of heads
    # Of latent attention, chooses the keys; None: a query reads all that it sees.
    index: IndexSpec | None = None
    compressed: CompressedSpec | None = None  # attention over a window and entries; None: other
    # Kept per request in place of keys and values; None: the layer has none.
    state: StateSpec | None = None
    beside: bool = False  # the layer has attention beside what keeps the state
    feeds: bool = False  # it has an MLP or experts alone, neither attention nor a state
    heads: int | None = None  # number of heads of queries; None: the model's
    # head_dim, kv_heads: head dimension and number of KV heads; None: the model's.
    head_dim: int | None = None
    kv_heads: int | None = None
    # Channels of a head's value; None: as many as of its key. The cache stores as many of both,
    # with zeros after a value.
    value_dim: int | None = None
    kv_from: int | None = None  # earlier layer whose keys and values it reads; None: it has its own
    # weights_from, shared_rank: earlier layer whose attention and MLP it has, None: its own; and
    # inner width of the products that a layer adds to matrices which several have.
    weights_from: int | None = None
    shared_rank: int = 0
    # It has no value projection; values are the keys before norm and rotation.
    value_is_key: bool = False
    # Width of its MLP, also of one in addition to experts; None: the model's.
    inner: int | None = None
    token_input: int = 0  # width of a vector per token that only this layer reads; 0: none
    # Tokens that have such vectors; others have those of token 0. None: all.
    input_tokens: int | None = None
    # alt_up, hyper: several residual streams, the same in all layers; None: there is one.
    alt_up: AltUpSpec | None = None
    hyper: HyperSpec | None = None
    # Width of a learned addition to what attention reads (LAuReL, Menghani et al. 2024, arXiv
    # 2411.07501); 0: there is none.
    residual_rank: int = 0
    # Share of the gates of its MLP that are cut to 0, if they are distributed normally.
    sparsity: float = 0.0
    limit: float = 0.0  # of its MLP, as `ExpertsSpec.shared_limit`
    query_scale: QueryScale | None = None  # of its queries; None: 1
    unnormed: bool = False  # its attention reads the residual stream as it is
    norm_rank: int = 0  # inner width of the gates of its norms; 0: they are not gated
    # Of its attention and of its MLP: of what each reads, to which its output is added, and of that
    # output. (): it is added to the residual stream.
    factors: tuple[float, ...] = ()
    # The output of its experts is added after the next layer, which is a part of the same block.
    shortcut: bool = False
    # In an encoder, the distance up to which a query sees keys on either side. All layers use one
    # cache, whose content lasts for a step. None: attention is causal.
    bidirectional: int | None = None
    budget: Budget | None = None  # how many tokens of a request it keeps; None: all

    @property
    def attends(self) -> bool:
        return (self.state is None or self.beside) and not self.feeds

    @property
    def streams(self) -> AltUpSpec | HyperSpec | None:
        return self.alt_up or self.hyper


@dataclass(frozen=True, slots=True)
class PredictorSpec:
    """A head that predicts the token after the next one (DeepSeek-V3, arXiv 2412.19437, section
    2.2): a matrix joins the hidden state of a token with the embedding of the next one, and a layer
    like the model's last one with attention follows. Embedding and output are the model's."""

    scope: str = "model.layers.{}"  # of its names; {} is the model's number of layers
    # embedding, hidden: norms of the parts that are joined.
    embedding: str = "enorm"
    hidden: str = "hnorm"
    join: str = "eh_proj"  # the matrix
    layer: str = ""  # scope of the layer; "": none
    norm: str = "shared_head.norm"  # norm after the layer
    hidden_first: bool = False  # the matrix reads the hidden state before the embedding
    offset: float = 0.0  # of the norms' gains


# config.json, number of layers, trained positions -> the layers. Raises `ModelError`.
LayerRule = Callable[[Fields, int, int], tuple[LayerSpec, ...]]


def unturned_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers without positions, as in GPT-2: learned positions are part of the embedding."""
    return (LayerSpec(),) * layers


def alibi_slopes(heads: int, largest: float = 8.0, factor: float = 1.0) -> tuple[float, ...]:
    """Return the slopes of heads (ALiBi, Press et al. 2021, arXiv 2108.12409, section 3): powers of
    2 with exponents up to `largest` in equal steps, for the next power of two of heads. Of these
    those with the larger steps come first.

    Args:
        factor: of the slopes.
    """
    count = 1 << (heads - 1).bit_length()
    slopes = [factor * 2.0 ** (-largest * i / count) for i in range(1, count + 1)]
    return tuple(slopes if heads == count else (slopes[1::2] + slopes[::2])[:heads])


def encoder_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Learned positions, as in BERT: every query sees all keys."""
    return (LayerSpec(bidirectional=MAX_POSITIONS),) * layers


def rotary_layers(
    fields: Fields,
    layers: int,
    positions: int,
    *,
    fraction: float | None = None,
    interleaved: bool = False,
) -> tuple[LayerSpec, ...]:
    """Every layer sees all keys; for the arguments see `read_rope`."""
    rope = read_rope(fields, positions, fraction=fraction, interleaved=interleaved)
    return (LayerSpec(None, rope),) * layers


def optional_rotary_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Only some layers have rotary positions, see `turning` (SmolLM3)."""
    if fields.boolean("use_sliding_window", False):
        raise fields.error("use_sliding_window", "must be false")
    rope = read_rope(fields, positions)
    return tuple(LayerSpec(None, rope if turns else None) for turns in turning(fields, layers))


def turning(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return which layers have rotary positions: by `no_rope_layers`, where 1 means yes; if it is
    empty, all but every `no_rope_layer_interval`-th (default 4)."""
    every = fields.integer("no_rope_layer_interval", 1, MAX_POSITIONS, 4)
    if fields.raw("no_rope_layers") in (None, []):
        return tuple((i + 1) % every != 0 for i in range(layers))
    turned = fields.numbers("no_rope_layers", 0, 1)
    if len(turned) != layers:
        raise fields.error("no_rope_layers", f"must have {layers} entries, not {len(turned)}")
    return tuple(map(bool, turned))


def mixed_layers(
    fields: Fields,
    layers: int,
    positions: int,
    *,
    every: int,
    full_rotary: bool = True,
    interleaved: bool = False,
) -> tuple[LayerSpec, ...]:
    """Layers with a window; each `every`-th, or those in `layer_types`, without one.

    Args:
        full_rotary: layers without a window have rotary positions too; else no positions.
        interleaved: see `read_rope`.
    """
    rope = read_rope(fields, positions, interleaved=interleaved)
    window = read_window(fields)
    if window is None:  # EXAONE 4 without windows has rotary positions in every layer
        return (LayerSpec(None, rope),) * layers
    key = "sliding_window_pattern"  # in configs without `layer_types`
    pattern = fields.raw(key)
    if isinstance(pattern, int):
        every = fields.integer(key, 1, MAX_POSITIONS)
    elif isinstance(pattern, str) and "layer_types" not in fields:  # LLLG in EXAONE
        every = len(pattern)
        if pattern != (every - 1) * "L" + "G":
            raise fields.error(key, f"must be one G after any number of L, not {shown(pattern)}")
    types = layer_types(fields, layers, every)
    full = LayerSpec(None, rope if full_rotary else None)
    return tuple(full if kind == FULL else LayerSpec(window, rope) for kind in types)


def typed_layers(
    fields: Fields, layers: int, positions: int, *, fraction: float | None = None
) -> tuple[LayerSpec, ...]:
    """Layers with and without a window, by `layer_types` (default: without), each kind with its own
    rotary positions in `rope_parameters`.

    Args:
        fraction: see `read_rope`.
    """
    rope = partial(read_rope, fields, positions, fraction=fraction)
    kinds = {FULL: LayerSpec(None, rope(layer_type=FULL))}
    types = layer_types(fields, layers, every=1)
    if SLIDING in types:
        kinds[SLIDING] = LayerSpec(read_window(fields), rope(layer_type=SLIDING))
    return tuple(kinds[kind] for kind in types)


def windowed_layers(
    fields: Fields,
    layers: int,
    positions: int,
    *,
    fraction: float | None = None,
    scaled_queries: bool = False,
) -> tuple[LayerSpec, ...]:
    """Every layer has a sliding window, unless `sliding_window` is null (Mistral); for the
    arguments see `read_rope`."""
    rope = read_rope(fields, positions, fraction=fraction, scaled_queries=scaled_queries)
    return (LayerSpec(read_window(fields), rope),) * layers


def switched_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers with windows, if `use_sliding_window` is true: those in `layer_types`, else from
    `max_window_layers` on (Qwen2 and 3)."""
    rope = read_rope(fields, positions)
    used = fields.boolean("use_sliding_window", False)
    window = read_window(fields) if used else None  # files may have 0 if it is not used
    if "layer_types" in fields:
        return tuple(
            LayerSpec(layer_window, rope) for layer_window in typed_windows(fields, layers, window)
        )
    first = fields.integer("max_window_layers", 0, MAX_POSITIONS, 28)
    return tuple(LayerSpec(window if i >= first else None, rope) for i in range(layers))


def latent_layers(
    fields: Fields, layers: int, positions: int, *, interleaved: bool | str = True
) -> tuple[LayerSpec, ...]:
    """Every layer has latent attention over all tokens (DeepSeek-V2).

    Args:
        interleaved: see `read_rope`; or the key that decides (true if absent).
    """
    latent = read_latent(fields)
    if isinstance(interleaved, str):
        interleaved = fields.boolean(interleaved, True)
    rope = read_rope(fields, positions, interleaved=interleaved)
    return (LayerSpec(None, rope, latent=latent),) * layers


def read_latent(fields: Fields, *, turned: bool = True) -> LatentSpec:
    """Return the sizes of latent attention.

    Args:
        turned: a part of keys is computed from hidden states, and has positions.
    """
    rank = fields.integer("kv_lora_rank", 1, MAX_LATENT_WIDTH, 512)
    bounds = (2, MAX_LATENT_WIDTH, 64) if turned else (0, 0, 0)
    rope = fields.integer("qk_rope_head_dim", *bounds)
    if rope % 2:
        raise fields.error("qk_rope_head_dim", f"must be even, not {rope}")
    if rank + rope > MAX_LATENT_WIDTH:
        message = f"must be at most {MAX_LATENT_WIDTH} with qk_rope_head_dim ({rope}), not {rank}"
        raise fields.error("kv_lora_rank", message)
    # null: queries are computed from the hidden state, as in DeepSeek-V2-Lite
    has_rank = not fields.is_null("q_lora_rank")
    return LatentSpec(
        rank,
        rope,
        fields.integer("qk_nope_head_dim", 1, MAX_LATENT_WIDTH, 128),
        fields.integer("v_head_dim", 1, MAX_LATENT_WIDTH, 128),
        fields.integer("q_lora_rank", 1, MAX_QUERY_RANK, 1536) if has_rank else None,
    )


def read_window(fields: Fields) -> Window | None:
    """Return `sliding_window`."""
    if fields.is_null("sliding_window"):
        return None
    return Window(fields.integer("sliding_window", 1, MAX_POSITIONS, DEFAULT_WINDOW))


def check_layer_types(fields: Fields, rules: Sequence[LayerSpec]) -> None:
    """Check that the layers have the kinds in `layer_types`. Architectures with equal layers do not
    read that key, and a file may have their name although its layers differ.

    Raises:
        ModelError: a kind is unknown to kvik, or not that of the layer.
    """
    for layer, kind in zip(rules, _types(fields), strict=False):
        allowed: tuple[str, ...]
        if layer.beside:
            allowed = (BESIDE,)
        elif layer.state is not None:
            allowed = STATE_TYPES
        elif layer.window is not None and layer.window.chunked:
            allowed = (CHUNKED,)
        elif layer.compressed is not None:
            allowed = (SLIDING, *COMPRESSED_TYPES)
        elif layer.index is not None:
            allowed = (IN_BLOCKS,) if layer.index.span else INDEXED_TYPES
            allowed += (FULL,) if layer.index.pool else ()
        else:
            allowed = ATTENDING_TYPES
        if kind not in allowed:
            expected = " or ".join(allowed[:2])
            raise fields.error("layer_types", f"must hold {expected}, not {shown(kind)}")


def refuse_sparse(fields: Fields, indexed: Sequence[str]) -> None:
    """Check that no layer has indexed or compressed attention that its architecture lacks.

    Args:
        indexed: kinds of layers with indexed attention that it has.

    Raises:
        ModelError: a layer has.
    """
    features = {INDEXED, *map(SPARSE_TYPES.get, indexed)} if indexed else set()
    for key, feature in SPARSE_KEYS.items():
        if key in fields and feature not in features:
            raise fields.error(key, f"must be absent: {feature} is not supported")
    for kind in fields.strings("layer_types"):
        if kind in SPARSE_TYPES and kind not in indexed:
            message = f"must not hold {kind}: {SPARSE_TYPES[kind]} is not supported"
            raise fields.error("layer_types", message)


def layers_with_states(
    fields: Fields, attends: LayerSpec, kind: str, keeps: LayerSpec, types: tuple[str, ...]
) -> tuple[LayerSpec, ...]:
    """Return the layers of a model in which, by `types`, some keep a state and others attend.

    Args:
        attends, keeps: a layer of either kind.
        kind: the type of layers that keep a state.
    """
    if FULL not in types:
        raise fields.error("layer_types", f"must hold {FULL} at least once")
    return tuple(keeps if layer_type == kind else attends for layer_type in types)


def layer_types(
    fields: Fields, layers: int, every: int = 0, other: str = SLIDING, *, first: bool = False
) -> tuple[str, ...]:
    """Return `FULL` or `other` for each layer, by `layer_types`.

    Args:
        every: without that key, each `every`-th layer is full; 0: the key is required.
        first: these begin with the first layer.
    """
    if every and "layer_types" not in fields:
        return tuple(FULL if (i + (not first)) % every == 0 else other for i in range(layers))
    types = _types(fields)
    if len(types) != layers:
        raise fields.error("layer_types", f"must have {layers} entries, not {len(types)}")
    for kind in types:
        if kind not in (FULL, other):
            raise fields.error("layer_types", f"must hold {FULL} or {other}, not {shown(kind)}")
    return types


def _types(fields: Fields) -> tuple[str, ...]:
    """Return `layer_types` by their new names."""
    return tuple(LEGACY_TYPES.get(kind, kind) for kind in fields.strings("layer_types"))


def typed_windows(fields: Fields, layers: int, window: Window | None) -> tuple[Window | None, ...]:
    """Return the window of each layer; see `layer_types`."""
    types = layer_types(fields, layers)
    if window is None and SLIDING in types:
        raise fields.error("layer_types", f"has {SLIDING}, but no sliding_window is in use")
    return tuple(window if kind == SLIDING else None for kind in types)
