"""Model facts, read from a Hugging Face config.json with the json module alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvik.errors import ModelError, shown
from kvik.spec.architectures import ARCHITECTURES, Architecture, WindowRule
from kvik.spec.engine_folder import Built, read_built
from kvik.spec.fields import Fields, read_json
from kvik.spec.kv import KVCacheSpec, KVKind
from kvik.spec.rope import MAX_POSITIONS, RopeSpec, read_rope
from kvik.spec.stored_weights import (
    StoredQuantization,
    StoredScheme,
    read_stored_quantization,
    stored_alike,
)

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
SHORT_DTYPES: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

# Sizes above these are mistakes or attacks, not models.
MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """How many parameters each part holds; `attention`, `mlp` and `norms` are of one layer."""

    embedding: int  # of tokens and, if learned, positions
    attention: int
    mlp: int
    norms: int
    num_layers: int
    final_norm: int
    lm_head: int  # 0 when tied to the embedding

    @property
    def layer(self) -> int:
        return self.attention + self.mlp + self.norms

    @property
    def total(self) -> int:
        return self.embedding + self.num_layers * self.layer + self.final_norm + self.lm_head


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """Equal linear layers of a model, each over `inputs` with `outputs`.

    Attributes:
        count: how many.
        head: the layer makes the logits; it may share its weights with the embedding, which counts
            as one too.
        stored: how the checkpoint stores the layers that it is made of; None: as floats.
    """

    count: int
    inputs: int
    outputs: int
    head: bool = False
    stored: tuple[StoredScheme | None, ...] = (None,)

    @property
    def stored_bytes(self) -> int:
        """Of one layer in the checkpoint, if it is stored quantised and has to be read as a whole:
        at most, without scales."""
        whole = (part.bits for part in self.stored if part and not part.in_runs)
        bits = max(whole, default=0)
        return self.inputs * self.outputs * bits // 8


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the engine needs to know of a model before it loads a byte of its weights."""

    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str  # "silu", "gelu_new", ...
    rope: RopeSpec | None  # None: learned positions (GPT-2)
    windows: tuple[int | None, ...]  # sliding window of each layer; None: full attention
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint: "bfloat16", "float16", "float32"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: StoredQuantization | None = None  # of the checkpoint; None: plain floats
    rms_norm: bool = True  # else LayerNorm, which has biases too
    gated_mlp: bool = True  # three matrices, else two
    built: Built | None = None  # of an engine folder; None: its weights are still to be made ready

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelSpec:
        """The facts in a parsed config.json, with the defaults transformers gives absent keys.

        Raises:
            ModelError: an unknown architecture, or a field that cannot be; the message names it.
        """
        fields = Fields(config)
        name = _architecture(fields)
        known = ARCHITECTURES[name]
        key = {k: known.keys.get(k, k) for k in _RENAMED}
        hidden = fields.integer(key["hidden_size"], 1, MAX_WIDTH)
        layers = fields.integer(key["num_hidden_layers"], 1, MAX_LAYERS)
        heads = fields.integer(key["num_attention_heads"], 1, MAX_HEADS)
        positions = fields.integer(key["max_position_embeddings"], 1, MAX_POSITIONS)
        vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
        inner = None if known.gated_mlp else 4 * hidden
        for fixed, value in known.fixed.items():
            if fields.boolean(fixed, value) is not value:
                raise fields.error(fixed, f"must be {str(value).lower()}")
        bos = fields.token_ids("bos_token_id", vocab)
        eos = fields.token_ids("eos_token_id", vocab)
        if "eos_token_id" not in config:
            eos = tuple(token for token in known.eos_token_ids if token < vocab)
        return cls(
            architecture=name,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=fields.integer(key["intermediate_size"], 1, MAX_WIDTH, inner),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_kv_heads(fields, heads, known),
            head_dim=_head_dim(fields, hidden, heads, known, key["num_attention_heads"]),
            max_position_embeddings=positions,
            norm_eps=fields.number(key["rms_norm_eps"], 0.0, 1.0, 1e-6 if known.rms_norm else 1e-5),
            activation=fields.choice(key["hidden_act"], known.activations, known.activations[0]),
            rope=read_rope(fields, positions) if known.rotary else None,
            windows=_windows(fields, layers, known.window),
            qkv_bias=_bias(fields, known.qkv_bias),
            o_bias=_bias(fields, known.o_bias),
            mlp_bias=_bias(fields, known.mlp_bias),
            qk_norm=known.qk_norm,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", known.tied),
            dtype=fields.choice(
                "dtype" if "dtype" in fields else "torch_dtype", tuple(DTYPE_BYTES), "float32"
            ),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=eos,
            quantization=read_stored_quantization(fields, known.matrices.linear(layers)),
            rms_norm=known.rms_norm,
            gated_mlp=known.gated_mlp,
        )

    @property
    def max_context(self) -> int:
        """Tokens the model can attend over once its positions are stretched.

        "linear", "dynamic" and "yarn" files often keep `max_position_embeddings` at the length
        before stretching; the other kinds write the final length.
        """
        if self.rope is None or self.rope.kind not in ("linear", "dynamic", "yarn"):
            return self.max_position_embeddings
        stretched = int(self.rope.original_max_position * self.rope.factor)
        return max(self.max_position_embeddings, stretched)

    @property
    def parameters(self) -> ParameterCounts:
        """Exact counts, part by part."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = hidden * (queries + 2 * keys) + queries * hidden
        attention += (queries + 2 * keys) * self.qkv_bias + hidden * self.o_bias
        attention += 2 * self.head_dim * self.qk_norm
        ups = 2 if self.gated_mlp else 1
        mlp = (ups + 1) * hidden * inner + (ups * inner + hidden) * self.mlp_bias
        norm = hidden if self.rms_norm else 2 * hidden
        positions = 0 if self.rope else self.max_position_embeddings
        return ParameterCounts(
            embedding=(self.vocab_size + positions) * hidden,
            attention=attention,
            mlp=mlp,
            norms=2 * norm,
            num_layers=self.num_layers,
            final_norm=norm,
            lm_head=0 if self.tie_word_embeddings else self.vocab_size * hidden,
        )

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights held in a dtype ("float32", "bfloat16" or "float16")."""
        return self.parameters.total * DTYPE_BYTES[dtype]

    def linear_layers(self) -> tuple[LinearLayers, ...]:
        """All matrices that activations are multiplied with. Those of Q, K and V that are stored
        alike are one, and gate and up always are. An embedding that is stored quantised and is not
        the head comes first."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        names = ARCHITECTURES[self.architecture].matrices
        sizes = (
            (names.o, queries, hidden),
            (names.up, hidden, (2 if self.gated_mlp else 1) * inner),
            (names.down, inner, hidden),
        )
        found: list[LinearLayers] = []
        embedding, head = self._stored_ends()
        if embedding is not None and not self.tie_word_embeddings:
            found.append(LinearLayers(1, hidden, self.vocab_size, True, (embedding,)))
        widths = (queries, keys, keys) if len(names.qkv) == 3 else (queries + 2 * keys,)
        for stored, count in Counter(self._stored(names.qkv)).items():
            first = 0
            for size in stored_alike(stored):
                last = first + size
                outputs = sum(widths[first:last])
                found.append(LinearLayers(count, hidden, outputs, stored=stored[first:last]))
                first = last
        found += [
            LinearLayers(count, inputs, outputs, stored=stored)
            for layers, inputs, outputs in sizes
            for stored, count in Counter(self._stored(layers)).items()
        ]
        return (*found, LinearLayers(1, hidden, self.vocab_size, head=True, stored=(head,)))

    def _stored(self, names: Sequence[str]) -> Iterator[tuple[StoredScheme | None, ...]]:
        """How the checkpoint stores the named layers, block by block."""
        for block in range(self.num_layers):
            if self.quantization is None:
                yield (None,) * len(names)
            else:
                yield tuple(self.quantization.scheme(name.format(block)) for name in names)

    def _stored_ends(self) -> tuple[StoredScheme | None, StoredScheme | None]:
        """How the checkpoint stores the embedding and the head, which may be the same."""
        if self.quantization is None:
            return None, None
        names = ARCHITECTURES[self.architecture].matrices
        embedding = self.quantization.embedding_scheme(names.embedding)
        if self.tie_word_embeddings:
            return embedding, embedding
        return embedding, self.quantization.scheme(names.head)

    def kv_specs(self, dtype_bytes: int) -> list[KVCacheSpec]:
        """What each layer stores per token, at `dtype_bytes` for each number."""
        size = 2 * self.num_kv_heads * self.head_dim * dtype_bytes
        return [
            KVCacheSpec(
                kind=KVKind.FULL if window is None else KVKind.SLIDING_WINDOW,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                bytes_per_token=size,
                window=window,
            )
            for window in self.windows
        ]

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes one token adds to the cache, all layers together."""
        return sum(spec.bytes_per_token for spec in self.kv_specs(dtype_bytes))


def read_model_spec(folder: str | Path) -> ModelSpec:
    """Facts of the model in a folder: config.json, and generation_config.json for its EOS ids.

    Raises:
        ModelError: no such folder, or files that cannot be used.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError("model", f"must be a folder with a config.json, not {str(folder)!r}")
    spec = ModelSpec.from_config(read_json(folder / "config.json"))
    if (folder / "generation_config.json").exists():
        name = "generation_config.json"
        eos = Fields(read_json(folder / name), name).token_ids("eos_token_id", spec.vocab_size)
        if eos:
            spec = replace(spec, eos_token_ids=eos)
    return replace(spec, built=read_built(folder))


_RENAMED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "rms_norm_eps",
)


def _architecture(fields: Fields) -> str:
    names = fields.strings("architectures")
    for name in names:
        if name in ARCHITECTURES:
            return name
    if not names:
        family = fields.raw("model_type")
        for name, known in ARCHITECTURES.items():
            if known.model_type == family:
                return name
    found = shown(names[0]) if names else "nothing"
    raise fields.error("architectures", f"must name one of {', '.join(ARCHITECTURES)}, not {found}")


def _head_dim(fields: Fields, hidden: int, heads: int, known: Architecture, heads_key: str) -> int:
    if known.rotary and ("head_dim" in fields or known.head_dim is not None):
        size = fields.integer("head_dim", 1, MAX_WIDTH, known.head_dim)
    elif hidden % heads:
        raise fields.error(heads_key, f"must divide the hidden size {hidden}, not {heads}")
    else:
        size = hidden // heads
    if known.rotary and size % 2:
        raise fields.error("head_dim", f"must be even for rotary positions, not {size}")
    return size


def _kv_heads(fields: Fields, heads: int, known: Architecture) -> int:
    if not known.rotary:  # GPT-2 has one K and V for each head
        return heads
    kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, heads)
    if heads % kv_heads:
        raise fields.error(
            "num_key_value_heads", f"must divide num_attention_heads ({heads}), not {kv_heads}"
        )
    return kv_heads


def _bias(fields: Fields, rule: bool | str) -> bool:
    return fields.boolean(rule, False) if isinstance(rule, str) else rule


def _windows(fields: Fields, layers: int, rule: WindowRule) -> tuple[int | None, ...]:
    """The sliding window of each layer, as transformers reads the file."""
    default = 4096  # of transformers, when the key is left out; null means no window
    if rule is WindowRule.NEVER:
        return (None,) * layers
    window = None
    if not fields.is_null("sliding_window"):
        window = fields.integer("sliding_window", 1, MAX_POSITIONS, default)
    if rule is WindowRule.ALL:
        return (window,) * layers
    if not fields.boolean("use_sliding_window", False):
        window = None
    if "layer_types" not in fields:
        first = fields.integer("max_window_layers", 0, MAX_POSITIONS, 28)
        return tuple(window if layer >= first else None for layer in range(layers))
    types = fields.strings("layer_types")
    if len(types) != layers:
        raise fields.error("layer_types", f"must have {layers} entries, not {len(types)}")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error(
                "layer_types", f"must hold full_attention or sliding_attention, not {shown(kind)}"
            )
    if window is None and "sliding_attention" in types:
        raise fields.error("layer_types", "has sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
