"""The vocabulary of model declarations: facts of an architecture, and the layers of its network.

The constructors in `models/` declare layers to a `LayerBuilder`. The one in `nn.builder` builds
these layers; `describe` runs the same constructors with a builder that only lists them. So
parameter counts, the memory plan, the quantiser and the planner read the one declaration of a model
without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from kvik.spec.fields import Fields
from kvik.spec.kv import CompressedSpec, IndexSpec
from kvik.spec.layers import (
    LatentSpec,
    LayerRule,
    LayerSpec,
    PredictorSpec,
    QueryScale,
    rotary_layers,
)
from kvik.spec.stored_weights import TEXT_MODEL

if TYPE_CHECKING:
    from torch import Tensor

    from kvik.spec.experts import ExpertsRule, ExpertsSpec, Router
    from kvik.spec.kv import StateSpec
    from kvik.spec.model import ModelFacts, ModelScales
    from kvik.spec.pooling import PoolingSpec
    from kvik.spec.rope import RopeSpec

# Role of a matrix in a block; "gates": of a gated delta net or of attention, and "wide_gates" those
# that are computed from narrow vectors, or these from values; "mixture": small ones that weigh
# residual streams, or keys of a pool, and "streams" those that make streams or read them at the
# end; "o_down": a matrix for each group of heads, before "o"; "": in no block, as in draft heads.
Role = Literal[
    "qkv",
    "q_down",
    "q_up",
    "kv_down",
    "kv_up",
    "gates",
    "wide_gates",
    "o_down",
    "o",
    "gate_up",
    "up",
    "down",
    "router",
    "expert_gate_up",
    "expert_up",
    "expert_down",
    "shared_gate",
    "shared_gate_up",
    "shared_up",
    "shared_down",
    "head",
    "embedding",
    "positions",
    "token_inputs",
    "streams",
    "mixture",
    "",
]
# Roles of matrices that stay floats in every format: small ones whose errors would change the
# choice of experts or the mixture of streams, and those of heads or groups of heads: "kv_up", which
# is applied to queries instead of keys, and "o_down".
UNQUANTISED: frozenset[Role] = frozenset({"router", "shared_gate", "kv_up", "o_down", "mixture"})
# Roles of matrices that no adapter of a request changes.
FIXED_FOR_REQUESTS: frozenset[Role] = UNQUANTISED | {"head", "token_inputs", "streams"}
# Roles of matrices that are too small to be divided among processes.
SMALL: frozenset[Role] = frozenset(
    {"q_down", "kv_down", "gates", "wide_gates", "router", "shared_gate", "mixture"}
)


@dataclass(frozen=True, slots=True)
class FilePart:
    """A tensor of a GGUF file, as a part of a checkpoint's tensor."""

    name: str  # of the layer in a block that reading the file gives; {} is the number of an expert
    # rows, columns: of the layer's weight; (): all, in their order.
    rows: Sequence[int] = ()
    columns: Sequence[int] = ()
    transposed: bool = False  # the checkpoint stores [inputs, outputs]
    # Number of matrices in the file, [heads, rows, columns], one for each head; 0: the tensor is
    # one matrix.
    heads: int = 0
    turned: bool = False  # the matrices of heads are transposed


# Key of config.json that only GGUF files imply: they store separately, or in another order, the
# layers that checkpoints store in one matrix. Networks that support both read it as their wiring.
SEPARATE = "stored_apart"


def separate_wiring(fields: Fields) -> str:
    """Return the wiring of a network whose variants differ only in how they are stored."""
    return SEPARATE if fields.boolean(SEPARATE, False) else ""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an architecture implies beyond the sizes in its config.json."""

    name: str  # as in `architectures` of config.json
    model_type: str  # as in config.json; used if config.json names no architecture
    models: str  # common names of its models
    make: Callable[[ModelFacts, LayerBuilder], Network]  # the constructor of its network
    layers: LayerRule = rotary_layers  # reads the facts that differ between layers
    experts: ExpertsRule | None = None  # reads which layers have routed experts; None: no layer
    optional_experts: bool = False  # some of its models have no layer with experts
    # qkv_bias, o_bias, mlp_bias, head_bias, qk_norm: a fact, or the config.json key that decides
    # (false if absent).
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool | str = False
    qk_norm: bool | str = False
    value_norm: bool = False  # heads of values are normalised
    # The supported `hidden_act` values; the first is the default.
    activations: tuple[str, ...] = ("silu", "swish")
    # RMSNorm, else LayerNorm with biases; or the key of the eps of RMSNorm, which files with
    # LayerNorm do not have.
    rms_norm: bool | str = True
    gated_mlp: bool = True  # down(act(gate(x)) * up(x)), else down(act(up(x)))
    rotary: bool = True  # rotary positions; else learned ones, or ALiBi
    indexed: tuple[str, ...] = ()  # kinds in `layer_types` of layers with indexers (`IndexSpec`)
    # Its checkpoints may have this head that drafts; None: none, or kvik does not know it.
    predictor: PredictorSpec | None = None
    # Reads how it makes vectors or scores, from config.json, the width of hidden states and their
    # eps; None: other files may say it.
    pooled: Callable[[Fields, int, float], PoolingSpec] | None = None
    # Rows of the table of positions up to row `pad_token_id` are never read.
    skips_padding: bool = False
    tied: bool = False  # default of `tie_word_embeddings`
    # Reads the constant factors of the network; None: none.
    scales: Callable[[Fields], ModelScales] | None = None
    # Reads the number of KV heads; None: `num_key_value_heads`.
    kv_heads: Callable[[Fields], int] | None = None
    # Reads the variant of the network, in structure or storage; None: there is only one.
    wiring: Callable[[Fields], str] | None = None
    # Reads the inner size of the MLP; None: it is `intermediate_size`.
    inner: Callable[[Fields], int] | None = None
    head_dim: int | None = None  # default if config.json has none; None: hidden / heads
    eos_token_ids: tuple[int, ...] = ()  # default if config.json has none
    # Values of keys that files may leave out, as in transformers.
    defaults: Mapping[str, object] = field(default_factory=dict)
    # Usual name of a config.json key -> its name in this architecture.
    keys: Mapping[str, str] = field(default_factory=dict)
    # Older name of a config.json key -> its present name.
    older: Mapping[str, str] = field(default_factory=dict)
    # Keys with the only supported value; another value would change the arithmetic.
    fixed: Mapping[str, bool] = field(default_factory=dict)
    # `general.architecture` of its GGUF files; None: none exist, and the facts about such files are
    # not read.
    gguf: str | None = None
    gguf_experts: str = ""  # the same of its models with experts; "": no other
    # If several architectures share the name `gguf`: a metadata key and its least value in files of
    # this one, and a flag that decides where files lack the key; (): the architecture of files
    # without the others' keys.
    gguf_marker: tuple[str, int, str] | tuple[()] = ()
    # Names of tensors in GGUF -> in the checkpoint, if they differ from Llama's: names of a block's
    # layers, and full names for those in `gguf.names.OUTER`. A name that ends in `.weight`, `.bias`
    # or a dot denotes one tensor; with a dot, as `ssm_a.`, the tensor's name has no suffix.
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    # Files have the rows of q and k that form a rotated pair as neighbours.
    gguf_pairs: bool = False
    # Layers of a block, by their names in checkpoints, that files divide differently; {} is the
    # number of an expert.
    gguf_parts: Callable[[ModelFacts], Mapping[str, tuple[FilePart, ...]]] | None = None
    # Tensors of a block whose rows are in another order in files, with the row of the checkpoint at
    # each place.
    gguf_rows: Callable[[ModelFacts], Mapping[str, Sequence[int]]] | None = None
    # Tensors of a block that have other dimensions in files, with their sizes.
    gguf_shapes: Callable[[ModelFacts], Mapping[str, tuple[int, ...]]] | None = None
    # Files have these tensors multiplied: by constants of runs of rows, given as their number and
    # the factor; by the names of a block's tensors, and full names of others.
    gguf_factors: Callable[[ModelFacts], Mapping[str, Sequence[tuple[int, float]]]] | None = None
    # Files have separate keys for heads and positions of layers with a window.
    gguf_by_kind: bool = False
    # `tokenizer.ggml.model` of its tokenizers over characters: "llama", with scores, or another
    # one, with merges.
    gguf_characters: str = "llama"
    # Factor of `yarn_log_multiplier` in files relative to `mscale_all_dim`; 0: files do not have
    # that key.
    gguf_log_scale: float = 0.0
    # Layers of the first block -> keys of config.json that are true if a file has that layer.
    gguf_present: Mapping[str, str] = field(default_factory=dict)
    # Metadata keys that only llama.cpp needs.
    gguf_extra: Callable[[ModelFacts], Mapping[str, float | Sequence[int]]] | None = None
    # Metadata keys of files with a number for each block -> the block's tensor of one number that
    # checkpoints have in its place.
    gguf_numbers: Mapping[str, str] = field(default_factory=dict)
    gguf_scales: tuple[str, ...] = ()  # the keys of `gguf.facts.SCALES` that files have
    # Computes keys of config.json that files do not have.
    gguf_implied: Callable[[Fields], Mapping[str, object]] | None = None

    def network(self, spec: ModelFacts, builder: LayerBuilder) -> Network:
        """Return the network; of a checkpoint that also has encoders, the text model."""
        for scope in ENCODERS:
            builder.skip(scope, f"model.{scope}")
        builder.ignore("image_newline", "model.image_newline")
        return self.make(spec, builder.at("", TEXT_MODEL, ""))


# Scopes of encoders, and of what joins them to the text model.
ENCODERS = (
    *("vision_tower", "vision_model", "visual", "multi_modal_projector", "vision_embed_tokens"),
    *("audio_tower", "embed_vision", "embed_audio", "vision_embedder", "mm_projector", "connector"),
    *("vit_large_projector", "visual_tokenizer", "vte", "merger", "projector", "aligner"),
    *("image_tower", "video_tower", "vision_encoder", "vision_projection", "mlp1"),
    "vision_projector",
)


@dataclass(frozen=True, slots=True)
class Taps:
    """Keeps copies of the residual stream before some layers, which draft heads read."""

    layers: tuple[int, ...]  # in ascending order
    copy: Callable[[Tensor], Tensor]  # copies [tokens, hidden]
    kept: list[Tensor] = field(default_factory=list)  # the copies so far

    def see(self, layer: int, x: Tensor) -> None:
        """Take the residual stream x [tokens, hidden] before a layer."""
        if layer in self.layers:
            self.kept.append(self.copy(x))


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs of a forward pass in addition to token ids; passed explicitly, never global."""

    positions: Tensor  # [tokens] int64, position of each token in its sequence
    # Attention arrays of this step (`AttentionMetadata`), one per KV group.
    metadata: tuple[Any, ...]
    kv: tuple[Any, ...]  # the cache of each layer that attends (`LayerKV`), in order
    states: tuple[Any, ...] = ()  # those of each layer that keeps one (`LayerStates`), in order
    # [tokens, layers, width], what each layer reads of a token alone, or [tokens] int64, the ids;
    # the model makes them of its own inputs. None: layers read no such vectors.
    token_inputs: Tensor | None = None
    # Results of `once`, by what made them.
    made: dict[Callable[[Tensor], Tensor], Tensor] = field(default_factory=dict)
    taps: Taps | None = None  # what keeps the residual stream between layers; None: nothing does
    # What the last indexer chose (`AttentionBackend.choose`); empty: tokens read all keys.
    chosen: list[Any] = field(default_factory=list)

    def once(self, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `make(positions)`, computed for the first layer that asks and shared by all."""
        if make not in self.made:
            self.made[make] = make(self.positions)
        return self.made[make]


ALL = slice(None)  # layers


class Network(Protocol):
    """A model without state: it has only weights; the cache is part of the context.

    A forward is leave(blocks(enter(ids))), where the context of the blocks has the `token_inputs`.
    """

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual stream before the first layer, [tokens, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] fp32."""
        ...

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor | None:
        """ids [tokens], x [tokens, hidden] from `enter` -> `token_inputs` of the context; None:
        layers read no such vectors."""
        ...

    def blocks(self, x: Tensor, ctx: ForwardContext, span: slice = ALL) -> Tensor:
        """Run the layers in `span`: residual stream x [tokens, hidden] before -> after them."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """Residual stream x [tokens, hidden] after the last layer -> normalised, for `logits`."""
        ...


# Interfaces of the layers that a builder makes.


class LinearLayer(Protocol):
    def __call__(
        self, x: Tensor, ctx: ForwardContext | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [tokens, inputs], residual [tokens, outputs] -> [tokens, outputs]."""
        ...


FeedForward = LinearLayer  # x, residual [tokens, hidden] -> [tokens, hidden]
# x [tokens, inputs] -> [tokens, heads, head_dim or value_dim] of each projection
HeadsLayer: TypeAlias = "Callable[[Tensor, ForwardContext], list[Tensor]]"
# q [tokens, ...] -> the same, times a number per token
ScaledQueriesLayer: TypeAlias = "Callable[[Tensor, ForwardContext], Tensor]"
# x [tokens, channels] -> [tokens, channels]; reads and writes the states
StateLayer: TypeAlias = "Callable[[Tensor, ForwardContext], Tensor]"
# x [tokens, inputs], gates [tokens, numbers of a head * value_heads] -> [tokens, value_heads *
# value_dim]; reads and writes the states
RecurrentLayer: TypeAlias = "Callable[[Tensor, Tensor, ForwardContext], Tensor]"
# x, residual [tokens, hidden] -> residual + x times a constant
Sum: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
# x [tokens, dim], y [tokens, other] -> [tokens, dim + other]
Join: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
# x [tokens, dim], gate [tokens, dim or fewer, for equal parts of x] -> x times a function of gate
Gated: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
# x [tokens, parts, dim], y [tokens, dim] -> each part of x as large as y
Rescale: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
# x [tokens, inputs] -> [tokens, outputs] fp32
Mixture: TypeAlias = "Callable[[Tensor], Tensor]"
# x [tokens, dim] -> x times a number, or a number of each column
Scale: TypeAlias = "Callable[[Tensor], Tensor]"


class WeightedSums(Protocol):
    def __call__(self, x: Tensor, residual: Tensor | None, weights: Tensor | None = None) -> Tensor:
        """x [tokens, parts * dim], residual [tokens, sums * dim] or None, weights [tokens, sums *
        parts] fp32, or None for the constant ones -> residual + sums of the parts, [tokens, sums *
        dim]."""
        ...


class RoutedExperts(Protocol):
    def __call__(
        self,
        x: Tensor,
        ctx: ForwardContext | None = None,
        residual: Tensor | None = None,
        *,
        routed_by: Tensor | None = None,
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]. The router reads `routed_by`, of the
        shape of x; None: x."""
        ...


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual [tokens, dim] -> residual + norm(x)."""
        ...


class TokenTable(Protocol):
    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens] -> [tokens, hidden]."""
        ...


class PositionTable(TokenTable, Protocol):
    def add(self, ids: Tensor, x: Tensor) -> Tensor:
        """x [tokens, hidden] and the vectors of ids [tokens] -> their sum."""
        ...


class Rotations(Protocol):
    def at(self, positions: Tensor) -> Tensor:
        """positions [tokens] -> their rotations, [tokens, head_dim]."""
        ...


class AttentionLayer(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        ctx: ForwardContext,
        rotation: Tensor | None = None,
        indexed: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """q [tokens, heads, head_dim]; k [tokens, kv_heads, head_dim] and v [tokens, kv_heads,
        value_dim], or None with `kv_from` -> [tokens, heads * value_dim].

        Args:
            indexed: of the layer's indexer: queries [tokens, kv_heads * dim] and keys [tokens,
                dim].
        """
        ...


class LatentAttentionLayer(Protocol):
    def __call__(
        self,
        q: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        ctx: ForwardContext,
        rotation: Tensor | None,
        indexed: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """q [tokens, heads, nope], q_rope [tokens, heads, rope], latent [tokens, rank], k_rope
        [tokens, 1, rope], rotation [tokens, rope] or None -> [tokens, heads * value].

        Args:
            indexed: of the layer's indexer: queries [tokens, heads * dim], keys [tokens, dim] and
                weights [tokens, heads].
        """
        ...


class CompressedAttentionLayer(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        inputs: Tensor | None,
        indexed: tuple[Tensor, Tensor] | None,
        rotation: Tensor,
        ctx: ForwardContext,
    ) -> Tensor:
        """q [tokens, heads, head_dim], k [tokens, head_dim], rotation [tokens, rope] -> [tokens,
        groups * group_rank].

        Args:
            inputs: [tokens, channels], of which entries are made; None: there are none.
            indexed: of the layer's indexer: queries [tokens, heads * dim] and weights [tokens,
                heads].
        """
        ...


GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in the scope of a layer's experts."""

    router: str = "gate"  # of the matrix that computes the logits
    # gate_up, down: of an expert's matrices; {} is its number. Gate and up may be one.
    gate_up: tuple[str, ...] = ("experts.{}.gate_proj", "experts.{}.up_proj")
    down: str = "experts.{}.down_proj"
    gated: bool = True  # experts have a gate; else `gate_up` and `shared_gate_up` are up alone
    correction: str = "gate.e_score_correction_bias"  # of the router's correction
    correction_row: bool = False  # the correction has shape [1, experts]
    shared: str = "shared_experts"  # scope of the shared expert
    # shared_gate_up, shared_down: of its matrices; gate and up may be one.
    shared_gate_up: tuple[str, ...] = GATE_UP
    shared_down: str = "down_proj"
    shared_gate: str = "shared_expert_gate"  # of the matrix that computes its gate
    # Rows of gate and up are interleaved in one matrix, and float weights are transposed.
    mixed: bool = False
    scales: str = "scales"  # of the learned factors of weights (`Router.scaled`)
    table: str = "gate.tid2eid"  # of the experts of each token (`Router.by_token`)


EXPERT_NAMES = ExpertNames()


def gguf_experts(scope: str, names: ExpertNames = EXPERT_NAMES) -> dict[str, str]:
    """Return the rows of `Architecture.gguf_names` for experts in a scope, whose gate and up, if
    they have a gate, have two names."""
    at, parts = f"{scope}." if scope else "", ("gate", "up", "down")[0 if names.gated else 1 :]
    routed = zip(parts, (*names.gate_up, names.down), strict=True)
    shared = zip(parts, (*names.shared_gate_up, names.shared_down), strict=True)
    return {
        "ffn_gate_inp": f"{at}{names.router}",
        "ffn_gate_inp_shexp": f"{at}{names.shared_gate}",
        "exp_probs_b.bias": f"{at}{names.correction}",
        **{f"ffn_{part}_exps": f"{at}{name}" for part, name in routed},
        **{f"ffn_{part}_shexp": f"{at}{names.shared}.{name}" for part, name in shared},
    }


def gguf_shared_width(spec: ModelFacts) -> dict[str, float | Sequence[int]]:
    """Return `Architecture.gguf_extra` for a shared expert, whose width llama.cpp needs."""
    width = max((layer.experts.shared for layer in spec.layers if layer.experts), default=0)
    return {"expert_shared_feed_forward_length": width} if width else {}


MAX_BIAS = "attention.max_alibi_bias"  # in GGUF files, the largest exponent of slopes
SINKS = "sinks"  # usual name of the learned sinks in the scope of attention
POOL_BIAS = "indexer.index_kpool_compress_ape"  # of the gates of a pool
NO_TYPES = ("", 1)  # of `LayerBuilder.embedding`
NO_PARTS: Mapping[str, int] = MappingProxyType({})  # of `LayerBuilder.causal_conv`
# The activation with two learned numbers per layer, which apply above and below 0, and their names
# in the scope of an MLP.
XIELU = "xielu"
# Activations that clamp gate and up.
CLAMPED = frozenset({"clamped_swiglu", "limited_swiglu", "clipped_swiglu"})
RELU2 = "relu2"  # the square of ReLU; as a gate it is no part of a product
XIELU_NAMES = ("act_fn.alpha_p", "act_fn.alpha_n")


def usual_scope(name: str, *aliases: str) -> str:
    """Return the scope that a model has without a checkpoint: the last one, unless it is empty."""
    return aliases[-1] if aliases and aliases[-1] else name


# Declared layers, listed.


@dataclass(frozen=True, slots=True)
class DeclaredLinear:
    """Linear layers over the same inputs, by their names in checkpoints."""

    layer: int | None  # the block's number; None: it is in no block
    role: Role
    names: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]  # of each name
    bias: bool
    tied: bool = False  # its weight is the embedding's, and the names are not in the checkpoint
    by_head: bool = False  # rows are stored KV head by KV head: its queries, its key, its value
    # Number of equal parts of the heads, if rows are stored part by part: its queries, its values,
    # its keys; 0: they are not.
    shards: int = 0
    router: Router | None = None  # the router that chooses it, if it is an expert's
    mixed: bool = False  # rows of gate and up are interleaved, and floats are transposed
    clamped: bool = False  # of gate and up: their product is not linear in up
    transposed: bool = False  # the checkpoint stores [inputs, outputs]
    uses: int = 1  # how often a forward multiplies with it
    bare: bool = False  # its weight is a tensor of this name, without a suffix, and stays floats

    @property
    def adaptable(self) -> bool:
        """Whether adapters that requests choose may change its outputs (`nn.lora`)."""
        return self.role not in FIXED_FOR_REQUESTS and self.router is None

    @property
    def num_parameters(self) -> int:
        weights = 0 if self.tied else self.inputs * sum(self.outputs)
        return weights + self.bias * sum(self.outputs)


@dataclass(frozen=True, slots=True)
class DeclaredNorm:
    """A norm over `size` channels."""

    layer: int | None
    name: str
    size: int
    biased: bool  # it has a bias in addition to its gain
    # The role of the matrices that read its output, possibly times a gate, if nothing else reads
    # it; else "". Their inputs may be several normalised vectors.
    before: Role
    offset: float = 0.0  # added to the stored gain

    @property
    def num_parameters(self) -> int:
        return self.size * (2 if self.biased else 1)


@dataclass(frozen=True, slots=True)
class DeclaredTable:
    """A lookup table: of tokens or of positions."""

    role: Role
    name: str
    rows: int
    width: int
    tied: bool = False

    @property
    def num_parameters(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True, slots=True)
class DeclaredOther:
    """Parameters of a layer that are neither a matrix nor a norm: of a convolution, the correction
    of a router, the sinks of attention."""

    layer: int | None
    name: str
    num_parameters: int
    shape: tuple[int, ...] = ()  # in the checkpoint; (): one dimension
    logarithm: bool = False  # it is the logarithm of the heads' decay rates


@dataclass(slots=True)
class Declaration:
    """Everything that a model declares, in order."""

    linears: list[DeclaredLinear] = field(default_factory=list)
    norms: list[DeclaredNorm] = field(default_factory=list)
    tables: list[DeclaredTable] = field(default_factory=list)
    others: list[DeclaredOther] = field(default_factory=list)
    block: str = ""  # prefix of the names in a block; {} is its number
    skipped: list[str] = field(default_factory=list)  # prefixes of names that are not read

    @property
    def num_parameters(self) -> int:
        parts: Sequence[DeclaredLinear | DeclaredNorm | DeclaredTable | DeclaredOther]
        parts = (*self.linears, *self.norms, *self.tables, *self.others)
        return sum(part.num_parameters for part in parts)

    @property
    def embedding(self) -> DeclaredTable:
        """The table of tokens."""
        none = DeclaredTable("embedding", "", 0, 0)  # draft heads use their model's
        return next((table for table in self.tables if table.role == "embedding"), none)

    @property
    def head(self) -> DeclaredLinear:
        return next(linear for linear in self.linears if linear.role == "head")

    def of_block(self, layer: int) -> list[DeclaredLinear]:
        """Return the linear layers of a block."""
        return [linear for linear in self.linears if linear.layer == layer]

    def in_block(self, name: str) -> str:
        """Return the name of a block's layer or norm without the prefix of the block."""
        head, _, tail = self.block.partition("{}")
        return name.removeprefix(head).partition(tail)[2]


@dataclass(frozen=True, slots=True)
class ListedLayer:
    """Placeholder for a layer that is not built."""

    table: DeclaredTable | None = None

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        raise AssertionError("a layer that is only listed has no weights")

    add = at = __call__

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, hidden] of a table."""
        assert self.table is not None
        return self.table.rows, self.table.width


_LISTED = ListedLayer()


class LayerBuilder:
    """Declares layers within a scope of the checkpoint's names; `at` narrows the scope.

    This class only lists the declared layers; `nn.builder.Builder` builds them.
    """

    def __init__(self, declaration: Declaration) -> None:
        self._listed = declaration
        self._scope = ""
        self._layer: int | None = None

    def at(self, name: str | int, *aliases: str) -> LayerBuilder:
        inner = copy(self)
        inner._scope = self._name(usual_scope(str(name), *aliases))
        if isinstance(name, int):
            inner._layer = name
            self._listed.block = f"{self._scope}.{{}}."
        return inner

    def one_of(self, *names: str) -> str:
        return names[0]

    def skip(self, *scopes: str) -> None:
        self._listed.skipped += [f"{self._name(scope)}." for scope in scopes]

    def ignore(self, *names: str) -> None:
        self._listed.skipped += map(self._name, names)

    def linear(
        self,
        names: str | tuple[str, ...],
        inputs: int,
        outputs: int | tuple[int, ...],
        *,
        bias: bool,
        role: Role = "",
        transposed: bool = False,
        order: Sequence[int] = (),
        columns: Sequence[int] = (),
        parts: tuple[int, ...] = (),
        activation: Any = None,
    ) -> LinearLayer:
        names = (names,) if isinstance(names, str) else names
        outputs = (outputs,) if isinstance(outputs, int) else outputs
        full = tuple(map(self._name, names))
        linear = DeclaredLinear(
            self._layer, role, full, inputs, outputs, bias, transposed=transposed
        )
        self._listed.linears.append(linear)
        return _LISTED

    def heads(
        self,
        names: tuple[str, ...],
        inputs: int,
        heads: tuple[int, ...],
        head_dim: int,
        *,
        bias: bool,
        rope: RopeSpec | None = None,
        by_head: bool = False,
        shards: int = 0,
        gated: bool = False,
        full_rows: bool = False,
        value_dim: int | None = None,
        limit: float | None = None,
    ) -> HeadsLayer:
        widths = tuple(count * head_dim for count in heads)
        if value_dim is not None:
            widths = (*widths[:2], heads[2] * value_dim)
        if gated:
            widths = (2 * widths[0], *widths[1:])
        if len(names) == 1:
            widths = (sum(widths),)
        full = tuple(map(self._name, names))
        linear = DeclaredLinear(
            self._layer, "qkv", full, inputs, widths, bias, by_head=by_head, shards=shards
        )
        self._listed.linears.append(linear)
        return _LISTED

    def gated_mlp(
        self,
        hidden: int,
        inner: int,
        *,
        bias: bool,
        names: tuple[str, ...] = GATE_UP,
        down: str = "down_proj",
        activation: Any = "silu_and_mul",
        sparsity: float = 0.0,
        limit: float = 0.0,
    ) -> FeedForward:
        widths = (2 * inner // len(names),) * len(names)
        clamped = limit > 0 or activation in CLAMPED
        self._gate_up(names, hidden, widths, bias, "gate_up", clamped)
        return self.linear(down, inner, hidden, bias=bias, role="down")

    def _gate_up(
        self,
        names: tuple[str, ...],
        hidden: int,
        widths: tuple[int, ...],
        bias: bool,
        role: Role,
        clamped: bool,
    ) -> None:
        full = tuple(map(self._name, names))
        linear = DeclaredLinear(self._layer, role, full, hidden, widths, bias, clamped=clamped)
        self._listed.linears.append(linear)

    def mlp(
        self,
        up: str,
        down: str,
        hidden: int,
        inner: int,
        *,
        bias: bool,
        transposed: bool = False,
        activation: str = "gelu_new",
    ) -> FeedForward:
        self.linear(up, hidden, inner, bias=bias, role="up", transposed=transposed)
        for name in XIELU_NAMES if activation == XIELU else ():
            self._other(name, 1)
        return self.linear(down, inner, hidden, bias=bias, role="down", transposed=transposed)

    def experts(
        self,
        hidden: int,
        spec: ExpertsSpec,
        names: ExpertNames = EXPERT_NAMES,
        *,
        bias: bool = False,
        activation: Any = "silu_and_mul",
        shared_activation: Any = None,
        vocab: int = 0,
    ) -> RoutedExperts:
        router, inner = spec.router, spec.inner
        self.linear(names.router, hidden, router.experts, bias=bias, role="router")
        if router.corrected:
            self._other(names.correction, router.experts)
        if router.scaled:
            self._other(names.scales, router.experts)
        if router.by_token:
            self._other(names.table, vocab * router.active, (vocab, router.active))
        up: Role = "expert_gate_up" if names.gated else "expert_up"
        clamped = activation in CLAMPED
        copies, parts = 2 if names.gated else 1, len(names.gate_up)
        widths = (copies * inner // parts,) * parts
        kinds: tuple[tuple[Role, tuple[str, ...], int, tuple[int, ...]], ...] = (
            (up, tuple(map(self._name, names.gate_up)), hidden, widths),
            ("expert_down", (self._name(names.down),), inner, (hidden,)),
        )
        for expert in range(router.experts):
            for role, of_expert, inputs, outputs in kinds:
                full = tuple([name.format(expert) for name in of_expert])
                linear = DeclaredLinear(
                    self._layer,
                    role,
                    full,
                    inputs,
                    outputs,
                    bias,
                    router=router,
                    mixed=names.mixed,
                    clamped=clamped,
                )
                self._listed.linears.append(linear)
        if spec.gated:
            self.linear(names.shared_gate, hidden, 1, bias=False, role="shared_gate")
        if spec.shared:
            shared = self.at(names.shared)
            up = "shared_gate_up" if names.gated else "shared_up"
            parts = len(names.shared_gate_up)
            widths = (copies * spec.shared // parts,) * parts
            cut = spec.shared_limit > 0 or (shared_activation or activation) in CLAMPED
            shared._gate_up(names.shared_gate_up, hidden, widths, bias, up, cut)
            shared.linear(names.shared_down, spec.shared, hidden, bias=bias, role="shared_down")
        return _LISTED

    def embedding(
        self,
        name: str,
        rows: int,
        hidden: int,
        *,
        skipped: int = 0,
        types: tuple[str, int] = NO_TYPES,
    ) -> PositionTable:
        table = DeclaredTable("positions", self._name(name), skipped + rows, hidden)
        self._listed.tables.append(table)
        kinds, count = types
        if kinds:
            self._other(f"{kinds}.weight", count * hidden, (count, hidden))
        return _LISTED

    def token_embedding(
        self,
        name: str,
        vocab: int,
        hidden: int,
        *,
        tied: bool,
        bias: bool = False,
        scale: float = 1.0,
    ) -> TokenTable:
        table = DeclaredTable("embedding", self._name(name), vocab, hidden, tied)
        self._listed.tables.append(table)
        return ListedLayer(table)

    def token_inputs(
        self, name: str, vocab: int, width: int, *, scale: float, rows: int | None = None
    ) -> TokenTable:
        table = DeclaredTable("token_inputs", self._name(name), rows or vocab, width)
        self._listed.tables.append(table)
        return _LISTED

    def lm_head(
        self, name: str, embedding: Any, *, bias: bool = False, softcap: float | None = None
    ) -> LinearLayer:
        table = embedding.table
        assert table is not None
        head = DeclaredLinear(
            None, "head", (self._name(name),), table.width, (table.rows,), bias, table.tied
        )
        self._listed.linears.append(head)
        return _LISTED

    def rms_norm(
        self,
        name: str,
        dim: int,
        eps: float,
        *,
        before: Role = "",
        offset: float = 0.0,
        scale: float = 1.0,
        rope: RopeSpec | None = None,
        heads: int = 1,
        groups: int = 1,
        tensor: str = "weight",
    ) -> Norm:
        norm = DeclaredNorm(self._layer, self._name(name), dim, False, before, offset)
        self._listed.norms.append(norm)
        return _LISTED

    def plain_norm(self, dim: int, eps: float, *, centred: bool = False) -> Norm:
        return _LISTED

    def layer_norm(
        self,
        name: str,
        dim: int,
        eps: float,
        *,
        before: Role = "",
        bias: bool = True,
        offset: float = 0.0,
        scale: float = 1.0,
        rope: RopeSpec | None = None,
        order: Sequence[int] = (),
    ) -> Norm:
        norm = DeclaredNorm(self._layer, self._name(name), dim, bias, before, offset)
        self._listed.norms.append(norm)
        return _LISTED

    def head_norms(
        self, name: str, heads: int, dim: int, eps: float, *, rope: RopeSpec | None = None
    ) -> Norm:
        stored_heads = range(heads) if "{}" in name else range(1)
        for head in stored_heads:
            full = self._name(name.format(head))
            size = heads * dim // len(stored_heads)
            self._listed.norms.append(DeclaredNorm(self._layer, full, size, False, ""))
        return _LISTED

    def query_scale(self, spec: QueryScale) -> ScaledQueriesLayer:
        return _LISTED

    def rope(self, spec: RopeSpec, head_dim: int) -> Rotations:
        return _LISTED

    def attention(
        self,
        layer: int,
        facts: LayerSpec,
        head_dim: int,
        scale: float | None = None,
        norms: tuple[Any, Any] | None = None,
        softcap: float | None = None,
        sinks: int = 0,
        sink_name: str = SINKS,
    ) -> AttentionLayer:
        if sinks:
            self._other(sink_name, sinks)
        return _LISTED

    def latent_attention(
        self,
        names: tuple[str, ...],
        layer: int,
        heads: int,
        latent: LatentSpec,
        scale: float,
        index: IndexSpec | None,
        sink_name: str,
    ) -> LatentAttentionLayer:
        if sink_name:
            self._other(sink_name, heads)
        if index is not None and index.pool and not index.shared:
            self._other(POOL_BIAS, index.pool * index.dim)
        if len(names) == 1:
            outputs = heads * (latent.nope + latent.value)
            self.linear(names, latent.rank, outputs, bias=False, role="kv_up")
        else:
            keys, values = names
            self.linear(keys, latent.nope, heads * latent.rank, bias=False, role="kv_up")
            self.linear(values, latent.rank, heads * latent.value, bias=False, role="kv_up")
        return _LISTED

    def compressed_attention(
        self,
        layers: Sequence[int],
        heads: int,
        head_dim: int,
        spec: CompressedSpec,
        window: int,
        rope: RopeSpec,
        biases: Sequence[str],
        norms: Sequence[Any],
        down: str,
        sink_name: str,
    ) -> CompressedAttentionLayer:
        self._other(sink_name, heads)
        for name, width in zip(biases, spec.dims(head_dim), strict=True):
            shape = spec.every, (1 + spec.overlap) * width
            self._other(name, prod(shape), shape)
        inputs, outputs = heads * head_dim // spec.groups, spec.groups * spec.group_rank
        self.linear(down, inputs, outputs, bias=False, role="o_down")
        return _LISTED

    def scaled_sum(self, factor: float) -> Sum:
        return _LISTED

    def joined(self) -> Join:
        return _LISTED

    def scaled_columns(self, factors: Sequence[tuple[int, float]]) -> Scale:
        return _LISTED

    def learned_scale(self, name: str, size: int = 1) -> Scale:
        self._other(name, size)
        return _LISTED

    def rescaled(self, least_square: float) -> Rescale:
        return _LISTED

    def mixtures(
        self,
        router: str,
        inputs: int,
        streams: int,
        coefficients: Mapping[str, tuple[int, float]],
    ) -> tuple[Mixture, ...]:
        name, uses = self._name(router), len(coefficients)
        self._listed.linears.append(
            DeclaredLinear(
                self._layer, "mixture", (name,), inputs, (streams,), bias=False, uses=uses
            )
        )
        for name, (outputs, _) in coefficients.items():
            self.linear(name, streams, outputs, bias=False, role="mixture")
        return (_LISTED,) * len(coefficients)

    def weighted_sums(self, parts: int, weights: Sequence[float] = ()) -> WeightedSums:
        return _LISTED

    def stream_weights(
        self,
        names: tuple[str, str, str],
        width: int,
        runs: Sequence[tuple[int, float, float]],
        eps: float,
        streams: int = 0,
        rounds: int = 0,
    ) -> Mixture:
        matrix, biases, gains = names
        count = sum(count for count, _, _ in runs)
        self.bare_linear(matrix, width, count)
        self._other(biases, count)
        self._other(gains, len(runs))
        return _LISTED

    def bare_linear(self, name: str, inputs: int, outputs: int) -> Callable[[Tensor], Tensor]:
        sizes = inputs, (outputs,)
        linear = DeclaredLinear(
            self._layer, "mixture", (self._name(name),), *sizes, bias=False, bare=True
        )
        self._listed.linears.append(linear)
        return _LISTED

    def gated(self, by: str = "none") -> Gated:
        return _LISTED

    def causal_conv(
        self,
        name: str,
        layer: int,
        spec: StateSpec,
        *,
        silu: bool = False,
        parts: Mapping[str, int] = NO_PARTS,
    ) -> StateLayer:
        for part, channels in (parts or {name: spec.channels}).items():
            self._other(f"{part}.weight", channels * spec.width, (channels, 1, spec.width))
        if spec.bias:
            self._other(f"{name}.bias", spec.channels)
        return _LISTED

    def recurrence(
        self,
        decay: str,
        bias: str,
        layer: int,
        spec: StateSpec,
        *,
        skip: str = "",
        beta_scale: float = 1.0,
        decay_shape: tuple[int, ...] = (),
    ) -> RecurrentLayer:
        each = (spec.values, spec.key_dim) if spec.by_channel else decay_shape
        size = prod(each) if spec.by_channel else spec.value_heads
        self._other(decay, size, each, logarithm=True)
        self._other(bias, spec.value_heads * spec.decays)
        if skip:
            self._other(skip, spec.values if spec.by_channel else spec.value_heads)
        return _LISTED

    def _other(
        self, name: str, size: int, shape: tuple[int, ...] = (), *, logarithm: bool = False
    ) -> None:
        other = DeclaredOther(self._layer, self._name(name), size, shape, logarithm)
        self._listed.others.append(other)

    def _name(self, name: str) -> str:
        return whole_name(self._scope, name)


def whole_name(scope: str, name: str) -> str:
    """Return the whole name of a layer or tensor in a scope; "": none."""
    return ".".join(filter(None, (scope, name)))


def describe(make: Callable[[ModelFacts, LayerBuilder], Network], spec: ModelFacts) -> Declaration:
    """Return what a network's constructor declares, and the layers over pooled vectors."""
    declaration = Declaration()
    make(spec, LayerBuilder(declaration))
    for layer in spec.pooling.layers if spec.pooling else ():
        for name, shape in layer.tensors.items():
            declaration.others.append(DeclaredOther(None, name, prod(shape), shape))
    return declaration
