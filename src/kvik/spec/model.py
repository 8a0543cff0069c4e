"""Facts of a model: its sizes, its layers, the format of its checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from kvik.errors import ParamError
from kvik.spec.engine_folder import Built
from kvik.spec.kv import ENTRY_TOKENS, STATE_BYTES, KVCacheSpec, StateSpec
from kvik.spec.layers import AltUpSpec, HyperSpec, LatentSpec, LayerSpec, PredictorSpec, QueryScale
from kvik.spec.pooling import PoolingSpec
from kvik.spec.rope import RopeSpec
from kvik.spec.stored_weights import StoredQuantization, StoredScheme
from kvik.spec.visible_keys import Window

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGIT_BYTES = 4  # bytes of a logit, for models of any dtype
COUNTED_WIDTH = 16  # of a head in a cache that only counts tokens; the least of all kernels
SHORT_DTYPES: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """Equal linear layers of a model, each over `inputs` with `outputs`."""

    count: int  # number of layers; each expert counts
    inputs: int
    outputs: int
    head: bool = False  # the layer computes the logits; it may share its weights with the embedding
    # How the checkpoint stores the parts of a layer; None: as floats.
    stored: tuple[StoredScheme | None, ...] = (None,)

    @property
    def stored_bytes(self) -> int:
        """Upper bound of one layer's bytes in the checkpoint, without scales, if it is quantised
        and must be read as a whole; else 0."""
        all_bits = (part.bits for part in self.stored if part and not part.in_runs)
        bits = max(all_bits, default=0)
        return self.inputs * self.outputs * bits // 8


@dataclass(frozen=True, slots=True)
class ModelScales:
    """Constant factors and caps in a network."""

    embedding: float = 1.0  # multiplies token embeddings; rounded to the dtype of the computation
    residual: float = 1.0  # multiplies the outputs of attention and MLP
    attention: float | None = None  # multiplies scores; None: 1 / sqrt(head_dim)
    attention_cap: float | None = None  # a scaled score s becomes cap * tanh(s / cap); None: no cap
    qkv_limit: float | None = None  # q, k and v are clipped to +- this; None: they are not
    logits: float = 1.0  # multiplies the logits
    logits_cap: float | None = None  # likewise for logits
    # attention_out, state_out: multiply the outputs of attention and of what keeps a state.
    attention_out: float = 1.0
    state_out: float = 1.0
    # gate, down: multiply the gate of an MLP before its activation, and the MLP's output.
    gate: float = 1.0
    down: float = 1.0
    # Multiply parts of the inputs of what keeps a state; (): all 1.
    state_in: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FallbackFacts:
    """Memory needs of a model that runs through transformers, found without its weights."""

    parameters: int  # number of weights; shared ones count once
    cache_numbers: int  # numbers that a token adds to the cache of a request
    state_bytes: int  # additional bytes per request, independent of its length
    scores: bool  # attention stores the scores of all pairs of a chunk, as in its "eager" form


@dataclass(frozen=True)  # without slots, for cached properties: planning needs them many times
class ModelFacts:
    """Everything the engine needs to know about a model before it loads weights."""

    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    embedding_size: int  # width of token embeddings
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    num_heads: int  # of queries; the largest number of a layer
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str  # "silu", "gelu_new", ...
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    head_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint: "bfloat16", "float16", "float32"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: StoredQuantization | None = None  # of the checkpoint; None: plain floats
    rms_norm: bool = True  # else LayerNorm with biases
    gated_mlp: bool = True  # three matrices, else two
    scales: ModelScales = ModelScales()
    wiring: str = ""  # variant of the architecture's network; "": the only or usual one
    built: Built | None = None  # set for an engine folder, whose weights are already packed
    skipped_positions: int = 0  # first rows of the table of positions, which are never read
    token_types: int = 1  # token types (BERT's segments)
    pooling: PoolingSpec | None = None  # how it makes vectors or scores; None: its files do not say
    fallback: FallbackFacts | None = None  # set if transformers runs the model
    # config.json also describes encoders of images or sound, which are not read.
    with_encoders: bool = False
    predictor: PredictorSpec | None = None  # its head that drafts; None: none, or it is not used

    @cached_property
    def encoder(self) -> bool:
        """Whether attention is bidirectional, so that the model generates no text."""
        return any(layer.bidirectional is not None for layer in self.layers)

    @property
    def classifier(self) -> bool:
        """Whether a head over hidden states takes the place of the LM head."""
        return self.pooling is not None and bool(self.pooling.labels)

    def check_writes(self) -> None:
        """Raise `ParamError` if the model is an encoder or a classifier, which generate no text."""
        if self.encoder or self.classifier:
            gives = self.pooling.gives if self.pooling is not None else "vectors of texts"
            kind = "a classifier" if self.classifier else "an encoder"
            raise ParamError("model", f"is {kind}, which writes no text; it gives {gives}")

    @property
    def type_stride(self) -> int:
        """Rows between the same position of one token type and of the next (`token_types`)."""
        return self.skipped_positions + self.max_position_embeddings

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def last_attending(self) -> int:
        """The last layer with attention."""
        return max((i for i, layer in enumerate(self.layers) if layer.attends), default=0)

    @property
    def predictor_scope(self) -> str:
        """Prefix of the names of the weights of the head that drafts; "": there is none."""
        return f"{self.predictor.scope.format(self.num_layers)}." if self.predictor else ""

    @cached_property
    def cached_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that may store keys and values: all, then that of the head that drafts, which
        has its own indexer if the model has any."""
        if self.predictor is None:
            return self.layers
        last = self.layers[self.last_attending]
        index = None if last.index is None else replace(last.index, shared=False)
        return (*self.layers, replace(last, index=index))

    @property
    def windows(self) -> tuple[Window | None, ...]:
        """The window of each layer; None: all keys."""
        return tuple(layer.window for layer in self.layers)

    @property
    def full_layers(self) -> list[int]:
        """The layers whose queries see all keys."""
        return [i for i, y in enumerate(self.layers) if y.attends and y.window is None]

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct rotary positions of layers; empty if positions are learned."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope))

    @cached_property
    def rotations(self) -> tuple[tuple[RopeSpec, int], ...]:
        """The distinct pairs of rotary positions and head dimension."""
        pairs = (self.rotation(layer) for layer in self.layers)
        return tuple(dict.fromkeys(pair for pair in pairs if pair))

    @cached_property
    def query_scales(self) -> tuple[QueryScale, ...]:
        """The distinct query scales of layers."""
        scales = (layer.query_scale for layer in self.layers)
        return tuple(dict.fromkeys(scale for scale in scales if scale))

    def rotation(self, layer: LayerSpec) -> tuple[RopeSpec, int] | None:
        """Return a layer's pair in `rotations`; None: it has no rotary positions."""
        if layer.rope is None:
            return None
        narrow = layer.compressed or layer.latent
        return layer.rope, narrow.rope if narrow else self.heads(layer)[1]

    def inner(self, layer: LayerSpec) -> int:
        """Return the width of a layer's MLP."""
        return layer.inner or self.intermediate_size

    @cached_property
    def inner_width(self) -> int:
        """The largest number of inner activations of a token in the MLP or experts of a layer."""
        return max(
            (
                max(layer.experts.active_width, layer.inner or 0)
                if layer.experts
                else self.inner(layer)
                for layer in self.layers
            ),
            default=0,
        )

    @cached_property
    def limited_width(self) -> int:
        """The largest number of inner activations of a token in an MLP with a limit."""
        widths = (
            (layer.experts.shared_limit and layer.experts.shared)
            if layer.experts
            else (layer.limit and self.inner(layer))
            for layer in self.layers
        )
        return int(max(widths, default=0))

    def heads(self, layer: LayerSpec) -> tuple[int, int]:
        """Return a layer's number of KV heads and its head dimension."""
        return layer.kv_heads or self.num_kv_heads, layer.head_dim or self.head_dim

    def value_dim(self, layer: LayerSpec) -> int:
        """Return the number of channels of a layer's value heads."""
        return layer.value_dim or self.heads(layer)[1]

    def query_heads(self, layer: LayerSpec) -> int:
        """Return a layer's number of heads of queries."""
        return layer.heads or self.num_heads

    @cached_property
    def head_dims(self) -> tuple[int, ...]:
        """The distinct dimensions of heads of keys and of values in layers with attention; without
        any, of the cache."""
        attending = [layer for layer in self.layers if layer.attends]
        sizes = (self.heads(layer)[1] for layer in attending), map(self.value_dim, attending)
        return tuple(dict.fromkeys(chain(*sizes))) or (COUNTED_WIDTH,)

    @cached_property
    def query_width(self) -> int:
        """The largest width of the queries of all heads of a layer."""
        return self.num_heads * max(self.head_dims, default=0)

    @cached_property
    def key_width(self) -> int:
        """The largest width of the keys of all heads of a layer."""
        return max((math.prod(self.heads(layer)) for layer in self.layers), default=0)

    @cached_property
    def experts_of_token(self) -> int:
        """The largest number of active experts per token in a layer; 0: no layer has experts."""
        return max(
            (layer.experts.router.columns for layer in self.layers if layer.experts), default=0
        )

    @cached_property
    def max_context(self) -> int:
        """The longest context, including the extension of positions.

        Files of the kinds "linear", "dynamic" and "yarn" often give `max_position_embeddings`
        before the extension; the other kinds give the final length.
        """
        stretched = (
            int(rope.original_max_position * rope.factor)
            for rope in self.ropes
            if rope.kind in ("linear", "dynamic", "yarn")
        )
        longest = max(self.max_position_embeddings, *stretched, 0)
        limit = None if self.pooling is None else self.pooling.max_tokens
        return longest if limit is None else min(longest, limit)

    @property
    def latent(self) -> LatentSpec | None:
        """The latent attention of its layers, the same for all that attend; None: keys and values
        of heads. With latent attention, `num_kv_heads` is 1 and `head_dim` is the cached width of a
        token."""
        return next((layer.latent for layer in self.layers if layer.latent), None)

    @property
    def streams(self) -> AltUpSpec | HyperSpec | None:
        """The residual streams of its layers; None: there is one."""
        return next((layer.streams for layer in self.layers if layer.streams), None)

    @property
    def residual_width(self) -> int:
        """The width of all residual streams together."""
        return self.hidden_size * (self.streams.count if self.streams else 1)

    @property
    def indexed(self) -> int:
        """Most keys that a query reads, as indexers choose; 0: no layer has one."""
        return max((layer.index.top for layer in self.layers if layer.index), default=0)

    @property
    def pools(self) -> bool:
        """Whether indexers of layers score pools of keys."""
        return any(layer.index.pool for layer in self.layers if layer.index)

    @cached_property
    def compressed(self) -> bool:
        """Whether layers have entries that sum up tokens, or one vector as key and value."""
        return any(layer.compressed for layer in self.layers)

    @property
    def divisible_heads(self) -> int:
        """Into how many parts query heads can be divided; of compressed attention by groups."""
        groups = [layer.compressed.groups for layer in self.layers if layer.compressed]
        return min(groups, default=self.num_heads)

    @property
    def joined_layers(self) -> list[tuple[int, int]]:
        """For each layer that must be in one stage of a pipeline with an earlier one, both numbers:
        it reads the keys and values of that, or the keys that its indexer chose, or the token,
        which only the first stage knows."""
        pairs, chooses = [], 0
        for number, layer in enumerate(self.layers):
            if layer.kv_from is not None:
                pairs.append((number, layer.kv_from))
            if layer.index is not None and layer.index.shared:
                pairs.append((number, chooses))
            elif layer.index is not None:
                chooses = number
            if number and layer.experts is not None and layer.experts.router.by_token:
                pairs.append((number, 0))
        return pairs

    def kv_specs(self, dtype_bytes: int) -> list[KVCacheSpec | None]:
        """Return what each layer stores per token, at `dtype_bytes` for each number; None: it has
        no attention, or reads another layer's keys and values. If no layer has attention, the first
        one reserves the smallest vectors, so that blocks count tokens."""
        if self.fallback is not None:  # the first layer counts for all
            return [_counted(self.fallback, dtype_bytes), *[None] * (self.num_layers - 1)]
        if not any(layer.attends for layer in self.layers):
            counted = KVCacheSpec(1, COUNTED_WIDTH, 2 * COUNTED_WIDTH * dtype_bytes)
            return [counted, *[None] * (self.num_layers - 1)]
        readers = Counter(layer.kv_from for layer in self.layers)
        if self.encoder:  # all layers use one cache: no layer reads what another has stored
            first = self._kv_spec(self.layers[0], dtype_bytes, self.num_layers)
            return [first, *[None] * (self.num_layers - 1)]
        specs = [
            self._kv_spec(layer, dtype_bytes, 1 + readers[index])
            for index, layer in enumerate(self.cached_layers)
        ]
        for layer, of in enumerate(layer.compressed for layer in self.layers):
            for number, dim in enumerate(of.dims(self.head_dim) if of else ()):
                assert of is not None
                width, read = dim // ENTRY_TOKENS, max(1, dim // of.every)
                size = width * dtype_bytes
                spec = KVCacheSpec(1, width, size, latent=True, read_width=read, entries_of=layer)
                if of.index is not None and not number:
                    spec = replace(spec, index=replace(of.index, top=of.index.top * of.every))
                specs.append(spec)
        return specs

    def entries_of(self, layer: int) -> list[int]:
        """Return the numbers in `kv_specs` of the entries of a layer and of their keys."""
        each = [of.compressed.dims(self.head_dim) if of.compressed else () for of in self.layers]
        first, count = (sum(map(len, part)) for part in (each[:layer], each[layer : layer + 1]))
        first += len(self.cached_layers)
        return [*range(first, first + count)]

    def _kv_spec(self, layer: LayerSpec, dtype_bytes: int, readers: int) -> KVCacheSpec | None:
        if not layer.attends or layer.kv_from is not None:
            return None
        kv_heads, head_dim = self.heads(layer)
        if layer.compressed is not None:
            width = head_dim + layer.compressed.inputs(head_dim)
            size, read = width * dtype_bytes, head_dim
            return KVCacheSpec(1, width, size, layer.window, latent=True, read_width=read)
        size = kv_heads * head_dim * dtype_bytes
        index = layer.index.stored * dtype_bytes if layer.index and not layer.index.shared else 0
        return KVCacheSpec(
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            bytes_per_token=(size if layer.latent else 2 * size) + index,
            index=layer.index,
            index_bytes=index,
            window=layer.window,
            latent=layer.latent is not None,
            readers=readers,
            budget=layer.budget,
        )

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes that one token adds to the cache, over all layers."""
        return sum(spec.bytes_per_token for spec in self.kv_specs(dtype_bytes) if spec)

    @cached_property
    def states(self) -> tuple[StateSpec, ...]:
        """The states of the layers that keep one, in order."""
        return tuple(layer.state for layer in self.layers if layer.state)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one request, over all layers; 0: no layer keeps one."""
        if self.fallback is not None:
            return self.fallback.state_bytes
        return STATE_BYTES * sum(state.size for state in self.states)

    @property
    def state_width(self) -> int:
        """See `StateSpec.step_width`: the largest of all layers."""
        return max((state.step_width for state in self.states), default=0)


def _counted(facts: FallbackFacts, dtype_bytes: int) -> KVCacheSpec:
    """Return the spec by which blocks account for transformers' own cache."""
    vector = max(1, -(-facts.cache_numbers // 2))  # of K, and of V
    return KVCacheSpec(num_kv_heads=1, head_dim=vector, bytes_per_token=2 * vector * dtype_bytes)
