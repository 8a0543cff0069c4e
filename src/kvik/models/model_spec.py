"""The facts of a model, read from a Hugging Face config.json with the json module alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from kvik.errors import ModelError, shown
from kvik.files import ADAPTER_FILES, is_named, regular
from kvik.models.registry import ARCHITECTURES, TEXT_DEFAULTS, WITH_ENCODERS
from kvik.options import did_you_mean
from kvik.spec.architecture import Architecture
from kvik.spec.declare import describe
from kvik.spec.declared import SMALL, UNQUANTISED, Declaration, DeclaredLinear
from kvik.spec.engine_folder import read_built
from kvik.spec.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    float_dtype,
    read_json,
    tensor_names,
)
from kvik.spec.layers import BLOCK_KINDS, check_layer_types, refuse_sparse
from kvik.spec.model import DTYPE_BYTES, LinearLayers, ModelFacts, ModelScales
from kvik.spec.pooling import JUDGE, MODULES, TOKENIZER, read_judge, read_modules, with_sentences
from kvik.spec.rope import MAX_POSITIONS
from kvik.spec.stored_weights import (
    KEY,
    StoredScheme,
    read_stored_quantization,
    stored_alike,
    with_layers_in_floats,
)
from kvik.spec.weights import matrix_kind


@dataclass(frozen=True)  # without slots, which would exclude cached properties
class ModelSpec(ModelFacts):
    """Everything the engine needs to know about a model before it loads weights."""

    @classmethod
    def from_config(cls, config: Mapping[str, object], where: str = "config.json") -> ModelSpec:
        """Return the facts in a parsed config.json, with transformers' defaults for absent keys.

        Args:
            where: its name in errors.

        Raises:
            ModelError: the architecture is unknown, or a field is invalid; the message names it.
        """
        name = architecture_of(Fields(config, where))
        arch = ARCHITECTURES[name]
        defaults, with_encoders = arch.defaults, config.get(TEXT) is not None
        if with_encoders:
            defaults = {**TEXT_DEFAULTS.get(name, {}), **defaults}
            config, where = text_config(config), f"{where} {TEXT}"
        named = {new: config[old] for old, new in arch.older.items() if config.get(old) is not None}
        fields = Fields({**defaults, **config, **named}, where)
        key = {k: arch.keys.get(k, k) for k in _RENAMED}
        hidden = fields.integer(key["hidden_size"], 1, MAX_WIDTH)
        blocks = len(fields.strings(BLOCK_KINDS))  # transformers saves no number with it
        layers = fields.integer(key["num_hidden_layers"], 1, MAX_LAYERS, blocks or None)
        heads = fields.integer(key["num_attention_heads"], 1, MAX_HEADS)
        positions = fields.integer(key["max_position_embeddings"], 1, MAX_POSITIONS)
        skipped = (
            fields.integer("pad_token_id", 0, positions - 2, 1) + 1 if arch.skips_padding else 0
        )
        positions -= skipped
        vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
        inner = None if arch.gated_mlp else 4 * hidden
        for fixed, value in arch.fixed.items():
            if fields.boolean(fixed, value) is not value:
                raise fields.error(fixed, f"must be {str(value).lower()}")
        bos = fields.token_ids("bos_token_id", vocab)
        eos = fields.token_ids("eos_token_id", vocab)
        if "eos_token_id" not in config:
            eos = tuple(token for token in arch.eos_token_ids if token < vocab)
        refuse_sparse(fields, arch.indexed)
        rules = arch.layers(fields, layers, positions)
        check_layer_types(fields, rules)
        if arch.experts is not None:
            pairs = zip(rules, arch.experts(fields, layers), strict=True)
            rules = tuple(replace(layer, experts=experts) for layer, experts in pairs)
        latent = next((layer.latent for layer in rules if layer.latent), None)
        eps_key = key["rms_norm_eps"]
        if isinstance(arch.rms_norm, bool):
            rms_norm = arch.rms_norm
        elif rms_norm := arch.rms_norm in fields:
            eps_key = arch.rms_norm
        eps = fields.number(eps_key, 0.0, 1.0, 1e-6 if rms_norm else 1e-5)
        spec = cls(
            architecture=name,
            with_encoders=with_encoders,
            vocab_size=vocab,
            hidden_size=hidden,
            embedding_size=fields.integer(arch.keys[EMBEDDING_SIZE], 1, MAX_WIDTH, hidden)
            if EMBEDDING_SIZE in arch.keys
            else hidden,
            intermediate_size=(
                fields.integer(key["intermediate_size"], 1, MAX_WIDTH, inner)
                if arch.inner is None
                else arch.inner(fields)
            ),
            layers=rules,
            num_heads=max(layer.heads or heads for layer in rules),
            num_kv_heads=1 if latent else _kv_heads(fields, heads, arch),
            head_dim=(
                latent.width
                if latent
                else _head_dim(fields, hidden, heads, arch, key["num_attention_heads"])
            ),
            max_position_embeddings=positions,
            norm_eps=eps,
            activation=fields.choice(key["hidden_act"], arch.activations, arch.activations[0]),
            qkv_bias=_flag(fields, arch.qkv_bias),
            o_bias=_flag(fields, arch.o_bias),
            mlp_bias=_flag(fields, arch.mlp_bias),
            head_bias=_flag(fields, arch.head_bias),
            qk_norm=_flag(fields, arch.qk_norm),
            tie_word_embeddings=fields.boolean(TIED, arch.tied),
            dtype=dtype_of(fields),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=eos,
            rms_norm=rms_norm,
            gated_mlp=arch.gated_mlp,
            scales=ModelScales() if arch.scales is None else arch.scales(fields),
            wiring="" if arch.wiring is None else arch.wiring(fields),
            skipped_positions=skipped,
            token_types=fields.integer("type_vocab_size", int(not arch.rotary), MAX_TYPES, 1),
            pooling=None if arch.pooled is None else arch.pooled(fields, hidden, eps),
        )
        for rope, width in spec.rotations:
            rope.check(fields, width)
        names = (name for linear in spec.declaration.linears for name in linear.names)
        stored = read_stored_quantization(fields, names)
        return spec if stored is None else replace(spec, quantization=stored)

    @property
    def family(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @cached_property
    def declaration(self) -> Declaration:
        """The layers that the network declares."""
        return describe(self.family.network, self)

    @cached_property
    def in_floats(self) -> ModelSpec:
        """The same model, if the checkpoint stored its weights as floats."""
        if self.quantization is None:
            return self
        spec = replace(self, quantization=None)
        vars(spec)["declaration"] = self.declaration  # equal, and slow to list
        return spec

    @cached_property
    def num_parameters(self) -> int:
        if self.fallback is not None:
            return self.fallback.parameters
        return self.declaration.num_parameters

    @cached_property
    def table_numbers(self) -> int:
        """Numbers in lookup tables that are no matrices: every process has them whole."""
        tables = self.declaration.tables
        return sum(t.num_parameters for t in tables if not t.tied and t.role != "token_inputs")

    @cached_property
    def small_numbers(self) -> int:
        """Numbers in matrices that are too small to be divided."""
        return sum(m.num_parameters for m in self.declaration.linears if m.role in SMALL)

    def weight_bytes(self, dtype: str, quantization: str, kernels: str = "torch") -> int:
        """Return the bytes of all weights in memory: linear layers in their kinds, the rest in
        `dtype`.

        Args:
            kernels: see `WeightKind.weight_bytes`.
        """
        item = DTYPE_BYTES[dtype]
        total = self.num_parameters * item
        for like in self.linear_layers:
            kind = matrix_kind(quantization, like.inputs, like.stored, head=like.head)
            if kind is not None:
                saved = like.inputs * like.outputs * item
                saved -= kind.weight_bytes(like.inputs, like.outputs, kernels)
                total -= like.count * saved
        return total

    @cached_property
    def transposed_numbers(self) -> int:
        """The most numbers of a matrix that the checkpoint stores as floats [inputs, outputs]."""
        if self.fallback is not None:
            return 0
        stored = self.quantization
        return max(
            (
                linear.inputs * outputs
                for linear in self.declaration.linears
                if linear.transposed or linear.mixed
                for name, outputs in zip(linear.names, linear.outputs, strict=True)
                if stored is None or stored.scheme(name) is None
            ),
            default=0,
        )

    @cached_property
    def linear_layers(self) -> tuple[LinearLayers, ...]:
        """All matrices that activations are multiplied with.

        Q, K and V count as one matrix as far as they are stored alike, gate and up always. An
        embedding that is stored quantised and not tied to the head is included.
        """
        if self.fallback is not None:
            return ()  # transformers computes them
        declaration, stored_as = self.declaration, self.quantization
        counts: Counter[LinearLayers] = Counter()
        embedding = declaration.embedding
        scheme = None if stored_as is None else stored_as.embedding_scheme(embedding.name)
        if scheme is not None and not embedding.tied:
            counts[LinearLayers(1, embedding.width, embedding.rows, True, (scheme,))] += 1
        for table in declaration.tables:
            if table.role == "token_inputs":
                scheme_of = None if stored_as is None else stored_as.embedding_scheme(table.name)
                counts[LinearLayers(1, table.width, table.rows, True, (scheme_of,))] += 1
        for linear in declaration.linears:
            if linear.role in UNQUANTISED:
                continue
            head = linear.role == "head"
            for outputs, stored in self.stored_parts(linear):
                counts[LinearLayers(1, linear.inputs, outputs, head, stored)] += 1
        return tuple(replace(like, count=count) for like, count in counts.items())

    def stored_parts(
        self, linear: DeclaredLinear
    ) -> Iterator[tuple[int, tuple[StoredScheme | None, ...]]]:
        """Yield the outputs of each matrix that holds some parts of a layer, and how the checkpoint
        stores these parts."""
        stored_as = self.quantization
        stored: tuple[StoredScheme | None, ...] = (None,) * len(linear.names)
        if stored_as is not None and linear.tied:
            stored = (stored_as.embedding_scheme(self.declaration.embedding.name),)
        elif stored_as is not None:
            stored = tuple(map(stored_as.scheme, linear.names))
        first = 0
        for size in stored_alike(stored) if linear.role == "qkv" else (len(stored),):
            some = slice(first, first + size)
            yield sum(linear.outputs[some]), stored[some]
            first += size


def read_model_spec(folder: str | Path) -> ModelSpec:
    """Read the facts of the model in a folder: config.json, and generation_config.json and
    tokenizer_config.json for EOS ids.

    Raises:
        ModelError: there is no such folder, or its files cannot be used.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError("model", f"must be a folder with a config.json, not {str(folder)!r}")
    if (folder / ADAPTER_FILES[0]).exists() and not (folder / "config.json").exists():
        reason = "must not be that of an adapter: name its model, and the adapter with lora"
        raise ModelError("model", f"{str(folder)!r} {reason}")
    config = read_config(folder)
    spec = ModelSpec.from_config(config)
    if spec.pooling is None or not spec.pooling.scores:
        pooling = read_modules(folder, spec.hidden_size, spec.vocab_size, Fields(config))
        if pooling is None and spec.architecture == JUDGE:
            pooling = read_judge(folder, spec.vocab_size, Fields(config))
        named = any("qwen3-embedding" in part.lower() for part in folder.absolute().parts[-3:])
        if pooling is not None and named:  # only the model card says so
            pooling = replace(pooling, dimensions=(32,), any_dimension=True)
        if pooling is not None and pooling.score_tokens is not None and spec.architecture != JUDGE:
            raise ModelError(MODULES, f"LogitScore needs {JUDGE}, not {spec.architecture}")
        spec = spec if pooling is None else replace(spec, pooling=pooling)
    if spec.pooling is not None:
        spec = replace(spec, pooling=with_sentences(folder, spec.pooling))
    return replace(with_eos(spec, folder), built=read_built(folder))


def read_config(folder: Path) -> dict[str, object]:
    """Return config.json, with what other files say of quantisation (older ones of ModelOpt, and
    the names of the weights) and, if it has no dtype, with that of the weights.

    Raises:
        ModelError: a file cannot be used.
    """
    config = read_json(folder / "config.json")
    if config.get(KEY) is None and is_named(folder / MODELOPT):
        stored = Fields(read_json(folder / MODELOPT), MODELOPT).inside("quantization")
        config[KEY] = {
            "quant_method": "modelopt",
            "quant_algo": stored.raw("quant_algo"),
            "group_size": stored.raw("group_size"),
            "ignore": stored.raw("exclude_modules"),
            "kv_cache_scheme": stored.raw("kv_cache_quant_algo"),
        }
    text = Fields(Fields(config).mapping(TEXT) or {})
    if not any(key in part for part in (Fields(config), text) for key in DTYPE):
        config["dtype"] = float_dtype(folder)
    # One of the two is a class's default: the weights say which.
    if config.get(TIED) is True and text.raw(TIED) is False:
        config[TIED] = not any("lm_head." in name for name in tensor_names(folder))
    return with_layers_in_floats(config, tensor_names(folder))


def dtype_of(fields: Fields) -> str:
    """Return the dtype that config.json has. Without one it is that of transformers, or that in
    which quantised checkpoints have their floats, such as gpt-oss."""
    key = next((key for key in DTYPE if key in fields), DTYPE[-1])
    return fields.choice(key, tuple(DTYPE_BYTES), "bfloat16" if KEY in fields else "float32")


def with_eos(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Return the spec with the tokens that end answers by generation_config.json, else config.json,
    and by tokenizer_config.json.

    Raises:
        ModelError: a file cannot be used.
    """
    name, ends = "generation_config.json", spec.eos_token_ids
    if is_named(folder / name):
        stored = Fields(read_json(folder / name), name)
        ends = stored.token_ids("eos_token_id", spec.vocab_size) or ends
    extra = [token for token in _tokenizer_eos(folder) if 0 <= token < spec.vocab_size]
    return replace(spec, eos_token_ids=tuple(dict.fromkeys([*ends, *extra])))


def _tokenizer_eos(folder: Path) -> list[int]:
    """Return the id of the tokenizer's EOS, if its file gives it.

    Models that were tuned to chat may end their answers with another token than the model they come
    from, and name it only here.
    """
    if not is_named(folder / TOKENIZER):
        return []
    fields = Fields(read_json(folder / TOKENIZER), TOKENIZER)
    eos, added = fields.raw("eos_token"), fields.raw("added_tokens_decoder")
    text = eos.get("content") if isinstance(eos, Mapping) else eos
    if not isinstance(text, str):
        return []
    tokens: list[tuple[object, object]]
    if isinstance(added, Mapping):
        pairs = [(key, token) for key, token in added.items() if len(key) < MAX_DIGITS]
        tokens = [(int(key), token) for key, token in pairs if key.isdecimal()]
    else:  # files of transformers 5
        listed = _added_tokens(folder / "tokenizer.json")
        tokens = [(token.get("id"), token) for token in listed if isinstance(token, Mapping)]
    return [
        index
        for index, token in tokens
        if isinstance(token, Mapping) and token.get("content") == text and isinstance(index, int)
    ]


def _added_tokens(path: Path) -> list[object]:
    """Return the added tokens of a tokenizer.json, which are in its head; [] if they are not."""
    try:
        with open(path, "rb", opener=regular) as file:
            head = file.read(MAX_HEAD_BYTES).decode(errors="ignore")
        start = head.index("[", head.index('"added_tokens"'))
        tokens, _ = json.JSONDecoder().raw_decode(head, start)
    except (OSError, ValueError, RecursionError):
        return []  # the tokenizer's own reader says what is wrong
    return list(tokens)


MODELOPT = "hf_quant_config.json"
MAX_DIGITS = 10  # of a token id
MAX_HEAD_BYTES = 4 << 20  # thousands of added tokens
# Keys that may be outside the object with the facts of the text model.
TIED = "tie_word_embeddings"
DTYPE = ("dtype", "torch_dtype")
TEXT = "text_config"  # describes the text model, if config.json describes more
OUTER_KEYS = (*DTYPE, TIED, KEY, "bos_token_id", "eos_token_id")


def text_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the facts of the text model in a config.json that also describes other models.

    Raises:
        ModelError: they are not an object.
    """
    inner = dict(Fields(config).mapping(TEXT) or {})
    outer = {name: config[name] for name in OUTER_KEYS if config.get(name) is not None}
    if TIED in outer:  # newer files may have a class's default inside
        inner[TIED] = outer[TIED]
    return outer | {k: value for k, value in inner.items() if value is not None or k not in outer}


MAX_TYPES = 16  # token types; models have two
EMBEDDING_SIZE = "embedding_size"  # in `Architecture.keys` only if the width differs from hidden
_RENAMED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "rms_norm_eps",
)


def architecture_of(fields: Fields) -> str:
    """Return the architecture of a config.json: that of the text model, if there are encoders.

    Raises:
        ModelError: it does not run here.
    """
    names, text = fields.strings("architectures"), fields.inside(TEXT)
    usual = WITH_ENCODERS.get(names[0]) if names else None
    if usual is not None:
        kind = text.raw("model_type") or usual
        for name in (_of_type(kind), *text.strings("architectures")):
            if name in ARCHITECTURES:
                return name
        raise text.error("model_type", f"must be of a model that runs here, not {shown(kind)}")
    kinds = () if names else (fields.raw("model_type"), text.raw("model_type"))
    for name in (*names, *map(_of_type, kinds)):
        if name in ARCHITECTURES:
            return name
    hint = did_you_mean(names[0], ARCHITECTURES) if names else ""
    named = shown(names[0]) if names else "nothing"
    reason = f"must name one that runs here, as `kvik models` lists them, not {named}"
    if names:
        reason += "; fallback=transformers runs others"
    raise fields.error("architectures", f"{reason}; {hint}" if hint else reason)


def _of_type(model_type: object) -> str:
    """Return the first architecture of a `model_type`; "": there is none."""
    rows = ARCHITECTURES.values()
    return next((row.name for row in rows if row.model_type == model_type), "")


def _head_dim(fields: Fields, hidden: int, heads: int, arch: Architecture, heads_key: str) -> int:
    has_default = arch.head_dim is not None and not fields.is_null("head_dim")
    if arch.rotary and ("head_dim" in fields or has_default):
        size = fields.integer("head_dim", 1, MAX_HEAD_DIM, arch.head_dim)
    elif hidden % heads:
        raise fields.error(heads_key, f"must divide the hidden size {hidden}, not {heads}")
    else:
        size = hidden // heads
    if size > MAX_HEAD_DIM:
        message = f"must give heads of at most {MAX_HEAD_DIM}, not {size} ({hidden} / {heads})"
        raise fields.error(heads_key, message)
    if arch.rotary and size % 2:
        raise fields.error("head_dim", f"must be even for rotary positions, not {size}")
    return size


def _kv_heads(fields: Fields, heads: int, arch: Architecture) -> int:
    if not arch.rotary and arch.kv_heads is None:  # GPT-2 has one K and V for each head
        return heads
    key = arch.keys.get("num_key_value_heads", "num_key_value_heads")
    if arch.kv_heads is not None:
        kv_heads = arch.kv_heads(fields)
    else:
        kv_heads = fields.integer(key, 1, MAX_HEADS, heads)
    if heads % kv_heads:
        raise fields.error(key, f"must divide num_attention_heads ({heads}), not {kv_heads}")
    return kv_heads


def _flag(fields: Fields, rule: bool | str) -> bool:
    return fields.boolean(rule, False) if isinstance(rule, str) else rule
