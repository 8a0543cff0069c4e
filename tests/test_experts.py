"""Models with routed experts, run by the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.calibrated import quiet, random_windows
from helpers.optional_native import NATIVE
from helpers.tiny_models import LLAMA4, reference_logits, save_tiny, tokens
from safetensors.torch import load_file, save_file
from transformers.integrations import mxfp4

from kvik import LLM
from kvik.errors import ModelError
from kvik.nn.checkpoint import SINGLE
from kvik.quantize.recipe import Recipe
from kvik.quantize.save import Output, quantise_folder
from kvik.quantize.source import open_source

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
ENGINE: dict[str, Any] = {"device": "cpu", "threads": 2, "num_blocks": 32, "dtype": "float32"}
KERNELS = ["torch", *(["native"] if NATIVE else [])]


def scores(folder: Path, **options: Any) -> torch.Tensor:
    """Return the log probability of each token of a text."""
    with LLM(str(folder), **ENGINE, **options) as llm:
        (scored,) = llm.score([tokens(60)])
    return torch.tensor([entry.logprob for entry in scored.prompt_logprobs[1:] if entry])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    save_tiny(folder, "Qwen3Moe", **SIZES)
    return folder


@pytest.mark.parametrize("skip", [(), ("*.experts.*",)], ids=["all", "skipped"])
def test_experts_of_llama_4_are_quantised(tmp_path: Path, skip: tuple[str, ...]) -> None:
    """Floats are transposed, with gate and up in one tensor, and may stay unquantised."""
    sizes = {**LLAMA4, "hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 64}
    plain, folder = tmp_path / "plain", tmp_path / "q"
    save_tiny(plain, "Llama4", **sizes, interleave_moe_layer_step=2)
    source, recipe = open_source(plain), Recipe("gptq", 8, 32, skip=skip)
    quantise_folder(source, recipe, random_windows(16, 32), Output(folder, source), quiet)
    off = (scores(folder) - scores(plain)).abs().mean()
    assert 0.0 < float(off) < 0.3


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_experts_are_quantised_while_loading(plain: Path, quantization: str) -> None:
    found = [scores(plain, kernels=kernels, quantization=quantization) for kernels in KERNELS]
    off = (found[0] - scores(plain)).abs().mean()
    assert 0.0 < float(off) < (0.2 if quantization == "int8" else 0.9)
    for other in found[1:]:
        assert (other - found[0]).abs().mean() < (0.1 if quantization == "int8" else 0.3)


def test_experts_in_one_tensor(plain: Path, tmp_path: Path) -> None:
    tensors = load_file(plain / SINGLE)
    for layer in (0, 2):
        scope = f"model.layers.{layer}.mlp.experts"
        own = {
            name: [tensors.pop(f"{scope}.{e}.{name}.weight") for e in range(6)]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        pairs = zip(own["gate_proj"], own["up_proj"], strict=True)
        tensors[f"{scope}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{scope}.down_proj"] = torch.stack(own["down_proj"])
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    assert torch.equal(scores(tmp_path), scores(plain))


def test_experts_that_are_missing_or_too_many(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    tensors = load_file(plain / SINGLE)
    fewer = {name: t for name, t in tensors.items() if ".experts.5." not in name}
    save_file(fewer, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 'model\.layers\.0.*' and 3 more"):
        scores(tmp_path)
    more = {
        f"model.layers.0.mlp.experts.6.{x}_proj.weight": tensors["lm_head.weight"] + 0.0
        for x in ("gate", "up", "down")
    }
    save_file({**tensors, **more}, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"hold 'model\.layers\.0\.mlp\.experts\.6.*unknown"):
        scores(tmp_path)


def test_experts_of_gpt_oss_are_read_from_mxfp4(tmp_path: Path) -> None:
    """Compares with transformers on the dequantised blocks."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "sliding_window": 9}
    model = save_tiny(tmp_path, "GptOss", **sizes, num_local_experts=4, num_experts_per_tok=2)
    tensors, generator = load_file(tmp_path / SINGLE), torch.Generator().manual_seed(0)
    state = model.state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        size = (count, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 125, size[:3], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name].copy_(mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = tokens(60)
    logprobs = reference_logits(model, ids).log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(scores(tmp_path, kernels="torch"), expected, atol=1e-3, rtol=0)
    for kernels in KERNELS[1:]:  # these round activations to eight bits
        assert 0.0 < float((scores(tmp_path, kernels=kernels) - expected).abs().mean()) < 0.2
