"""Attention sinks with the paper's positions: keys are cached before rotation, and rotated by their
places in the cache (StreamingLLM, Xiao et al. 2023, section 3.2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.attention_backends import NAMES, make_backend
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON, TRITON
from helpers.paged_model import PagedModel
from helpers.tiny_models import save_tiny, tokens
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvik.config.config import EngineConfig, Notes
from kvik.config.resolve import as_streamed
from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.torch_ops import TORCH
from kvik.model_files import model_files
from kvik.nn.rope import Rope

SINKS, WINDOW = 3, 14
LENGTH = 5 * (SINKS + WINDOW)
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": HEADS,
    "Qwen3": HEADS,  # normalised heads
    "SmolLM3": {**HEADS, "no_rope_layer_interval": 2},  # the second layer does not rotate
    "Gemma3": {  # the first layer has a window of its own, and another rotation
        **HEADS,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "yarn": {
        **HEADS,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


def in_cache_logits(model: Any, ids: list[int], sinks: int, window: int) -> Tensor:
    """Return [tokens, vocab], computed token by token with a list of keys per layer that keeps the
    first and the last ones."""
    decoder, dim = model.model, model.config.head_dim
    cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in decoder.layers]
    rows = []
    for token in ids:
        x = decoder.embed_tokens(torch.tensor([[token]]))
        for layer, kept in zip(decoder.layers, cache, strict=True):
            attention, residual = layer.self_attn, x
            gemma = hasattr(layer, "pre_feedforward_layernorm")
            kind = attention.layer_type if gemma else ""
            most = attention.sliding_window if kind == "sliding_attention" else sinks + window
            first = 0 if kind == "sliding_attention" else sinks
            x = layer.input_layernorm(x)
            q, k, v = (
                project(x).view(1, -1, dim)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if hasattr(attention, "q_norm"):
                q, k = attention.q_norm(q), attention.k_norm(k)
            if len(kept) == most:
                del kept[first]
            kept.append((k, v))
            keys = torch.cat([key for key, _ in kept]).transpose(0, 1)[None]  # [1, heads, n, dim]
            values = torch.cat([value for _, value in kept]).transpose(0, 1)[None]
            queries = q.transpose(0, 1)[None]
            if getattr(attention, "use_rope", True):
                places = torch.arange(len(kept))[None]
                cos, sin = decoder.rotary_emb(x, places, *([kind] if kind else []))
                _, keys = apply_rotary_pos_emb(keys, keys, cos, sin)
                queries, _ = apply_rotary_pos_emb(queries, queries, cos[:, -1:], sin[:, -1:])
            group = queries.shape[1] // keys.shape[1]
            keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
            weights = (queries @ keys.transpose(2, 3) * attention.scaling).softmax(-1)
            heads = (weights @ values).transpose(1, 2).reshape(1, 1, -1)
            x = attention.o_proj(heads)
            if kind:  # norms before and after
                x = residual + layer.post_attention_layernorm(x)
                fed = layer.mlp(layer.pre_feedforward_layernorm(x))
                x = x + layer.post_feedforward_layernorm(fed)
            else:
                x = residual + x
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        rows.append(model.lm_head(decoder.norm(x))[0, 0])
    return torch.stack(rows)


def bloom_in_cache_logits(model: Any, ids: list[int], sinks: int, window: int) -> Tensor:
    """Return the same for ALiBi, whose distances are those of places in the cache."""
    decoder, cache = model.transformer, [[] for _ in model.transformer.h]
    rows = []
    for token in ids:
        x = decoder.word_embeddings_layernorm(decoder.word_embeddings(torch.tensor([[token]])))
        for layer, kept in zip(decoder.h, cache, strict=True):
            attention = layer.self_attention
            parts = attention._reshape(attention.query_key_value(layer.input_layernorm(x)))
            q, k, v = (part[0] for part in parts)  # [heads, 1, dim]
            if len(kept) == sinks + window:
                del kept[sinks]
            kept.append((k, v))
            keys, values = (torch.cat(both, 1) for both in zip(*kept, strict=True))
            alibi = build_alibi_tensor(torch.ones(1, len(kept)), len(q), torch.float32)
            weights = (q @ keys.mT * attention.inv_norm_factor + alibi).softmax(-1)
            x = x + attention.dense((weights @ values).transpose(0, 1).reshape(1, 1, -1))
            x = layer.mlp(layer.post_attention_layernorm(x), x)
        rows.append(model.lm_head(decoder.ln_f(x))[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize(
    "name",
    [
        *NAMES,
        pytest.param(
            "triton",
            marks=[
                *(pytest.mark.full, INTERPRETED_ONLY),
                pytest.mark.skipif(not TRITON, reason=NO_TRITON),
            ],
        ),
    ],
)
@pytest.mark.parametrize("chunk", [0, 1, 33])
def test_distances_of_alibi_are_those_within_the_cache(tmp_path, name, chunk) -> None:
    model = save_tiny(tmp_path, "Bloom", hidden_size=96, n_head=6, n_layer=2)
    ids = tokens(LENGTH)
    with torch.inference_mode():
        expected = bloom_in_cache_logits(model, ids, SINKS, WINDOW)
    found = streamed(tmp_path, name, block_size=16).logits(ids, chunk)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, list[int], Tensor]:
    """Return a model, a text, and its logits with the paper's cache."""
    folder = tmp_path_factory.mktemp(request.param)
    family = "Llama" if request.param == "yarn" else request.param
    options = {"max_position_embeddings": 64, "num_hidden_layers": 2, **FAMILIES[request.param]}
    model = save_tiny(folder, family, **options).float().eval()
    ids = tokens(LENGTH)
    with torch.inference_mode():
        return folder, ids, in_cache_logits(model, ids, SINKS, WINDOW)


def streamed(folder: Path, name: str, **options: Any) -> PagedModel:
    config = EngineConfig(window=WINDOW, attention_sinks=SINKS)
    spec = as_streamed(config, model_files(folder).spec(), Notes())
    if name == "triton":
        from kvik.attention.triton import TritonAttention

        backend: Any = TritonAttention(TORCH)
    else:
        backend = make_backend(name)
    ops: Ops = REFERENCE if name == "reference" else backend._ops
    return PagedModel(folder, spec=spec, ops=ops, backend=backend, max_model_len=1 << 20, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [0, 1, 7, 16, 33])
def test_logits_are_those_of_positions_within_the_cache(case, name, chunk) -> None:
    """Also far beyond the trained length of 64."""
    folder, ids, expected = case
    model = streamed(folder, name, block_size=16)
    torch.testing.assert_close(model.logits(ids, chunk), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.each(1)  # a family differs in what the kernels get, not in kernels
@INTERPRETED_ONLY
@pytest.mark.skipif(not TRITON, reason=NO_TRITON)
@pytest.mark.parametrize("chunk", [0, 4, 33])
def test_logits_of_triton_are_those_of_positions_within_the_cache(case, chunk) -> None:
    """With the prefill kernel, the split kernel, and both."""
    folder, ids, expected = case
    found = streamed(folder, "triton", block_size=16).logits(ids, chunk)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_without_sinks_or_rotation_logits_differ(case) -> None:
    folder, ids, expected = case
    plain = EngineConfig(window=WINDOW)
    spec = as_streamed(plain, model_files(folder).spec(), Notes())
    found = PagedModel(folder, spec=spec, max_model_len=4096).logits(ids)
    torch.testing.assert_close(found[:WINDOW], expected[:WINDOW], rtol=1e-4, atol=1e-4)
    assert (found[-1] - expected[-1]).abs().max() > 1e-2
    model = streamed(folder, "reference")
    attends = [layer.attention for layer in model.model.layers]
    assert any(attention.attend.sink_rope for attention in attends)
    for attention in attends:
        attention.attend = replace(attention.attend, sink_rope=None)
    assert (model.logits(ids)[-1] - expected[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_positions_may_be_large(case, name, monkeypatch) -> None:
    """Only differences of positions matter, equally exactly a million tokens from the start."""
    folder, ids, expected = case
    shift, most, at = (1 << 20) - LENGTH, SINKS + WINDOW, Rope.at
    monkeypatch.setattr(Rope, "at", lambda rope, p: at(rope, p + shift))
    monkeypatch.setattr(Rope, "after_keys", lambda rope, p: at(rope, p.clamp(max=most - 1) + shift))
    found = streamed(folder, name, block_size=16).logits(ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_all_layers_of_a_step_share_rotations_of_queries(case, monkeypatch) -> None:
    folder, ids, _ = case
    asked: list[int] = []

    def after_keys(rope: Rope, positions: torch.Tensor) -> torch.Tensor:
        asked.append(len(positions))
        return turned(rope, positions)

    turned = Rope.after_keys
    monkeypatch.setattr(Rope, "after_keys", after_keys)
    model = streamed(folder, "reference")
    assert len(model.model.layers) > 1
    model.logits(ids[:40], 16)
    assert asked == [16, 16, 8]
