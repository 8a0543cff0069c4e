"""Metadata of a GGUF file for a model and its tokenizer: the inverse of `facts` and `tokenizer`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from kvik.errors import ModelError, shown
from kvik.gguf.facts import (
    END_TOKENS,
    EXPERT_SIZES,
    FULL_INTERVAL,
    GATING,
    LATENT_RANK,
    MODEL_NAME,
    PARALLEL,
    RECURRENT,
    RECURRENT_LAYERS,
    SCALES,
    SCHEMES,
    STEP,
    TAPS,
    eps_key,
    metadata_config,
)
from kvik.gguf.names import (
    EMBEDDING,
    HEAD,
    INPUTS_PROJECTION,
    LAYER,
    POSITIONS,
    TOKEN_INPUTS,
    block_of,
)
from kvik.gguf.reader import Scalar
from kvik.gguf.rope import TEMPERATURE, llama3_divisors, proportional_divisors
from kvik.gguf.tokenizer import AT, SPACE, WORD_RULES, TokenKind, WordRule
from kvik.gguf.types import BLOCK_TYPES, Array, Metadata
from kvik.models.model_spec import ModelSpec
from kvik.models.registry import ARCHITECTURES
from kvik.spec.architecture import Architecture
from kvik.spec.experts import ExpertsSpec
from kvik.spec.rope import RopeSpec

Entry = Scalar | Sequence[Scalar]


@dataclass(frozen=True, slots=True)
class FileType:
    """The block types of a file's matrices."""

    code: int  # `general.file_type`
    usual: str  # type of most matrices
    head: str | None = None  # of the head, also if it is the embedding; None: usual
    embedding: str | None = None  # of an embedding that is not the head; None: usual
    # Of the value and down projections in half of the layers; None: usual.
    sensitive: str | None = None


# The mixes of K-quants are llama.cpp's.
FILE_TYPES: Mapping[str, FileType] = {
    "F32": FileType(0, "F32"),
    "BF16": FileType(32, "BF16"),
    "F16": FileType(1, "F16"),
    "Q8_0": FileType(7, "Q8_0"),
    "Q6_K": FileType(18, "Q6_K"),
    "Q5_K_M": FileType(17, "Q5_K", head="Q6_K", sensitive="Q6_K"),
    "Q4_K_M": FileType(15, "Q4_K", head="Q6_K", sensitive="Q6_K"),
    "Q4_0": FileType(2, "Q4_0", head="Q8_0", embedding="Q8_0"),
}
# Layers whose matrices are never quantised, as in llama.cpp.
EXACT = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "shortconv.conv")
# Replacements of block types of 256 weights, if rows are not multiples of 256.
SMALLER_BLOCKS: Mapping[str, str] = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def block_type(type: str, name: str, width: int, spec: ModelSpec) -> str:
    """Return the type of the blocks of a matrix.

    Args:
        type: of the file, one of `FILE_TYPES`.
        name: of the tensor in the file.
        width: weights of a row. Rows that are not whole blocks of any kind stay BF16.
    """
    file = FILE_TYPES[type]
    kind: str | None = None
    if name == HEAD or (name == EMBEDDING and spec.tie_word_embeddings):
        kind = file.head
    elif name in (EMBEDDING, TOKEN_INPUTS):
        kind = file.embedding
    elif name == INPUTS_PROJECTION and file.usual in SCHEMES:
        kind = "BF16"
    elif name == POSITIONS:
        kind = "F32"
    elif (layer := LAYER.fullmatch(name)) is None:
        kind = "F32" if block_of(name) is not None else None
    else:
        part = layer[2]
        if part in EXACT or part.endswith("_norm"):
            kind = "F32"
        elif _has_eight_experts(spec) and file.usual in SCHEMES and part in ("attn_k", "attn_v"):
            kind = "Q8_0"
        elif _has_eight_experts(spec) and file.usual == "Q4_K" and part == "attn_output":
            kind = "Q5_K"
        elif part == "attn_v" or part.startswith("ffn_down"):
            if _is_sensitive(int(layer[1]), spec.num_layers):
                kind = file.sensitive
            elif file.usual == "Q4_K" and part == "attn_v" and _is_70b(spec):
                kind = "Q5_K"
    kind = kind or file.usual
    if width % BLOCK_TYPES[kind].weights:
        kind = SMALLER_BLOCKS.get(kind, kind)
    return "BF16" if width % BLOCK_TYPES[kind].weights else kind


def _is_sensitive(layer: int, layers: int) -> bool:
    """Return whether a layer is in the first or last eighth, or each third layer in between."""
    first = layers // 8
    return layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2


def _has_eight_experts(spec: ModelSpec) -> bool:
    """Return whether layers have eight experts: then attention is a small part of the weights, and
    finer types for it cost little."""
    return any(layer.experts and layer.experts.router.experts == 8 for layer in spec.layers)


def _is_70b(spec: ModelSpec) -> bool:
    """Return whether the model has the layers of a 70B, where many heads share values."""
    return spec.num_layers == 80 and spec.num_kv_heads < spec.num_heads


def gguf_family(spec: ModelSpec) -> Architecture:
    """Return the architecture that names the files of a model.

    Raises:
        ModelError: GGUF has no name for this model that kvik can read back.
    """
    if spec.family.gguf is None or spec.encoder:
        rows = ARCHITECTURES.items()
        names = ", ".join(name for name, row in rows if row.gguf and not row.pooled)
        raise ModelError("architectures", f"must be one of {names} for GGUF")
    return spec.family


def model_metadata(spec: ModelSpec, name: str, type: str) -> dict[str, Entry]:
    """Return the metadata of a model, without its tokenizer.

    Args:
        name: `general.name`.
        type: of the file, one of `FILE_TYPES`.

    Raises:
        ModelError: GGUF cannot describe this model.
    """
    family = gguf_family(spec)
    has_experts = any(layer.experts for layer in spec.layers)
    architecture = family.gguf_experts if has_experts and family.gguf_experts else str(family.gguf)
    facts: dict[str, Entry | None] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        eps_key(family): spec.norm_eps,
        "attention.sliding_window": next((w.keys for w in spec.windows if w), None),
        **{SCALES[key][0]: SCALES[key][1](spec.scales) for key in family.gguf_scales},
    }
    if PARALLEL in family.fixed or (family.wiring is not None and family.gguf_parts is None):
        facts[PARALLEL] = family.fixed.get(PARALLEL, bool(spec.wiring))
    facts |= _experts(spec) | _latent(spec) | _states(spec)
    if (main := _main_rope(spec)) is not None:
        facts |= _rope(*main, family)
    if family.gguf_by_kind:
        facts |= _kinds(spec)
    if family.gguf_extra is not None:
        facts |= family.gguf_extra(spec)
    metadata: dict[str, Entry] = {
        "general.architecture": architecture,
        "general.type": "model",
        MODEL_NAME: name,
        "general.file_type": FILE_TYPES[type].code,
        "general.quantization_version": 2,
        **{f"{architecture}.{key}": value for key, value in facts.items() if value is not None},
    }
    _check(spec, metadata, architecture)
    return metadata


def _main_rope(spec: ModelSpec) -> tuple[RopeSpec, int] | None:
    """Return the rotary positions of layers without a window, and the width; GGUF usually has only
    these. None: there are none."""
    rotations = (spec.rotation(layer) for layer in spec.layers if layer.window is None)
    return next(filter(None, rotations), next(iter(spec.rotations), None))


def _check(spec: ModelSpec, metadata: Mapping[str, Entry], architecture: str) -> None:
    """Raise `ModelError` if reading the metadata back gives another model."""
    values = {
        key: value if isinstance(value, bool | int | float | str) else Array.of(value)
        for key, value in metadata.items()
    }
    config = metadata_config(Metadata(values, "metadata"))
    back = ModelSpec.from_config({**config, "vocab_size": spec.vocab_size}, "metadata")

    norm = back.family.qk_norm
    normed = norm not in config or config[str(norm)] == spec.qk_norm  # else tensors decide
    bias = back.family.qkv_bias
    biased = bias not in config or config[str(bias)] == spec.qkv_bias

    def queries(model: ModelSpec) -> list[object]:
        return [layer.query_scale for layer in model.layers]

    def turns(model: ModelSpec) -> list[object]:
        main = _main_rope(model)
        return [
            pair
            and (
                *((rope := pair[0]).theta, _stored_width(*pair), rope.interleaved),
                *(rope.mscale, rope.mscale_all_dim, rope.truncate, rope.query_beta),
                # the file has these of the main one, maybe in a tensor
                *(() if pair == main else (rope.kind, rope.factor)),
            )
            for pair in map(model.rotation, model.layers)
        ]

    def scales(model: ModelSpec) -> tuple[float, ...]:
        facts, usual = model.scales, model.head_dim**-0.5
        limits = facts.attention_cap, facts.logits_cap, facts.qkv_limit
        caps = (limit or 0.0 for limit in limits)
        return facts.embedding, facts.residual, facts.attention or usual, facts.logits, *caps

    folded = back.family.gguf_factors is not None  # the tensors have them
    pairs = [] if folded else [*zip(scales(spec), scales(back), strict=True)]
    for key, good in (
        ("sliding_window", spec.windows == back.windows),
        ("attn_scale", queries(spec) == queries(back)),
        ("use_qk_norm", normed),
        ("attention_bias", biased),
        ("heads of layers", _heads(spec) == _heads(back)),
        ("alibi", _slopes(spec) == _slopes(back)),
        ("rope_parameters", turns(spec) == turns(back)),
        ("experts of layers", _chosen(spec) == _chosen(back)),
        ("layer_types", _mixers(spec) == _mixers(back)),
        ("hidden_act", spec.gated_mlp or _same_activation(spec.activation, back.activation)),
        ("config.json", all(math.isclose(scale, other, rel_tol=1e-6) for scale, other in pairs)),
    ):
        if not good:
            reason = "must be what {} files imply: GGUF cannot express other values"
            raise ModelError(key, reason.format(architecture))


def _heads(model: ModelSpec) -> list[object]:
    return [
        (*model.heads(layer), layer.kv_from, model.inner(layer), layer.token_input)
        for layer in model.layers
    ]


def _slopes(model: ModelSpec) -> list[object]:
    return [[f"{slope:.6g}" for slope in layer.slopes] for layer in model.layers]


def _mixers(model: ModelSpec) -> list[object]:
    return [layer.state or layer.latent for layer in model.layers]


def _chosen(model: ModelSpec) -> list[ExpertsSpec | None]:
    """Return the experts of each layer; if all groups are kept, without groups."""
    result: list[ExpertsSpec | None] = []
    for layer in model.layers:
        experts = layer.experts
        if experts is not None and experts.router.kept_groups == experts.router.groups:
            router = replace(experts.router, groups=1, kept_groups=1)
            experts = replace(experts, router=router)
        result.append(experts)
    return result


def _experts(spec: ModelSpec) -> dict[str, Entry | None]:
    """Return the metadata of routed experts."""
    sparse = [layer.experts for layer in spec.layers]
    first = next((layer for layer, moe in enumerate(sparse) if moe is not None), None)
    if first is None or (experts := sparse[first]) is None:
        return {}
    router = experts.router
    stepped = STEP in spec.family.defaults  # every n-th layer has them
    return {
        **{name: of(experts) for name, of in EXPERT_SIZES.values()},
        "leading_dense_block_count": None if stepped else first or None,
        STEP: first + 1 if stepped else None,
        "expert_feed_forward_length": experts.inner,
        "expert_gating_func": GATING[router.scores],
        "expert_weights_norm": router.normalised,
        "expert_weights_scale": router.scale if router.scale != 1.0 else None,
    }


def _kinds(spec: ModelSpec) -> dict[str, Entry | None]:
    """Return the metadata of layers with a window and of others, whose heads differ, and of layers
    that read the keys and values of earlier ones."""
    windowed = next((layer for layer in spec.layers if layer.window), None)
    full = next((layer for layer in spec.layers if layer.window is None), None)
    if windowed is None or full is None or windowed.rope is None:
        reason = f"must include layers with and without a window for {spec.family.gguf} in GGUF"
        raise ModelError("layer_types", reason)
    size, size_swa = spec.heads(full)[1], spec.heads(windowed)[1]
    return {
        "feed_forward_length": _one_or_all([spec.inner(layer) for layer in spec.layers]),
        "embedding_length_per_layer_input": full.token_input,
        "attention.head_count_kv": _one_or_all([spec.heads(layer)[0] for layer in spec.layers]),
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.key_length_swa": size_swa,
        "attention.value_length_swa": size_swa,
        "attention.sliding_window_pattern": [layer.window is not None for layer in spec.layers],
        "attention.shared_kv_layers": sum(layer.kv_from is not None for layer in spec.layers),
        "rope.freq_base_swa": windowed.rope.theta,
        "rope.dimension_count_swa": size_swa,
    }


def _one_or_all(sizes: list[int]) -> Entry:
    return sizes if len(set(sizes)) > 1 else sizes[0]


def _latent(spec: ModelSpec) -> dict[str, Entry | None]:
    """Return the metadata of latent attention, whose heads it describes in their cached form."""
    latent = spec.latent
    if latent is None:
        return {}
    return {
        LATENT_RANK: latent.rank,
        "attention.q_lora_rank": latent.q_rank,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": latent.query,
        "attention.value_length_mla": latent.value,
    }


def _states(spec: ModelSpec) -> dict[str, Entry | None]:
    """Return the metadata of layers that keep a state."""
    if not spec.states:
        return {}
    state, attends = spec.states[0], [layer.attends for layer in spec.layers]
    where: dict[str, Entry | None] = {
        "attention.head_count_kv": [spec.num_kv_heads * flag for flag in attends]
    }
    if not state.value_heads:
        return {TAPS: state.width, **where}
    if any(layer.feeds for layer in spec.layers):
        where["feed_forward_length"] = [
            layer.feeds * (layer.experts.inner if layer.experts else spec.inner(layer))
            for layer in spec.layers
        ]
    elif state.delta:
        every = attends.index(True) + 1
        where = {FULL_INTERVAL: every}
        if attends != [(layer + 1) % every == 0 for layer in range(spec.num_layers)]:
            where = {RECURRENT_LAYERS: [not flag for flag in attends]}
    return where | {at: of(state) for at, of in RECURRENT.values()}


def _same_activation(name: str, other: str) -> bool:
    tanh = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    return name == other or (name in tanh and other in tanh)


def rope_divisors(spec: ModelSpec) -> list[float] | None:
    """Return the values of `rope_freqs.weight` [head_dim / 2]; None: it is not needed."""
    if spec.family.gguf_by_kind and (main := _main_rope(spec)) is not None:
        return proportional_divisors(*main)
    if not spec.ropes or spec.ropes[0].kind != "llama3":
        return None
    return llama3_divisors(spec.ropes[0], spec.head_dim)


def token_id_metadata(spec: ModelSpec) -> dict[str, Scalar]:
    """Return BOS and the first tokens that end an answer, as far as GGUF has names for them."""
    names = dict(zip(END_TOKENS, spec.eos_token_ids, strict=False))
    ids: dict[str, Scalar] = {f"tokenizer.ggml.{name}": token for name, token in names.items()}
    if spec.bos_token_id is not None:
        ids["tokenizer.ggml.bos_token_id"] = spec.bos_token_id
    return ids


def _stored_width(rope: RopeSpec, size: int) -> int:
    """Return the rotated width for the metadata. For "proportional" it is the whole head: a tensor
    says which pairs are not rotated."""
    return size if rope.kind == "proportional" else rope.width(size)


def _rope(rope: RopeSpec, size: int, family: Architecture) -> dict[str, Entry | None]:
    facts: dict[str, Entry | None] = {
        "rope.freq_base": rope.theta,
        "rope.dimension_count": _stored_width(rope, size),
    }
    by_tensor = "proportional" if family.gguf_by_kind else "llama3"
    if rope.kind in ("default", by_tensor):
        return facts
    kinds = () if family.gguf_by_kind else ("linear", "yarn")
    if rope.kind not in kinds or rope.mscale != rope.mscale_all_dim:
        raise ModelError("rope_scaling", f"GGUF cannot express this kind of {rope.kind}")
    facts |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        facts |= {
            "rope.scaling.original_context_length": rope.original_max_position,
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
            "rope.scaling.yarn_attn_factor": rope.attention_factor,
            TEMPERATURE: rope.query_beta or None,
        }
    if rope.mscale_all_dim is not None and family.gguf_log_scale:
        facts["rope.scaling.yarn_log_multiplier"] = rope.mscale_all_dim * family.gguf_log_scale
    return facts


# Metadata of a tokenizer.json: the inverse of `tokenizer`.

BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def tokenizer_metadata(
    library: Tokenizer,
    vocab_size: int,
    bos: int | None,
    eos: int | None,
    template: str | None,
    characters: str = "llama",
) -> dict[str, Entry]:
    """Return the metadata of a tokenizer.

    Args:
        vocab_size: rows of the embedding; ids without a token get an unused one.
        bos, eos: ids.
        template: of chats.
        characters: `gguf_characters` of the architecture.

    Raises:
        ModelError: GGUF cannot describe this tokenizer.
    """
    state = json.loads(library.to_str())
    model = state["model"]
    if model["type"] != "BPE":
        raise ModelError("tokenizer.json", f"must be BPE for GGUF, not {shown(model['type'])}")
    by_bytes = bool(model["byte_fallback"])
    by_score = by_bytes and characters == "llama"
    tokens, kinds = _tokens(library, model, vocab_size, by_bytes)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata: dict[str, Entry] = {
        f"{AT}.model": characters if by_bytes else "gpt2",
        f"{AT}.tokens": tokens,
        f"{AT}.token_type": kinds,
    }
    if by_bytes:
        metadata[f"{AT}.add_space_prefix"] = prefix = _space_prefix(state)
        if prefix and not by_score:
            reason = f"must not put a space before a text, for {characters} in GGUF"
            raise ModelError("tokenizer.json", reason)
    if by_score:
        metadata[f"{AT}.pre"] = "default"
        metadata[f"{AT}.scores"] = _scores(tokens, merges)
    else:
        metadata[f"{AT}.merges"] = merges
    if not by_bytes:
        metadata[f"{AT}.pre"] = _rule_name(state)
    ends = library.encode("a").ids, library.encode("a", add_special_tokens=False).ids
    metadata[f"{AT}.add_bos_token"] = ends[0] != ends[1] and ends[0][0] == bos
    metadata[f"{AT}.add_eos_token"] = ends[0] != ends[1] and ends[0][-1] == eos
    if template:
        metadata["tokenizer.chat_template"] = template
    return metadata


def _tokens(
    library: Tokenizer, model: Mapping[str, Any], vocab_size: int, by_bytes: bool
) -> tuple[list[str], list[int]]:
    """Return the tokens by id, and their kinds."""
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds: list[int] = [TokenKind.UNUSED] * vocab_size
    added = library.get_added_tokens_decoder()
    for token, index in library.get_vocab(with_added_tokens=True).items():
        if index >= vocab_size:
            raise ModelError("tokenizer.json", f"{shown(token)} must be below {vocab_size}")
        tokens[index] = token
        if index in added:
            special = added[index].special
            kinds[index] = TokenKind.CONTROL if special else TokenKind.USER_DEFINED
        else:
            byte = by_bytes and token in BYTES
            kinds[index] = TokenKind.BYTE if byte else TokenKind.NORMAL
        if token == model["unk_token"]:
            kinds[index] = TokenKind.UNKNOWN
    return tokens, kinds


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Return the score of each token: higher for tokens of earlier merges."""
    rank: dict[str, int] = {}
    for index, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), index)
    return [-float(rank.get(token, 0)) for token in tokens]


def _space_prefix(state: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer puts a space before a text, like SentencePiece."""
    normal, before = state["normalizer"] or {}, state["pre_tokenizer"] or {}
    steps = normal.get("normalizers", [normal])
    kinds = [step.get("type") for step in steps]
    if before.get("type") == "Metaspace":
        return bool(before["prepend_scheme"] != "never")
    if kinds in (["Prepend", "Replace"], ["Replace"]) and steps[-1].get("content") == SPACE:
        return bool(kinds[0] == "Prepend")
    raise ModelError("tokenizer.json", "must replace spaces as SentencePiece does, for GGUF")


def _rule_name(state: Mapping[str, Any]) -> str:
    """Return the name of the rule that splits text into words."""
    normalizer, before = state["normalizer"], state["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [before])
    splits = []
    for step in steps:
        kind = step.get("type")
        if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            splits.append(step["pattern"].get("Regex"))
        elif kind == "Digits" and step["individual_digits"]:
            splits.append(r"\p{N}")
        elif kind == "ByteLevel" and not step["add_prefix_space"] and step is steps[-1]:
            splits += list(WORD_RULES["gpt-2"].splits) if step["use_regex"] else []
        else:
            splits.append(None)
    nfc = (normalizer or {}).get("type") == "NFC"
    whole_words = bool(state["model"].get("ignore_merges", False))
    for name, rule in WORD_RULES.items():
        same = WordRule(tuple(splits), nfc, whole_words, rule.bos) == rule
        if same and (nfc or normalizer is None):
            return name
    raise ModelError("tokenizer.json", "cuts text into words in a way that has no name in GGUF")
