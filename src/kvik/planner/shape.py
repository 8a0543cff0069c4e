"""The shape of a decoder, its matrices and caches, and the costs that follow from it.

All figures are counted, not measured. MLA follows DeepSeek-V2 (arXiv 2405.04434); experts are
assumed to be chosen uniformly and independently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvik.models.model_spec import ModelSpec
from kvik.planner.formats import kv_facts, weight_facts
from kvik.spec.declared import UNQUANTISED
from kvik.spec.kv import KVCacheSpec
from kvik.spec.model import DTYPE_BYTES
from kvik.spec.visible_keys import ALL_KEYS, Window
from kvik.spec.weight_kind import WeightKind
from kvik.spec.weights import layer_kind

# Roles that quantised checkpoints leave in the model's dtype, including lookup tables.
UNQUANTIZED_ROLES: frozenset[str] = UNQUANTISED | {"embedding", "positions"}


@dataclass(frozen=True, slots=True)
class MatrixGroup:
    """Equal weight matrices of one role. For a table, `inputs` is its width, `outputs` its rows."""

    # "embedding", "positions", "qkv", "o", "gate_up", "down", "head"; with experts "router",
    # "expert_gate_up", "expert_down", and "shared_gate_up", "shared_down" with their "shared_gate";
    # with MLA "q_down", "q_up", "kv_down", "kv_up"; with gated delta nets "gates" and "wide_gates";
    # "up" in place of "gate_up" where there is no gate; with residual streams "mixture" and
    # "streams"; "" for the projection between layers and an
    # embedding that is narrower.
    role: str
    count: int  # matrices in the whole model: layers, times experts where routed
    inputs: int
    outputs: int
    experts: int = 0  # per layer, `active` of them per token; 0: every token uses the matrix
    active: int = 0
    multiplied: bool = True  # False for a lookup table
    uses: int = 1  # how often a step multiplies with it
    # Numbers of outputs, and the kind in which the engine loads them from the checkpoint; (): it is
    # not quantised, or not known to the engine.
    stored: tuple[tuple[int, WeightKind | None], ...] = ()

    @property
    def parameters(self) -> int:
        return self.count * self.inputs * self.outputs

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with."""
        if not self.multiplied:
            return 0
        share = self.count * self.active // self.experts if self.experts else self.count
        return share * self.inputs * self.outputs

    def touched(self, rows: int) -> float:
        """Return how many matrices a step of `rows` tokens reads: all, or those of the experts
        expected to be chosen."""
        if not self.experts:
            return float(self.count)
        missed = (1 - self.active / self.experts) ** rows
        return self.count * (1 - missed)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one layer."""

    matrices: tuple[MatrixGroup, ...]
    other_parameters: int  # norms and biases, which keep the dtype
    # None: the layer has no attention, or reads the cache of layer `kv_from`.
    cache: KVCacheSpec | None
    state_bytes: int = 0  # bytes per request, of any length, that it keeps in place of K and V
    # (kind, operations per token) on the state, see `StateSpec.flops`
    state_flops: tuple[tuple[str, int], ...] = ()
    kv_from: int | None = None
    entries: tuple[KVCacheSpec, ...] = ()  # of entries that sum up tokens, and of their keys

    @property
    def attends(self) -> bool:
        return self.cache is not None or self.kv_from is not None


def changed_layers(
    layers: Sequence[LayerShape], change: Callable[[LayerShape], LayerShape]
) -> tuple[LayerShape, ...]:
    """Return layers after a change; equal ones stay one object."""
    changed = {key: change(layer) for key, layer in {id(layer): layer for layer in layers}.items()}
    return tuple(changed[id(layer)] for layer in layers)


@dataclass(frozen=True, eq=False)  # without slots, for cached properties
class ModelShape:
    """A decoder, as far as its cost depends on it. Two are equal only if they are one object."""

    name: str  # the user's name for it, shortened to a word
    architecture: str
    attention: str  # "MHA", "GQA", "MQA" or "MLA"
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys; `v_head_dim` of values
    v_head_dim: int
    max_context: int
    # Of unquantised parts: "bfloat16", "float16" or "float32"; the checkpoint's, or on this machine
    # the engine's choice.
    dtype: str
    stored: str  # weight format of the checkpoint: "bf16", "fp8", ...
    tied: bool  # the head is the embedding, which then counts once, as the head
    # In order; equal ones are one object, which makes costs quick to compute.
    layers: tuple[LayerShape, ...] = field(repr=False)
    # Matrices, tables, norms and biases that are in no layer.
    outside: LayerShape = field(repr=False)
    # The engine's facts of the model, or of the most similar one that it runs.
    like: ModelSpec = field(repr=False)
    latent_dim: int = 0  # with MLA, the width of the compressed K and V; else 0
    # The layout of quantised weights: "torch", "native" or "triton" (`MemoryPlanner.of` sets
    # it for a machine).
    kernels: str = "torch"
    runs: bool = True  # whether the engine runs the model
    notes: tuple[str, ...] = ()  # assumptions made while reading the config

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def spec(self) -> ModelSpec | None:
        """The engine's facts, if it runs the model."""
        return self.like if self.runs else None

    @cached_property
    def _kinds(self) -> list[tuple[LayerShape, int]]:
        """The different layers with the number of each, and what is outside."""
        counts = Counter(map(id, self.layers))
        kinds = {id(layer): layer for layer in self.layers}
        return [*((kinds[key], count) for key, count in counts.items()), (self.outside, 1)]

    @cached_property
    def matrices(self) -> tuple[MatrixGroup, ...]:
        """All matrices and tables; equal ones are one group."""
        counts = Counter[MatrixGroup]()
        for layer, number in self._kinds:
            for matrix in layer.matrices:
                counts[replace(matrix, count=1)] += number * matrix.count
        return tuple(replace(matrix, count=count) for matrix, count in counts.items())

    @cached_property
    def caches(self) -> tuple[tuple[KVCacheSpec, int], ...]:
        """The different caches, and the number of layers with each."""
        counts = Counter[KVCacheSpec]()
        for layer, number in self._kinds:
            for cache in (layer.cache, *layer.entries):
                if cache is not None:
                    counts[cache] += number
        return tuple(counts.items())

    @cached_property
    def other_parameters(self) -> int:
        """Norms and biases, which keep the dtype."""
        return sum(number * layer.other_parameters for layer, number in self._kinds)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes per request, of any length, that layers keep in place of K and V."""
        return sum(number * layer.state_bytes for layer, number in self._kinds)

    @cached_property
    def state_flops(self) -> Counter[str]:
        """Operations per token on all states, by kind."""
        counts = Counter[str]()
        for layer, number in self._kinds:
            for kind, flops in layer.state_flops:
                counts[kind] += number * flops
        return counts

    @property
    def parameters(self) -> int:
        return self.other_parameters + sum(m.parameters for m in self.matrices)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is computed with, without embedding lookups."""
        return self.other_parameters + sum(m.active_parameters for m in self.matrices)

    def working_dtype(self, weight_format: str) -> str:
        """Return the dtype of computation and of unquantised weights with this weight format:
        float32, bfloat16 or float16."""
        return weight_facts(weight_format).dtype or self.dtype

    def kind_of(self, matrix: MatrixGroup, weight_format: str) -> WeightKind | None:
        """Return how a matrix, or its first part, is stored; None: in the model's dtype, as
        quantised checkpoints store some roles, and the head if the format does not quantise it."""
        facts, role = weight_facts(weight_format), matrix.role
        if matrix.stored and facts.name == self.stored:
            return matrix.stored[0][1]
        spared = role == "head" and not facts.head and facts.name == self.stored
        if spared or role in UNQUANTIZED_ROLES:
            return None
        fine = role in ("head", "token_inputs")  # stored in 8 bits
        return layer_kind(facts.quantization or "none", matrix.inputs, head=fine)

    def weight_bytes(self, weight_format: str) -> int:
        """Return bytes of all weights.

        Args:
            weight_format: of the linear layers; a name in `formats`.
        """
        return self.bytes_of(self.matrices, self.other_parameters, weight_format)

    def bytes_of(
        self, matrices: Sequence[MatrixGroup], other_parameters: int, weight_format: str
    ) -> int:
        """Return bytes of some of the weights."""
        num_bytes = sum(m.count * self._matrix_bytes(m, weight_format) for m in matrices)
        return num_bytes + other_parameters * self._item(weight_format)

    def read_bytes(self, weight_format: str, rows: int) -> float:
        """Return bytes of weights that a step of `rows` tokens reads.

        These are each matrix once, routed experts as often as they are expected to be chosen at
        all, and the rows looked up in tables.
        """
        total = float(self.other_parameters * self._item(weight_format))
        return total + sum(self.read_of(m, weight_format, rows) for m in self.matrices)

    def read_of(self, matrix: MatrixGroup, weight_format: str, rows: int) -> float:
        """Return the share of one group of matrices in `read_bytes`."""
        if matrix.multiplied:
            return matrix.touched(rows) * self._matrix_bytes(matrix, weight_format)
        return float(min(rows, matrix.outputs) * matrix.inputs * self._item(weight_format))

    def kv_bytes_per_token(self, kv_format: str) -> int:
        """Return bytes that one token adds to the cache of all layers, while windows are not
        full."""
        return self.kv_bytes(1, kv_format)

    def kv_bytes(self, context: int, kv_format: str) -> int:
        """Return bytes of the cache of one sequence; a window keeps only its own tokens."""
        return sum(
            layers * token_bytes(cache, kv_format) * most_keys(cache, context)
            for cache, layers in self.caches
        )

    def state_traffic(self, cached: int) -> int:
        """Return bytes of a sequence's states that a step reads and writes, once each for any
        number of tokens. With nothing cached, states start as zeros and are only written."""
        return self.state_bytes * (2 if cached else 1)

    def matmul_flops(self, rows: int, sampled: int) -> float:
        """Return the operations of a step's matrix products: 2 per parameter and row.

        Args:
            rows: tokens in the step.
            sampled: rows for which the head is computed.
        """
        total = 0
        for matrix in self.matrices:
            total += matrix.active_parameters * (sampled if matrix.role == "head" else rows)
        return 2.0 * total

    def kv_read_bytes(self, context: int, kv_format: str) -> int:
        """Return bytes of cache that all layers read for the next token of one sequence."""
        return sum(
            layers * cache.readers * read_bytes(cache, context, kv_format)
            for cache, layers in self.caches
        )

    def attention_flops(self, new_tokens: int, context: int) -> float:
        """Return the operations of attention for one sequence.

        Args:
            new_tokens: tokens computed in this step.
            context: keys that the last of them sees, including its own.
        """
        cached = context - new_tokens
        total = 0.0
        for cache, layers in self.caches:
            pairs = (cache.window or ALL_KEYS).pairs(cached, context, context)
            if cache.index is not None:
                if cache.index_bytes:
                    each = cache.index.heads * cache.index.dim / (cache.index.pool or 1)
                    total += 2.0 * layers * each * pairs
                pairs = Window(cache.index.top).pairs(cached, context, context)  # as many
            layer = self.pair_flops(cache) * pairs
            if self.latent_dim:
                # Expand cached latents to K and V, if that is less work than to attend in latent
                # space ("absorbed").
                width = self.head_dim + self.v_head_dim
                per_key = self.latent_dim * (width - (cache.head_dim - self.latent_dim))
                expanded = 2.0 * self.num_heads * (width * pairs + per_key * cached)
                layer = min(expanded, layer)
            total += layers * cache.readers * layer
        return total

    def pair_flops(self, cache: KVCacheSpec) -> float:
        """Return the operations of a layer for one (query, key) pair; MLA attends in latent
        space."""
        width = cache.read_width or cache.head_dim
        return 2.0 * self.num_heads * (width + (self.latent_dim or width))

    def _item(self, weight_format: str) -> int:
        return DTYPE_BYTES[self.working_dtype(weight_format)]

    def _matrix_bytes(self, matrix: MatrixGroup, weight_format: str) -> int:
        parts = matrix.stored if weight_format == self.stored else ()
        parts = parts or ((matrix.outputs, self.kind_of(matrix, weight_format)),)
        total, num_bytes = sum(outputs for outputs, _ in parts), 0
        for outputs, kind in parts:
            rows = matrix.outputs * outputs // max(1, total)  # fewer on one of several devices
            if kind is None:
                num_bytes += matrix.inputs * rows * self._item(weight_format)
            else:
                num_bytes += kind.weight_bytes(matrix.inputs, rows, self.kernels)
        return num_bytes


def read_bytes(cache: KVCacheSpec, context: int, kv_format: str) -> int:
    """Return bytes of cache that a layer reads for the next token of one sequence: of an indexer
    all its keys, and what it chooses."""
    indexed = 2 * cache.index_bytes
    share = (cache.read_width or cache.head_dim) / cache.head_dim
    vectors = int(read_keys(cache, context) * (token_bytes(cache, kv_format) - indexed) * share)
    if cache.index is not None and cache.index.pool:  # one key of each pool, and no gates
        indexed //= 2 * cache.index.pool
    return most_keys(cache, context) * indexed + vectors


def read_keys(cache: KVCacheSpec, context: int) -> int:
    """Return how many keys the last query of a `context` reads at most."""
    keys = most_keys(cache, context)
    return keys if cache.index is None else min(keys, cache.index.most)


def most_keys(cache: KVCacheSpec, context: int) -> int:
    """Return how many keys the last query of a `context` sees at most."""
    return context if cache.window is None else min(context, cache.window.max_keys)


def token_bytes(cache: KVCacheSpec, kv_format: str) -> int:
    """Return bytes per token and layer, including scales and the key of an indexer, which has 16
    bits."""
    return cache.vectors * kv_facts(kv_format).vector_bytes(cache.head_dim) + 2 * cache.index_bytes
