"""Facts of an architecture beyond the sizes in config.json: how to read its files and what its
constructor builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvik.spec.declare import EXPERT_NAMES, ExpertNames, LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerRule, PredictorSpec, rotary_layers
from kvik.spec.network import Network
from kvik.spec.stored_weights import TEXT_MODEL

if TYPE_CHECKING:
    from kvik.spec.experts import ExpertsRule
    from kvik.spec.model import ModelFacts, ModelScales
    from kvik.spec.pooling import PoolingSpec

MAX_BIAS = "attention.max_alibi_bias"  # in GGUF files, the largest exponent of slopes


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

    def classifier(self, pooled: Callable[[Fields, int, float], PoolingSpec]) -> Architecture:
        """Return the same network as a classifier, which has no LM head.

        Args:
            pooled: reads the layers over hidden states that take its place.
        """

        def make(spec: ModelFacts, builder: LayerBuilder) -> Network:
            return self.make(replace(spec, tie_word_embeddings=True), builder)

        stem = self.name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        return replace(
            self,
            name=f"{stem}ForSequenceClassification",
            models=f"{self.models}, as a classifier",
            make=make,
            pooled=pooled,
            head_bias=False,
            predictor=None,
            gguf=None,
            gguf_experts="",
        )

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
