"""Models from GGUF files, compared with the checkpoints they were made from."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from helpers.gguf_files import dequantize, llama_file
from helpers.model_cases import H1_FACTORS
from helpers.optional_native import needs_native
from helpers.paged_model import PagedModel
from helpers.tiny_families import ALL, EXPERTS, FAMILIES, GEMMA4, SEPARATE
from helpers.tiny_models import (
    IMAGE_PREFIXES,
    greedy_and_scores,
    save_tiny,
    save_tiny_with_images,
    tokens,
)
from safetensors.torch import load_file, save_file

from kvik.errors import ModelError
from kvik.export import plan_export
from kvik.gguf.export import model_metadata, token_id_metadata
from kvik.gguf.facts import SCHEMES, gguf_model_spec, stored_quantization
from kvik.gguf.reader import OutTensor, read_gguf, write_gguf
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.weights import Matrix, MatrixSpec
from kvik.models.model_spec import read_model_spec
from kvik.nn import gguf_checkpoint as module
from kvik.nn import gguf_export
from kvik.nn.checkpoint import IN_RUNS, WHOLE, Selection, open_checkpoint
from kvik.nn.gguf_checkpoint import open_gguf
from kvik.nn.gguf_export import gguf_numbers, gguf_tensors, quantize

CONVOLUTIONS = ("conv.conv.weight", "conv1d.weight")


def type_of(name: str, type: str, family: str) -> str:
    """Return the type of a matrix in a file, by its name in a checkpoint."""
    exact = (".gate.weight", "router.weight", "router.layer.weight", "wpe.weight", "norm.weight")
    exact += ("gate.wg.weight", "router.proj.weight", "shared_expert_gate.weight", *CONVOLUTIONS)
    if name.endswith(exact):
        return "F32"
    if name.endswith("per_layer_model_projection.weight") and type in SCHEMES:
        return "BF16"
    eight = family == "Mixtral" and name.endswith(("k_proj.weight", "v_proj.weight"))
    finer = eight or "embed" in name or name.endswith(("lm_head.weight", "wte.weight"))
    return "Q8_0" if type == "Q4_0" and finer else type


Tensors = Iterable[OutTensor]


def export(
    folder: Path, type: str, change: Callable[[Tensors], Tensors] = list, **more: Any
) -> Path:
    """Write a file, with `more` metadata and perhaps other tensors."""
    spec, path = read_model_spec(folder), folder / "m.gguf"
    metadata = {**model_metadata(spec, "tiny", type), **token_id_metadata(spec), **more}
    checkpoint = open_checkpoint(folder)
    metadata = {**gguf_numbers(checkpoint, spec), **metadata}
    write_gguf(path, metadata, list(change(gguf_tensors(checkpoint, spec, type))))
    return path


def holding(one: OutTensor, values: torch.Tensor, name: str = "") -> OutTensor:
    data = values.numpy().tobytes()
    return OutTensor(name or one.name, one.type, tuple(values.shape), lambda: [data])


def logits(path: Path) -> torch.Tensor:
    return PagedModel(path).step({0: tokens(20)})[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("type", ["F32", "BF16", "F16", "Q8_0"])
def test_the_same_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, type: str
) -> None:
    """Rows of queries and keys are in the checkpoint's order, also in blocks."""
    monkeypatch.setattr(module, "RUN_BYTES", 1 << 12)  # matrices are read in runs
    save_tiny(tmp_path, family, **FAMILIES[family])
    weights = load_file(tmp_path / "model.safetensors")
    weights = {n: t for n, t in weights.items() if n in open_checkpoint(tmp_path).entries}
    stored = {
        name: quantize(type, tensor).view(len(tensor), -1)
        for name, tensor in weights.items()
        if tensor.dim() == 2
    }
    checkpoint = open_gguf(export(tmp_path, type))
    entries = checkpoint.entries
    assert set(entries) == set(weights)
    for in_runs in (True, False):
        found: dict[str, list[torch.Tensor]] = {}
        for run in checkpoint.runs(dict.fromkeys(weights, IN_RUNS if in_runs else WHOLE)):
            rows = found.setdefault(run.name, [])
            assert run.first == sum(len(before) for before in rows)
            rows.append(run.values.clone())
        for name, rows in found.items():
            values, entry = torch.cat(rows), entries[name]
            assert (tuple(values.shape), values.nbytes) == (entry.shape, entry.size)
            if name not in stored:
                assert torch.equal(values, weights[name])
            else:
                assert torch.equal(values.view(torch.uint8).view(len(values), -1), stored[name])
        most = max(len(rows) for rows in found.values())
        assert most >= 2 if in_runs else most == 1
    assert list(checkpoint.runs({})) == []
    for name, blocks in stored.items():
        some = Selection(True, 0, ((3, 17), (30, min(61, len(weights[name])))))
        taken = []
        for run in checkpoint.runs({name: some}):
            taken.append(run.values.view(torch.uint8).view(len(run.values), -1).clone())
            assert torch.equal(taken[-1], blocks[run.first : run.first + len(taken[-1])])
        assert torch.equal(torch.cat(taken), some.of(blocks))


def multiplied_out(folder: Path, type: str, family: str) -> Path:
    """Return the dequantised checkpoint of the file that `export` makes."""
    spec, twin = read_model_spec(folder), folder / "twin"
    twin.mkdir(exist_ok=True)
    (twin / "config.json").write_text((folder / "config.json").read_text())
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = type_of(name, type, family)
        round = partial(rounded, own)
        if "kv_b_proj" in name:  # in files, the keys of a head are transposed
            heads = tensor.view(4, -1, 64)
            tensors[name] = torch.cat((round(heads[:, :32].mT).mT, round(heads[:, 32:])), 1)
            tensors[name] = tensors[name].flatten(0, 1)
        elif own == "F32" or tensor.dim() < 2 or name.endswith("_bias"):
            tensors[name] = tensor
        else:
            turned = (family == "GPT2" and ".h." in name) or (
                family in ("GptOss", "Llama4") and ".experts." in name
            )
            tensors[name] = round(tensor.mT).mT.contiguous() if turned else round(tensor)
    if spec.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, twin / "model.safetensors")
    return twin


def rounded(type: str, matrices: torch.Tensor) -> torch.Tensor:
    """Round [..., rows, inputs] to the blocks of a type."""
    rows = matrices.flatten(0, -2).contiguous()
    return dequantize(type, quantize(type, rows)).view(matrices.shape)


@pytest.mark.parametrize(
    ("family", "type"),
    [("Llama", "F32"), ("Llama", "Q8_0")]
    # In the fast tier a third of the families, all of which have their names and tensors compared.
    + [(family, "Q4_0") for family in [*ALL][::3]]
    + [
        pytest.param(family, type, marks=pytest.mark.full)
        for number, family in enumerate(ALL)
        for type in ("Q4_0", "F32")
        if type == "F32" or number % 3
    ],
)
def test_the_same_model(tmp_path: Path, family: str, type: str) -> None:
    options = ALL[family]
    family = family.partition("-")[0]
    save_tiny(tmp_path, family, **options)
    expected = logits(multiplied_out(tmp_path, type, family))
    assert torch.equal(logits(export(tmp_path, type)), expected)


def test_numbers_of_blocks_in_metadata(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Apertus", **ALL["Apertus"])
    with pytest.raises(ModelError, match=r"xielu\.alpha_p"):
        open_gguf(export(tmp_path, "F32", **{"xielu.alpha_p": [0.5]}))


def test_factors_of_a_model_are_in_the_weights_of_its_file(tmp_path: Path) -> None:
    save_tiny(tmp_path, "FalconH1", **ALL["FalconH1"], **H1_FACTORS)
    expected = logits(tmp_path)
    assert read_model_spec(tmp_path).scales.gate != 1.0
    file = export(tmp_path, "F32")
    assert gguf_model_spec(read_gguf(file)).scales.gate == 1.0
    torch.testing.assert_close(logits(file), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_parts_of_one_tensor(tmp_path: Path, family: str) -> None:
    """Each has the bytes of its own weights, in the order of their numbers."""
    save_tiny(tmp_path, family, **EXPERTS[family])
    weights = load_file(tmp_path / "model.safetensors")
    wanted = [name for name in weights if ".experts." in name]
    path = export(tmp_path, "Q4_0")
    options = EXPERTS[family]
    layers, dense = options.get("num_hidden_layers", 3), options.get("first_k_dense_replace", 0)
    stacked = [one for one in GGUFReader(path).tensors if one.name.endswith("_exps.weight")]
    assert len(stacked) == 3 * (layers - dense) and all(len(one.shape) == 3 for one in stacked)
    checkpoint, stored = open_gguf(path), stored_quantization(read_gguf(path))
    assert set(wanted) <= set(checkpoint.entries) and stored is not None
    found = {run.name: run.values.clone() for run in checkpoint.runs(dict.fromkeys(wanted, WHOLE))}
    for name in wanted:
        assert torch.equal(found[name], quantize("Q4_0", weights[name])), name
        assert stored.scheme(name.removesuffix(".weight")) == SCHEMES["Q4_0"]


def test_gate_and_up_of_experts_in_one_tensor(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Gemma4", **GEMMA4["Gemma4-experts"])
    weights = load_file(tmp_path / "model.safetensors")

    def joined(tensors: Tensors, rows: int = 64) -> Iterator[OutTensor]:
        for one in tensors:
            block, last, *_ = one.name.removeprefix("blk.").split(".")
            if last == "ffn_gate_exps":
                whole = weights[f"model.layers.{block}.experts.gate_up_proj"][:, :rows]
                yield holding(one, whole.contiguous(), f"blk.{block}.ffn_gate_up_exps.weight")
            elif last != "ffn_up_exps":
                yield one

    assert torch.equal(logits(export(tmp_path, "F32", joined)), logits(tmp_path))
    odd = export(tmp_path, "F32", partial(joined, rows=63))
    with pytest.raises(ModelError, match="an even number of rows, for gate and up, not 63"):
        PagedModel(odd)


Parts = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
# The tensors of a file, by the name of the layer that they become.
PARTS: dict[str, tuple[str, Parts]] = {
    "DeepseekV3": (
        "model.layers.1.self_attn.kv_b_proj.weight",
        {
            "self_attn.k_b_proj": lambda whole: whole.view(4, 64, 64)[:, :32].mT.flatten(0, 1),
            "self_attn.v_b_proj": lambda whole: whole.view(4, 64, 64)[:, 32:].flatten(0, 1),
        },
    ),
    "GptOss": (
        "model.layers.1.mlp.experts.gate_up_proj",
        {
            "mlp.experts.2.gate_proj": lambda whole: whole[2].t()[::2],
            "mlp.experts.2.up_proj": lambda whole: whole[2].t()[1::2],
        },
    ),
    "GraniteMoe": (
        "model.layers.1.block_sparse_moe.input_linear.weight",
        {
            "block_sparse_moe.experts.2.gate_proj": lambda whole: whole[2][:96],
            "block_sparse_moe.experts.2.up_proj": lambda whole: whole[2][96:],
        },
    ),
    "Qwen3Next": (
        "model.layers.1.linear_attn.in_proj_qkvz.weight",
        {
            # of each of two key heads: q, k, three values and their gates
            "linear_attn.in_proj_qkv": lambda whole: torch.cat(
                [
                    whole.view(2, 208, 64)[:, a:b].flatten(0, 1)
                    for a, b in ((0, 8), (8, 16), (16, 112))
                ]
            ),
            "linear_attn.in_proj_z": lambda whole: whole.view(2, 208, 64)[:, 112:].flatten(0, 1),
        },
    ),
    "Qwen3_5": (
        "model.layers.1.linear_attn.out_proj.weight",
        {"linear_attn.out_proj": lambda whole: whole.view(64, 2, 3, 32).transpose(1, 2).flatten(1)},
    ),
    "GPT2": (
        "transformer.h.1.mlp.c_fc.weight",
        {"mlp.c_fc": lambda whole: whole.t()},
    ),
}


@pytest.mark.parametrize("family", PARTS)
@pytest.mark.parametrize("type", ["F32", "Q4_0"])
def test_parts_of_layers(tmp_path: Path, family: str, type: str) -> None:
    """They have the bytes of their own weights."""
    save_tiny(tmp_path, family, **SEPARATE[family])
    name, parts = PARTS[family]
    whole = load_file(tmp_path / "model.safetensors")[name]
    checkpoint = open_gguf(export(tmp_path, type))
    for layer, part in parts.items():
        block = re.match(r".+?\.\d+\.", name)
        full = f"{block[0]}{layer}.weight"
        (run,) = checkpoint.runs({full: WHOLE})
        expected = quantize(type, part(whole).contiguous())
        assert torch.equal(run.values.view(torch.uint8).view(expected.shape), expected)


def test_value_heads_are_reordered_by_key_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have the first value head of each key head, then the second. Also in runs of no more
    rows than for other layers."""
    save_tiny(tmp_path, "Qwen3_5", **SEPARATE["Qwen3_5"])
    weights, path = load_file(tmp_path / "model.safetensors"), export(tmp_path, "F32")
    scope = "model.layers.1.linear_attn."
    stored = {one.name: torch.tensor(one.data) for one in GGUFReader(path).tensors}
    turns = [0, 3, 1, 4, 2, 5]
    rates = -weights[f"{scope}A_log"].exp()[turns]
    torch.testing.assert_close(stored["blk.1.ssm_a"], rates)
    assert torch.equal(stored["blk.1.ssm_beta.weight"], weights[f"{scope}in_proj_b.weight"][turns])
    channels = weights[f"{scope}conv1d.weight"].squeeze(1)
    values = channels[32:].view(6, 32, -1)[turns].flatten(0, 1)
    assert torch.equal(stored["blk.1.ssm_conv1d.weight"], torch.cat((channels[:32], values)))
    checkpoint = open_gguf(path)
    for name in ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_a.weight", "dt_bias"):
        (run,) = checkpoint.runs({scope + name: WHOLE})
        assert torch.equal(run.values, weights[scope + name]), name
    full, most = f"{scope}in_proj_qkv.weight", 1 << 13
    monkeypatch.setattr(module, "RUN_BYTES", most)
    runs = [(r.first, r.values.clone()) for r in checkpoint.runs({full: IN_RUNS})]
    assert len(runs) > 1 and max(values.nbytes for _, values in runs) <= most
    assert torch.equal(torch.cat([values for _, values in runs]), weights[full])
    assert [first for first, _ in runs] == [i * len(runs[0][1]) for i in range(len(runs))]
    for name in ("A_log", "conv1d.weight"):
        (run,) = checkpoint.runs({scope + name: WHOLE})
        torch.testing.assert_close(run.values, weights[scope + name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3Next"])
def test_parts_of_two_types(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of delta nets and their gates stay blocks, as planned."""
    save_tiny(tmp_path, family, **SEPARATE[family])
    usual = gguf_export.block_type
    monkeypatch.setattr(
        gguf_export,
        "block_type",
        lambda type, name, *rest: "Q4_0" if "attn_gate" in name else usual(type, name, *rest),
    )
    path, made = export(tmp_path, "Q8_0"), list[Matrix]()

    def matrix(spec: MatrixSpec) -> Matrix:
        made.append(REFERENCE.matrix(spec))
        return made[-1]

    PagedModel(path, ops=replace(REFERENCE, matrix=matrix), dtype=torch.bfloat16)
    kinds = [one.spec.kind.codes for one in made if one.spec.outputs in (128, 192)]
    assert {"int8", "int4"} <= set(kinds)


def test_old_files_of_qwen3_next(tmp_path: Path) -> None:
    """Inputs of delta nets are stored as in checkpoints."""
    save_tiny(tmp_path, "Qwen3Next", **SEPARATE["Qwen3Next"])
    weights = load_file(tmp_path / "model.safetensors")

    def joined(tensors: Tensors) -> Iterator[OutTensor]:
        for one in tensors:
            block, last, *_ = one.name.removeprefix("blk.").split(".")
            whole = weights.get(f"model.layers.{block}.linear_attn.in_proj_qkvz.weight")
            if whole is None or last not in ("attn_qkv", "attn_gate"):
                yield one
            elif last == "attn_qkv":
                yield holding(one, whole, f"blk.{block}.ssm_in.weight")

    torch.testing.assert_close(logits(export(tmp_path, "F32", joined)), logits(tmp_path))


def test_states_that_would_grow(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Qwen3_5", **SEPARATE["Qwen3_5"])

    def grown(tensors: Tensors) -> Iterator[OutTensor]:
        for one in tensors:
            yield holding(one, torch.zeros(one.shape)) if one.name.endswith("ssm_a") else one

    path = export(tmp_path, "F32", grown)
    with pytest.raises(ModelError, match="must hold negative numbers in ssm_a"):
        PagedModel(path)


def test_blocks_of_gpt_oss_keep_their_bits(tmp_path: Path) -> None:
    """Experts in four bits are exported unchanged, for any type of the rest."""
    save_tiny(tmp_path, "GptOss", **SEPARATE["GptOss"])
    weights = load_file(tmp_path / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        size = (experts, outputs, inputs // 32, 16)
        weights[f"{name}_blocks"] = torch.randint(0, 256, size, generator=draw, dtype=torch.uint8)
        scales = torch.randint(118, 124, size[:3], generator=draw)
        weights[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "m.gguf"
    plan_export(tmp_path, "F32").write(path, lambda count: None)
    kinds = {one.name: one.tensor_type.name for one in GGUFReader(path).tensors}
    assert {kind for name, kind in kinds.items() if name.endswith("_exps.weight")} == {"MXFP4"}
    assert torch.equal(logits(path), logits(tmp_path))


@pytest.mark.parametrize(
    ("family", "prefix"),
    [*(("Ministral3", prefix) for prefix in IMAGE_PREFIXES), ("Qwen3_5", IMAGE_PREFIXES[0])],
)
def test_text_models_of_models_with_images(tmp_path: Path, family: str, prefix: str) -> None:
    save_tiny_with_images(tmp_path, prefix, family)
    path = tmp_path / "m.gguf"
    plan_export(tmp_path, "F32").write(path, lambda count: None)
    torch.testing.assert_close(logits(path), logits(tmp_path))


# Mean error of a log probability; the native kernels round activations. Measured: 0 and 0.027.
@pytest.mark.parametrize(
    ("kernels", "off"), [("torch", 1e-5), pytest.param("native", 0.05, marks=needs_native)]
)
def test_experts_in_the_engine(kernels: str, off: float, tmp_path: Path) -> None:
    # A token has all experts, because rounding would change their choice.
    every = {"num_experts_per_tok": 12, "topk_group": 4}
    save_tiny(tmp_path, "Glm4Moe", **{**EXPERTS["Glm4Moe"], **every})
    twin, path = multiplied_out(tmp_path, "Q4_0", "Glm4Moe"), export(tmp_path, "Q4_0")
    expected, scores = greedy_and_scores(twin, kernels="torch", dtype="float32")
    found, found_scores = greedy_and_scores(path, kernels=kernels, dtype="float32")
    assert kernels == "native" or found == expected
    assert float((found_scores - scores).abs().mean()) < off


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_count", 8, r"_exps.weight' must have a part for each of 8 experts, not \[12"),
        ("expert_count", 0, r"qwen3moe.expert_count: must be at least 1"),
        ("expert_used_count", 13, r"qwen3moe num_experts_per_tok: must be an integer in \[1, 12\]"),
        ("expert_gating_func", 2, r"qwen3moe.expert_gating_func: must be 1 \(softmax\)"),
        ("leading_dense_block_count", 1, r"lack 'model.layers.0.mlp.gate_proj.weight'"),
    ],
)
def test_files_with_other_experts(tmp_path: Path, key: str, value: int, message: str) -> None:
    save_tiny(tmp_path, "Qwen3Moe", **EXPERTS["Qwen3Moe"])
    path = export(tmp_path, "F32", **{f"qwen3moe.{key}": value})
    with pytest.raises(ModelError, match=message):
        PagedModel(path)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Glm4Moe", **EXPERTS["Glm4Moe"])

    def further(tensors: Tensors) -> Iterator[OutTensor]:
        for one in tensors:
            yield one
            if one.name == "blk.2.attn_norm.weight":
                for name in ("attn_norm", "nextn.enorm"):
                    yield replace(one, name=f"blk.3.{name}.weight")

    more = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    assert torch.equal(logits(export(tmp_path, "F32", further, **more)), logits(tmp_path))


def test_unknown_names_are_left_for_the_loader(tmp_path: Path) -> None:
    tensors = {
        "blk.0.attn_qkv.weight": np.zeros((4, 4), np.float32),
        "rope_freqs.weight": np.frombuffer(struct.pack("<4f", 1, 1, 1, 1), np.float32),
    }
    checkpoint = open_gguf(llama_file(tmp_path / "m.gguf", tensors=tensors))
    assert set(checkpoint.entries) == {"model.embed_tokens.weight", "blk.0.attn_qkv.weight"}


def test_half_a_head(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_k.weight": np.zeros((12, 32), np.float32)}
    path = llama_file(tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(ModelError, match=r"attn_k.weight' must have whole heads, of 8 rows each"):
        open_gguf(path)


def test_a_file_that_was_truncated(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "m.gguf")
    checkpoint = open_gguf(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(ModelError, match="has become shorter"):
        list(checkpoint.runs({"model.embed_tokens.weight": IN_RUNS}))
