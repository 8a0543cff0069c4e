"""Logits of every architecture and option equal those of transformers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers.model_cases import CASES, rope
from helpers.optional_native import needs_native
from helpers.paged_model import PagedModel
from helpers.tiny_models import (
    LLAMA4,
    reference_logits,
    save_tiny,
    tiny_model,
    tokens,
)
from safetensors.torch import load_file, save_file
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.llama import modeling_llama

from kvik.attention.base import AttentionBackend
from kvik.attention.sdpa import SdpaAttention
from kvik.config.compute import LANES
from kvik.kernels.reference.ops import REFERENCE
from kvik.models.decoder import Decoder, GroupedQueryAttention, PreNormLayer
from kvik.models.llama import LLAMA
from kvik.models.model_spec import read_model_spec
from kvik.models.registry import ARCHITECTURES

PROMPT = 40
DECODED = 3  # tokens that are computed one at a time


@dataclass(frozen=True)
class Pair:
    """The same weights in both engines."""

    reference: Any
    folder: Path


KERNELS = ["reference", pytest.param("native", marks=needs_native)]


def paged_model(
    kernels: str, folder: Path, dtype: torch.dtype = torch.float32, block_size: int = 16
) -> PagedModel:
    """Return a model on the reference operations, or on the native ones with native attention if it
    supports the heads."""
    if kernels == "reference":
        return PagedModel(folder, dtype=dtype, block_size=block_size)
    from kvik.attention.cpu import CpuAttention
    from kvik.kernels.cpu.native import Native
    from kvik.kernels.cpu.ops import native_ops

    native = Native(threads=1)
    ops = native_ops(native)
    backend: AttentionBackend = SdpaAttention(ops)
    spec = read_model_spec(folder)
    rotated = () if spec.compressed else (width for _, width in spec.rotations)
    widths = {*spec.head_dims, *rotated}
    if all(width % LANES == 0 for width in widths):
        backend, block_size = CpuAttention(native, ops), LANES
    return PagedModel(folder, dtype=dtype, block_size=block_size, ops=ops, backend=backend)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, options = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return Pair(save_tiny(folder, family, **options), folder)


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_of_every_position(pair: Pair, kernels: str) -> None:
    ids = tokens(PROMPT + 2)  # the last are in another block
    expected = reference_logits(pair.reference, ids)
    model = paged_model(kernels, pair.folder, block_size=4)
    loaded = sum(math.prod(tensor.shape) for tensor in model.builder.declared.tensors)
    assert loaded == model.spec.num_parameters
    torch.testing.assert_close(model.logits(ids), expected, atol=1e-4, rtol=0)
    parts = [model.logits(ids[:-DECODED], chunk=20, sequence=1)]
    parts.append(model.logits(ids[-DECODED:], chunk=1, sequence=1))
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


@pytest.mark.each(1)  # the test before runs both kernels
@pytest.mark.parametrize("kernels", KERNELS)
def test_sequences_of_one_step_are_independent(pair: Pair, kernels: str) -> None:
    """Three sequences of different lengths share each step; one decodes while others prefill."""
    prompts = [tokens(length, seed) for seed, length in enumerate((5, 17, 30))]
    model = paged_model(kernels, pair.folder, block_size=4)
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    done = [0, 0, 0]
    for sizes in ((4, 9, 0), (1, 0, 30), (0, 8, 0)):
        chunks = {s: prompts[s][done[s] : done[s] + n] for s, n in enumerate(sizes) if n}
        for sequence, logits in model.step(chunks).items():
            seen[sequence].append(logits)
            done[sequence] += len(logits)
    for prompt, logits in zip(prompts, seen.values(), strict=True):
        expected = reference_logits(pair.reference, prompt)
        torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=0)


@pytest.mark.full
def test_the_same_through_fused_attention(pair: Pair) -> None:
    ids = tokens(37, seed=2)
    expected = reference_logits(pair.reference, ids)
    model = PagedModel(pair.folder, backend=SdpaAttention(REFERENCE))
    # One token at a time at the end, behind the windows and into another block.
    parts = [model.logits(ids[:35], chunk=18), model.logits(ids[35:], chunk=1)]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "case",
    [
        *("llama-gqa", "mistral-window", "qwen2", "qwen3", "gpt2", "llama-yarn"),
        *("llama-head-dim-16", "mistral-head-dim", "qwen2-window-head-dim-16", "gpt2-head-dim-16"),
        *("lfm2", "qwen3.5", "deepseek-v4"),
    ],
)
def test_bf16_is_as_close_to_fp32_as_transformers_is(
    case: str, kernels: str, tmp_path: Path
) -> None:
    family, options = CASES[case]
    exact = tiny_model(family, **options)
    exact.to(torch.bfloat16).save_pretrained(tmp_path)
    ids = tokens(PROMPT)
    rounded = reference_logits(exact, ids)
    expected = reference_logits(exact.float(), ids)  # the same rounded weights in exact arithmetic
    ours = paged_model(kernels, tmp_path, torch.bfloat16).logits(ids)
    assert ours.dtype == torch.float32
    distance = (ours - expected).norm() / expected.norm()
    assert distance < 1.2 * (rounded - expected).norm() / expected.norm()
    # Queries and keys of a delta net are divided by their norms, which are small in random models.
    assert distance < (0.06 if case == "qwen3.5" else 0.03)


def test_dynamic_rope_beyond_its_original_context(tmp_path: Path) -> None:
    """The base is that of a sequence of max_model_len, for any length of a step."""
    reference = save_tiny(
        tmp_path,
        "Llama",
        max_position_embeddings=32,
        **rope(rope_type="dynamic", factor=3.0),
    )
    ids = tokens(80)
    expected = reference_logits(reference, ids)
    model = PagedModel(tmp_path, max_model_len=80)
    torch.testing.assert_close(model.logits(ids), expected, atol=1e-4, rtol=0)
    chunked = model.logits(ids, chunk=13, sequence=1)
    torch.testing.assert_close(chunked, expected, atol=1e-4, rtol=0)
    unscaled = PagedModel(tmp_path, max_model_len=32).logits(ids[:32])
    assert (unscaled - expected[:32]).abs().max() > 0.1


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2", "Llama4"])
def test_a_sharded_checkpoint_is_the_same_model(family: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "one", family, **(LLAMA4 if family == "Llama4" else {}))
    reference.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    ids = tokens(PROMPT)
    one = PagedModel(tmp_path / "one").logits(ids)
    many = PagedModel(tmp_path / "many").logits(ids)
    assert torch.equal(one, many)


@pytest.mark.parametrize("kernels", KERNELS)
def test_learned_sinks(kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a Llama that has the attention of gpt-oss."""
    attention = partial(GroupedQueryAttention, sinks=True)
    make = partial(Decoder, make_layer=partial(PreNormLayer, attention=attention))
    row = replace(LLAMA, name="SinkLlamaForCausalLM", make=make)
    monkeypatch.setitem(cast(dict, ARCHITECTURES), row.name, row)
    reference = save_tiny(tmp_path, "Llama", head_dim=16)
    stored = load_file(tmp_path / "model.safetensors")
    reference.set_attn_implementation("eager")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager_attention_forward)
    for i, layer in enumerate(reference.model.layers):
        sinks = torch.tensor([-1.0, 0.0, 0.5 * i, 2.0])
        layer.self_attn.sinks = sinks
        stored[f"model.layers.{i}.self_attn.sinks"] = sinks
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [row.name]}))
    ids = tokens(PROMPT)
    expected = reference_logits(reference, ids)
    model = paged_model(kernels, tmp_path)
    torch.testing.assert_close(model.logits(ids), expected, atol=1e-4, rtol=0)
    chunked = model.logits(ids, chunk=1, sequence=1)
    torch.testing.assert_close(chunked, expected, atol=1e-4, rtol=0)
    declared = read_model_spec(tmp_path).num_parameters
    assert declared == sum(x.numel() for x in reference.parameters()) + 3 * 4
