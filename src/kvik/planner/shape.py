"""The shape of a decoder: its matrices and what it caches, and what follows from them alone.

Everything here is counted, nothing measured. Formulae are of the dense transformer; MLA follows
DeepSeek-V2 (arXiv 2405.04434), routed experts are taken as drawn evenly and independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvik.models.model_spec import ModelSpec
from kvik.planner.formats import kv_facts, weight_facts
from kvik.spec.declare import UNQUANTISED
from kvik.spec.model import DTYPE_BYTES
from kvik.spec.visible_keys import ALL_KEYS, Window
from kvik.spec.weight_kind import WeightKind
from kvik.spec.weights import layer_kind

# What quantised checkpoints leave in the model's dtype: also tables that are looked up.
UNQUANTIZED_ROLES: frozenset[str] = UNQUANTISED | {"embedding", "positions"}


@dataclass(frozen=True, slots=True)
class MatrixGroup:
    """Equal weight matrices of one kind. Of a table, `inputs` is its width, `outputs` its rows.

    Attributes:
        role: "embedding", "positions", "qkv", "o", "gate_up", "down", "head"; with experts
            "router", "expert_gate_up", "expert_down", and "shared_gate_up", "shared_down" with
            their "shared_gate"; with MLA "q_down", "q_up", "kv_down", "kv_up"; with gated delta
            nets "gates"; "up" where the MLP has no gate; "" where an embedding is narrower than a
            layer, between the two.
        count: how many in the whole model: layers, times experts where routed.
        experts: of a layer, of which `active` serve a token; 0: every token uses the matrix.
        multiplied: False: a table that is looked up.
    """

    role: str
    count: int
    inputs: int
    outputs: int
    experts: int = 0
    active: int = 0
    multiplied: bool = True

    @property
    def parameters(self) -> int:
        return self.count * self.inputs * self.outputs

    @property
    def active_parameters(self) -> int:
        """That one token is multiplied with."""
        if not self.multiplied:
            return 0
        share = self.count // self.experts * self.active if self.experts else self.count
        return share * self.inputs * self.outputs

    def touched(self, rows: int) -> float:
        """Return how many of them a step with `rows` tokens reads: all, or the experts that are
        hit."""
        if not self.experts:
            return float(self.count)
        missed = (1 - self.active / self.experts) ** rows
        return self.count * (1 - missed)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What equal layers cache of a token.

    Attributes:
        layers: how many layers cache this.
        elements: numbers per token and layer: K and V of all KV heads, or MLA's latent and its
            rotary key, which all heads share.
        vectors: that these are, each with a scale where the format has them: one for each K and
            each V of a head; one for MLA.
        window: which keys a query sees; None: all.
        shared_by: further layers, which read what these cache.
        copies: that processes have of it, on average.
    """

    layers: int
    elements: int
    vectors: int
    window: Window | None = None
    shared_by: int = 0
    copies: float = 1.0

    @property
    def readers(self) -> int:
        """All layers that read it."""
        return self.layers + self.shared_by

    def most_keys(self, context: int) -> int:
        """Return the most keys that the last query of a `context` sees."""
        return context if self.window is None else min(context, self.window.most)

    def token_bytes(self, kv_format: str) -> int:
        """Return bytes of one token in one of the layers, scales and all copies included."""
        once = self.vectors * kv_facts(kv_format).vector_bytes(self.elements // self.vectors)
        return round(self.copies * once)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer has.

    Attributes:
        other_parameters, state_bytes, state_flops: see `ModelShape`.
        cache: None: it keeps a state, or reads what the layer `kv_from` caches.
    """

    matrices: tuple[MatrixGroup, ...]
    other_parameters: int
    cache: CacheShape | None
    state_bytes: int = 0
    state_flops: int = 0
    kv_from: int | None = None

    @property
    def attends(self) -> bool:
        return self.cache is not None or self.kv_from is not None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder, as far as its cost depends on it.

    Attributes:
        name: what the user called it, shortened to a word.
        attention: "MHA", "GQA", "MQA" or "MLA".
        intermediate_size: width of the MLP a token goes through; with experts, of the active and
            shared ones together.
        head_dim: of queries and keys; `v_head_dim` of values.
        latent_dim: MLA: the width of the compressed K and V; else 0.
        state_bytes: that layers keep of a request in place of K and V, however long it is.
        state_width: numbers of a token that such a layer holds during a step.
        state_flops: operations of a token on all states.
        dtype: of the checkpoint's unquantised parts: "bfloat16", "float16" or "float32".
        stored: the weight format of the checkpoint: "bf16", "fp8", ...
        tied: the head is the embedding; it then counts once, as the head.
        other_parameters: norms and biases, which stay in the dtype.
        layers: what each has; (): it is not known which have what only some have.
        kernels: whose layout quantised weights have: "torch", "native" or "triton" (`laid_out` in
            `memory.py` sets it for a machine).
        spec: set when this engine runs the model.
        notes: what was assumed while the config was read.
    """

    name: str
    architecture: str
    attention: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    max_context: int
    dtype: str
    stored: str
    tied: bool
    matrices: tuple[MatrixGroup, ...]
    other_parameters: int
    caches: tuple[CacheShape, ...]
    latent_dim: int = 0
    state_bytes: int = 0
    state_width: int = 0
    state_flops: int = 0
    layers: tuple[LayerShape, ...] = field(default=(), repr=False, compare=False)
    kernels: str = "torch"
    spec: ModelSpec | None = None
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        return self.other_parameters + sum(m.parameters for m in self.matrices)

    @property
    def active_parameters(self) -> int:
        """That one token is computed with; embedding lookups are not counted."""
        return self.other_parameters + sum(m.active_parameters for m in self.matrices)

    def working_dtype(self, weight_format: str) -> str:
        """Return the dtype the model computes in with such weights, which is also that of what is
        not quantised: float32, bfloat16 or float16."""
        asked = weight_facts(weight_format).dtype
        if asked:
            return asked
        return "float16" if self.dtype == "float16" else "bfloat16"

    def kind_of(self, matrix: MatrixGroup, weight_format: str) -> WeightKind | None:
        """Return how a matrix is stored; None: as floats. What quantised checkpoints leave in the
        model's dtype keeps it, and so does the head where the format has none."""
        facts, role = weight_facts(weight_format), matrix.role
        spared = role == "head" and not facts.head and facts.name == self.stored
        if spared or role in UNQUANTIZED_ROLES:
            return None
        fine = role in ("head", "token_inputs")  # keeps eight bits
        return layer_kind(facts.quantization or "none", matrix.inputs, head=fine)

    def weight_bytes(self, weight_format: str) -> int:
        """Return bytes of all weights.

        Args:
            weight_format: of the linear layers, as `formats` names it.
        """
        return self.bytes_of(self.matrices, self.other_parameters, weight_format)

    def bytes_of(
        self, matrices: Sequence[MatrixGroup], other_parameters: int, weight_format: str
    ) -> int:
        """Return bytes of some of its weights."""
        found = sum(m.count * self._matrix_bytes(m, weight_format) for m in matrices)
        return found + other_parameters * self._item(weight_format)

    def read_bytes(self, weight_format: str, rows: int) -> float:
        """Return bytes of weights that one step with `rows` tokens reads.

        Each matrix once, of routed experts those that at least one token is expected to choose,
        of tables the rows looked up.
        """
        total = float(self.other_parameters * self._item(weight_format))
        return total + sum(self.read_of(m, weight_format, rows) for m in self.matrices)

    def read_of(self, matrix: MatrixGroup, weight_format: str, rows: int) -> float:
        """Return what `read_bytes` counts for the matrices of one kind."""
        if matrix.multiplied:
            return matrix.touched(rows) * self._matrix_bytes(matrix, weight_format)
        return float(min(rows, matrix.outputs) * matrix.inputs * self._item(weight_format))

    def kv_bytes_per_token(self, kv_format: str) -> int:
        """Return bytes one token adds to the cache, all layers together, windows not yet full."""
        return self.kv_bytes(1, kv_format)

    def kv_bytes(self, context: int, kv_format: str) -> int:
        """Return bytes the cache of one sequence holds; a window keeps its own tokens only."""
        return sum(
            cache.layers * cache.token_bytes(kv_format) * cache.most_keys(context)
            for cache in self.caches
        )

    def state_traffic(self, cached: int) -> int:
        """Return bytes of a sequence's states that a step reads and writes, once each, however many
        tokens it computes; a sequence of which nothing is cached begins with zeros."""
        return self.state_bytes * (2 if cached else 1)

    def matmul_flops(self, rows: int, sampled: int) -> float:
        """Operations of the matrix products of a step: 2 for each parameter and row.

        Args:
            rows: tokens of the step.
            sampled: rows the head is computed for.
        """
        total = 0
        for matrix in self.matrices:
            total += matrix.active_parameters * (sampled if matrix.role == "head" else rows)
        return 2.0 * total

    def kv_read_bytes(self, context: int, kv_format: str) -> int:
        """Return bytes that the layers read of the cache of one sequence for its next token."""
        return sum(
            cache.readers * cache.token_bytes(kv_format) * cache.most_keys(context)
            for cache in self.caches
        )

    def attention_flops(self, new_tokens: int, context: int) -> float:
        """Operations of attention over the cache for one sequence.

        Args:
            new_tokens: computed in this step.
            context: keys the last of them sees, its own included.
        """
        cached = context - new_tokens
        total = 0.0
        for cache in self.caches:
            pairs = (cache.window or ALL_KEYS).pairs(cached, context, context)
            width = self.head_dim + self.v_head_dim
            if not self.latent_dim:  # which may differ by layer
                width = 2 * cache.elements // cache.vectors
            layer = 2.0 * self.num_heads * width * pairs
            if self.latent_dim:
                # K and V of what is cached made again from the latent, or attention in the latent
                # space ("absorbed"), whichever is less work.
                per_key = self.latent_dim * (width - (cache.elements - self.latent_dim))
                expanded = layer + 2.0 * self.num_heads * per_key * cached
                absorbed = 2.0 * self.num_heads * (cache.elements + self.latent_dim) * pairs
                layer = min(expanded, absorbed)
            total += cache.readers * layer
        return total

    def _item(self, weight_format: str) -> int:
        return DTYPE_BYTES[self.working_dtype(weight_format)]

    def _matrix_bytes(self, matrix: MatrixGroup, weight_format: str) -> int:
        kind = self.kind_of(matrix, weight_format)
        if kind is None:
            return matrix.inputs * matrix.outputs * self._item(weight_format)
        return kind.weight_bytes(matrix.inputs, matrix.outputs, self.kernels)
