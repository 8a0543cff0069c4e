"""What a GGUF file says of a model: the other way of `facts`."""

from __future__ import annotations

from collections.abc import Mapping

from kvik.errors import ModelError
from kvik.gguf.facts import END_TOKENS, GGUF_ARCHITECTURES
from kvik.gguf.rope import llama3_divisors
from kvik.gguf.writer import Scalar
from kvik.models.model_spec import ModelSpec
from kvik.spec.rope import RopeSpec

NAMES = {hf: name for name, hf in GGUF_ARCHITECTURES.items()} | {"MistralForCausalLM": "llama"}
# `general.file_type` by the type of most matrices.
FILE_TYPES: Mapping[str, int] = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}


def gguf_architecture(spec: ModelSpec) -> str:
    """`general.architecture`.

    Raises:
        ModelError: GGUF has no name for this model that kvik could read back.
    """
    if spec.architecture not in NAMES:
        known = ", ".join(NAMES)
        raise ModelError("architectures", f"must be one of {known} for GGUF")
    name = NAMES[spec.architecture]
    if any(window != spec.windows[0] for window in spec.windows) or (
        name != "llama" and spec.windows[0] is not None
    ):
        raise ModelError("sliding_window", "must be the same in all layers of a llama for GGUF")
    return name


def model_metadata(spec: ModelSpec, name: str, type: str) -> dict[str, Scalar]:
    """The metadata of a model, without its tokenizer.

    Args:
        name: for people.
        type: of most matrices, one of `FILE_TYPES`.

    Raises:
        ModelError: GGUF has no words for this model.
    """
    architecture = gguf_architecture(spec)
    facts: dict[str, Scalar | None] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "attention.sliding_window": spec.windows[0],
        "rope.dimension_count": spec.head_dim,
    }
    assert spec.rope is not None  # only GPT-2 has no rotary positions
    facts |= _rope(spec.rope)
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.file_type": FILE_TYPES[type],
        "general.quantization_version": 2,
        **{f"{architecture}.{key}": value for key, value in facts.items() if value is not None},
    }


def rope_divisors(spec: ModelSpec) -> list[float] | None:
    """The values of `rope_freqs.weight` [head_dim / 2]; None: the file has no such tensor."""
    rope = spec.rope
    if rope is None or rope.kind != "llama3":
        return None
    scaling = {
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }
    return llama3_divisors(scaling, rope.theta, spec.head_dim)


def token_id_metadata(spec: ModelSpec) -> dict[str, Scalar]:
    """BOS and the tokens that end an answer, as many as GGUF has names for."""
    names = dict(zip(END_TOKENS, spec.eos_token_ids, strict=False))
    ids: dict[str, Scalar] = {f"tokenizer.ggml.{name}": token for name, token in names.items()}
    if spec.bos_token_id is not None:
        ids["tokenizer.ggml.bos_token_id"] = spec.bos_token_id
    return ids


def _rope(rope: RopeSpec) -> dict[str, Scalar | None]:
    facts: dict[str, Scalar | None] = {"rope.freq_base": rope.theta}
    if rope.kind in ("default", "llama3"):
        return facts
    if rope.kind not in ("linear", "yarn") or rope.mscale is not None or not rope.truncate:
        raise ModelError("rope_scaling", f"GGUF has no words for {rope.kind} of this kind")
    facts |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        facts |= {
            "rope.scaling.original_context_length": rope.original_max_position,
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
            "rope.scaling.yarn_attn_factor": rope.attention_factor,
        }
    return facts
