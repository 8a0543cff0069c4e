"""Names of tensors, against those that transformers gives the same models."""

from __future__ import annotations

import gguf
import pytest
from helpers.tiny_models import tiny_model

from kvik.gguf.facts import gguf_name, has_rotary_rows, hf_name
from kvik.models.registry import ARCHITECTURES


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Mistral", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 8}),
        ("Olmo2", {}),
    ],
)
def test_every_parameter_has_the_name_of_the_public_package(family: str, options: dict) -> None:
    kind = "llama" if family == "Mistral" else family.lower()
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    known = gguf.get_tensor_name_map(architecture, 3)
    names = list(tiny_model(family, **options).state_dict())
    own = ARCHITECTURES[f"{family}ForCausalLM"].gguf_names
    assert len(names) > 25
    for name in names:
        expected = known.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name(name, own) == expected and hf_name(expected, own) == name


def test_other_names_have_none() -> None:
    others = ("rope_freqs.weight", "blk.0.attn_qkv.weight", "blk.x.attn_q.weight", "blk.1.", "")
    for name in (*others, "blk.0.attn_q.scale"):
        assert hf_name(name, {}) is None
    for name in ("self_attn.rotary_emb.inv_freq", "mlp.up_proj.qweight", "x"):
        assert gguf_name(f"model.layers.0.{name}", {}) is None and gguf_name(name, {}) is None
    assert hf_name("blk.01.attn_q.weight", {}) is None  # two names would be one


def test_rotary_rows() -> None:
    rotary = {"blk.7.attn_q.weight", "blk.0.attn_k.bias"}
    others = {"blk.0.attn_v.weight", "blk.0.attn_q_norm.weight", "blk.0.attn_output.weight"}
    others |= {"attn_q.weight", "token_embd.weight"}
    assert {name for name in rotary | others if has_rotary_rows(name)} == rotary
