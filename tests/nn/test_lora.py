"""LoRA adapters that are merged at load, compared with models that store the merged weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import adapt_stacks, draw_pairs, write_adapter, write_merged
from helpers.gguf_models import save_gguf
from helpers.tiny_families import ALL
from helpers.tiny_models import greedy_and_scores, save_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik import LLM
from kvik.build import build_engine
from kvik.config.config import EngineConfig
from kvik.errors import KvikError
from kvik.export import TYPES, plan_export
from kvik.model_files import model_files
from kvik.nn.checkpoint import SINGLE

RANK, ALPHA = 4, 6.0
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "head_dim": 64,
}
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@dataclass(frozen=True)
class Adapted:
    """A model, an adapter of it, and the folder of the merged model."""

    model: Path
    adapter: Path
    merged: Path


def adapted(
    folder: Path,
    scales: Mapping[str, float],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Adapted:
    """Write a model, an adapter, and the merged model.

    Args:
        scales: of the product that is added to each module's weight.
    """
    result = Adapted(*(folder / name for name in ("model", f"adapter-{seed}", f"merged-{seed}")))
    save_tiny(result.model, "Llama", **SIZES)
    draw = torch.Generator().manual_seed(seed)
    weights, matrices = load_file(result.model / SINGLE), dict[str, Tensor]()
    weights = {name: values.to(dtype) for name, values in weights.items()}
    save_file(weights, result.model / SINGLE)
    for module, scale in scales.items():
        weight = weights[f"{module}.weight"]
        a = torch.randn(RANK, weight.shape[1], generator=draw)
        b = torch.randn(weight.shape[0], RANK, generator=draw) / 30
        matrices |= {
            f"base_model.model.{module}.lora_{k}.weight": m for k, m in (("A", a), ("B", b))
        }
        weights[f"{module}.weight"] = (weight.float() + (b * scale) @ a).to(dtype)
    for path in (result.adapter, result.merged):
        path.mkdir()
    save_file(matrices, result.adapter / "adapter_model.safetensors")
    (result.adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **config})
    )
    save_file(weights, result.merged / SINGLE)
    (result.merged / "config.json").write_text((result.model / "config.json").read_text())
    return result


CASES: dict[str, tuple[Mapping[str, float], dict[str, Any]]] = {
    "alpha over rank": ({Q: ALPHA / RANK, DOWN: ALPHA / RANK}, {}),
    "over its root": ({Q: ALPHA / 2, DOWN: ALPHA / 2}, {"use_rslora": True}),
    "alphas by pattern": (
        {Q: 2.0, DOWN: 3.0},
        {"alpha_pattern": {"q_proj": 8, r"layers\.\d+\.mlp\.down_proj": 12, "mlp.*": 1}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_answers_are_those_of_the_merged_model(case: str, tmp_path: Path) -> None:
    scales, config = CASES[case]
    it = adapted(tmp_path, scales, **config)
    expected, scores = greedy_and_scores(it.merged, dtype="float32")
    plain, _ = greedy_and_scores(it.model, dtype="float32")
    found, found_scores = greedy_and_scores(it.model, dtype="float32", lora=str(it.adapter))
    assert found == expected != plain
    assert torch.allclose(found_scores, scores, atol=1e-4)


# Experts in tensors of their own and stacked, gate and up in one row or by turns, stored
# transposed, without a gate, with other names of the router; square matrices.
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *((family, {}) for family in ("Mixtral", "Olmoe", "GptOss", "NemotronH-experts")),
        *((family, {"intermediate_size": 32}) for family in ("Olmoe", "GraniteMoe")),
        ("Llama4", {"intermediate_size": 48}),
        ("GptOss", {"intermediate_size": 64}),
    ],
)
def test_stacked_experts_and_routers(
    family: str, sizes: dict[str, Any], older: bool, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    save_tiny(model, family.partition("-")[0], **{**ALL[family], **sizes})
    adapter, merged = adapt_stacks(model, tmp_path, "adapter", older=older)
    expected, scores = greedy_and_scores(merged, dtype="float32")
    _, plain = greedy_and_scores(model, dtype="float32")
    found, found_scores = greedy_and_scores(model, dtype="float32", lora=str(adapter))
    assert found == expected and torch.allclose(found_scores, scores, atol=1e-4)
    assert not torch.allclose(plain, scores, atol=0.1)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_experts_as_layers(family: str, tmp_path: Path) -> None:
    """An adapter may have a pair for each matrix of an expert, by the checkpoint's names."""
    model = tmp_path / "model"
    save_tiny(model, family, **ALL[family])
    linears = model_files(model).spec().declaration.of_block(1)
    layers = {
        name: (linear.inputs, outputs)
        for linear in linears
        for name, outputs in zip(linear.names, linear.outputs, strict=True)
        if linear.router is not None or linear.role == "router"
    }
    pairs = draw_pairs(layers, size=1.0)
    adapter = write_adapter(tmp_path / "adapter", pairs)
    merged = write_merged(model, tmp_path / "merged", pairs)
    expected, scores = greedy_and_scores(merged, dtype="float32")
    _, plain = greedy_and_scores(model, dtype="float32")
    found, found_scores = greedy_and_scores(model, dtype="float32", lora=str(adapter))
    assert found == expected and torch.allclose(found_scores, scores, atol=1e-4)
    assert not torch.allclose(plain, scores, atol=0.1)


def test_stacks_that_cannot_be_merged_are_one_error(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny(model, "GptOss", **ALL["GptOss"])
    adapter, _ = adapt_stacks(model, tmp_path, "adapter")
    path, weights = adapter / "adapter_model.safetensors", load_file(model / SINGLE)
    name = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    matrices = load_file(path)
    save_file({**matrices, name: matrices[name][:, 1:].contiguous()}, path)
    options = {"device": "cpu", "threads": 1, "lora": str(adapter)}
    with pytest.raises(KvikError, match=r"mlp\.experts' by matrices \[24, 95\] and \[64, 24\]"):
        LLM(str(model), **options)
    save_file(matrices, path)
    for layer in (0, 1, 2):
        name = f"model.layers.{layer}.mlp.experts.down_proj"
        count, inputs, outputs = weights.pop(name).shape
        sizes = count, outputs, inputs // 32
        weights[f"{name}_blocks"] = torch.zeros(*sizes, 16, dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.zeros(sizes, dtype=torch.uint8)
    save_file(weights, model / SINGLE)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(KvikError, match=r"down_proj\.weight', which is stored quantised"):
        LLM(str(model), **options)


def test_whole_tensors_and_products_of_embeddings(tmp_path: Path) -> None:
    """An embedding may have both: its own values, and a product to add."""
    it = adapted(tmp_path, {Q: 1.5}, modules_to_save=["lm_head"])
    weights = load_file(it.merged / SINGLE)
    head, embedding = weights["lm_head.weight"] * 0.9, weights["model.embed_tokens.weight"] * 1.1
    a, b = torch.randn(RANK, len(embedding)) / 30, torch.randn(embedding.shape[1], RANK)
    path, prefix = it.adapter / "adapter_model.safetensors", "base_model.model"
    more = {
        "lm_head.weight": head,
        "model.embed_tokens.base_layer.weight": embedding,
        "model.embed_tokens.lora_embedding_A": a,
        "model.embed_tokens.lora_embedding_B": b,
    }
    named = {f"{prefix}.{name}": values.contiguous() for name, values in more.items()}
    save_file({**load_file(path), **named}, path)
    weights |= {
        "lm_head.weight": head,
        "model.embed_tokens.weight": embedding + (b @ a).t() * ALPHA / RANK,
    }
    save_file({name: values.contiguous() for name, values in weights.items()}, it.merged / SINGLE)
    expected, scores = greedy_and_scores(it.merged, dtype="float32")
    found, found_scores = greedy_and_scores(it.model, dtype="float32", lora=str(it.adapter))
    assert found == expected and torch.allclose(found_scores, scores, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"quantization": "int4", "kernels": "torch"},
        {"tensor_parallel_size": 2, "threads": 2},
        {"pipeline_parallel_size": 2, "threads": 2},
        {"spec_method": "draft_model", "spec_model": "{model}"},
    ],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values()))),
)
def test_with_every_way_to_load(options: dict[str, Any], tmp_path: Path) -> None:
    """Weights in bfloat16 are rounded once, so that they have the bits of the merged ones."""
    it = adapted(tmp_path, {Q: 1.5, DOWN: 1.5}, dtype=torch.bfloat16)
    options = {
        key: value.format(model=it.model) if isinstance(value, str) else value
        for key, value in options.items()
    }
    expected, scores = greedy_and_scores(it.merged, **options)
    found, found_scores = greedy_and_scores(it.model, lora=str(it.adapter), **options)
    assert found == expected and torch.equal(found_scores, scores)


def test_each_adapter_has_its_own_entry_in_the_engine_cache(tmp_path: Path) -> None:
    answers = []
    for seed in (0, 1, 0):
        if not (tmp_path / str(seed)).exists():
            adapted(tmp_path / str(seed), {Q: 1.5, DOWN: 1.5}, seed)
        options = {"engine_cache": str(tmp_path / "cache"), "dtype": "float32"}
        model, adapter = tmp_path / "0" / "model", tmp_path / str(seed) / f"adapter-{seed}"
        answers.append(greedy_and_scores(model, lora=str(adapter), **options))
    assert torch.equal(answers[0][1], answers[2][1])
    assert not torch.equal(answers[0][1], answers[1][1])
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


@pytest.mark.full
def test_engine_folders_and_gguf_files_of_floats(tmp_path: Path) -> None:
    it = adapted(tmp_path, {Q: 1.5, DOWN: 1.5})
    expected, scores = greedy_and_scores(it.merged, dtype="float32")
    config = EngineConfig(
        model=str(it.model), lora=str(it.adapter), device="cpu", threads=1, dtype="float32"
    )
    build_engine(config, tmp_path / "engine", lambda *sizes: None)
    assert greedy_and_scores(tmp_path / "engine")[0] == expected
    save_gguf(it.model, tmp_path / "m.gguf", tmp_path / "twin", lambda name: "F32")
    options = {"dtype": "float32", "lora": str(it.adapter)}
    expected, scores = greedy_and_scores(tmp_path / "twin", **options)
    found, found_scores = greedy_and_scores(tmp_path / "m.gguf", **options)
    assert found == expected and torch.equal(found_scores, scores)
    save_gguf(it.model, tmp_path / "q.gguf", tmp_path / "twin-q", lambda name: "Q8_0")
    exported = tmp_path / "exported.gguf"
    plan_export(tmp_path / "twin", TYPES["f32"], it.adapter).write(exported, lambda size: None)
    found, found_scores = greedy_and_scores(exported, dtype="float32")
    assert found == expected and torch.equal(found_scores, scores)
    with pytest.raises(KvikError, match="q_proj.weight', which is stored quantised"):
        LLM(str(tmp_path / "q.gguf"), lora=str(it.adapter), device="cpu")
    with pytest.raises(KvikError, match="lora: must be left out: an engine folder"):
        LLM(str(tmp_path / "engine"), lora=str(it.adapter), device="cpu")


@pytest.mark.parametrize(
    "verb",
    ["generate", "chat", "serve", "build", "eval", "info", "export", "train_heads", "kv_budget"],
)
def test_commands_that_load_a_model_take_an_adapter(verb: str) -> None:
    assert "--lora DIR" in import_module(f"kvik.cli.{verb}").build_parser().format_help()


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def with_tensors(**changes: Tensor | None) -> Callable[[Path], None]:
    """Replace, add or (None) remove matrices: MODULE__A with `_` for a dot."""

    def change(adapter: Path) -> None:
        path = adapter / "adapter_model.safetensors"
        tensors: dict[str, Any] = load_file(path)
        for name, value in changes.items():
            tensors[f"base_model.model.{name.replace('__', '.')}.weight"] = value
        save_file({n: t for n, t in tensors.items() if t is not None}, path)

    return change


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda a: a.rename(a.with_name("x")), "lora: there is no folder"),
    "no config": (lambda a: (a / "adapter_config.json").unlink(), "adapter_config.json"),
    "no weights": (
        lambda a: (a / "adapter_model.safetensors").unlink(),
        "lora: must hold adapter_m",
    ),
    "not LoRA": (with_config(peft_type="IA3"), "peft_type: must be 'LORA', not 'IA3'"),
    "DoRA": (with_config(use_dora=True), "use_dora: is not supported: must be left out, not True"),
    "PiSSA": (with_config(init_lora_weights="pissa"), "init_lora_weights: is not supported"),
    "transposed": (with_config(fan_in_fan_out=True), "fan_in_fan_out: cannot be merged"),
    "alpha": (with_config(lora_alpha="x"), "lora_alpha: must be a number"),
    "pattern": (with_config(alpha_pattern={"(": 1}), r"alpha_pattern \(: is not a regular expr"),
    "unknown module": (
        with_tensors(
            model__layers__9__x__lora_A=torch.ones(4, 8),
            model__layers__9__x__lora_B=torch.ones(8, 4),
        ),
        "adapts 'model.layers.9.x.weight', which the model does not have",
    ),
    "one matrix": (
        with_tensors(model__layers__0__self_attn__q_proj__lora_B=None),
        "must have both matrices of 'model.layers.0.self_attn.q_proj'",
    ),
    "another shape": (
        with_tensors(model__layers__0__self_attn__q_proj__lora_A=torch.ones(4, 8)),
        r"q_proj.weight' of shape \[256, 8\], the model's is \[256, 256\]",
    ),
    "a vocabulary of another size": (
        with_tensors(lm_head=torch.ones(4, 256)),
        r"'lm_head.weight' of shape \[4, 256\], the model's is \[",
    ),
    "other tensors": (
        with_tensors(model__layers__0__mlp__up_proj__lora_A=torch.ones(4)),
        "lora_A.weight' is none of LoRA's tensors",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_cannot_be_merged_is_one_error(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    it = adapted(tmp_path, {Q: 1.0})
    change(it.adapter)
    with pytest.raises(KvikError, match=message):
        LLM(str(it.model), lora=str(it.adapter), device="cpu", threads=1)
