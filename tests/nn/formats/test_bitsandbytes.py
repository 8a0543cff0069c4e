"""Checkpoints of bitsandbytes, by an independent quantiser; nightly by the package itself, in
transformers: `pip install bitsandbytes accelerate` first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.adapters import draw_pairs, linear_layers, write_adapter
from helpers.paged_model import Packing, PagedModel
from helpers.stored_layers import bnb_config, read
from helpers.stored_models import rounded_bnb, save_quantised
from helpers.tiny_models import reference_logits, save_tiny, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik import LLM, SamplingParams
from kvik.kernels.torch_ops import TORCH
from kvik.model_files import model_files
from kvik.nn.checkpoint import SINGLE
from kvik.nn.formats.base import LinearShape
from kvik.nn.formats.bitsandbytes import Bnb4Bit
from kvik.nn.parts import rows_to_read
from kvik.planner.families import read_shape

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
FP4 = bnb_config(bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=False)


class Owner:
    """A process that owns some rows of a layer."""

    def __init__(self, *runs: tuple[int, int]) -> None:
        self.runs = runs

    def owned(self, first: int, count: int) -> list[tuple[int, int]]:
        return [*self.runs]

    def put(self, first: int, weight: object) -> None: ...


# [outputs, inputs], and numbers that share a scale: whole rows, parts of rows, and blocks that span
# rows, in which case weights become floats.
@pytest.mark.parametrize(
    ("outputs", "inputs", "block", "kind"),
    [
        (600, 128, 64, "nf4"),
        (600, 192, 128, "nf4"),
        (70, 64, 256, "nf4"),
        (600, 96, 64, "float32"),
        (531, 50, 128, "float32"),
    ],
)
@pytest.mark.parametrize("double", [False, True])
def test_any_rows_of_a_layer(
    outputs: int, inputs: int, block: int, kind: str, double: bool
) -> None:
    config = bnb_config(bnb_4bit_use_double_quant=double)
    w = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    w *= torch.arange(1, outputs + 1)[:, None] / 100
    tensors, expected = rounded_bnb(w, config, block)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    scheme = read(config).scheme("model.layers.0.mlp.down_proj")
    format = Bnb4Bit(scheme, LinearShape(inputs, outputs), shapes)
    stored = format.tensors(torch.bfloat16)
    assert {name: tensor.shape for name, tensor in stored.items()} == shapes
    for first, end in ((0, outputs), (3, 40), (outputs - 1, outputs)):
        weight = format.weight(tensors, slice(first, end))
        assert weight.kind.codes == kind
        torch.testing.assert_close(weight.dequantized(), expected[first:end], rtol=1e-6, atol=1e-7)
    # A process reads only the runs around its own rows.
    owner = Owner((5, 9), (outputs - 20, outputs - 7))
    runs = rows_to_read(owner, 0, outputs, stored.values())
    assert runs is not None
    part = {name: stored[name].selection(runs).of(tensor) for name, tensor in tensors.items()}
    begin = 0
    for first, end in runs:
        weight = format.weight(part, slice(begin, begin + end - first))
        torch.testing.assert_close(weight.dequantized(), expected[first:end], rtol=1e-6, atol=1e-7)
        begin += end - first


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("left", ["layers.1.block_sparse_moe.gate", "experts"])
def test_experts_and_routers(left: str, listed: bool, tmp_path: Path) -> None:
    """Versions of transformers before 5 quantise experts and routers, which stay floats in memory;
    later ones neither, without listing them. Plans count what is stored."""
    save_tiny(tmp_path / "plain", "Mixtral", **SIZES)
    config = bnb_config(llm_int8_skip_modules=["lm_head", left])
    save_quantised(tmp_path / "plain", tmp_path / "q", tmp_path / "twin", config)
    path = tmp_path / "q" / "config.json"
    if not listed:
        path.write_text(path.read_text().replace(f', "{left}"', ""))
    ids, packing = tokens(24), Packing()
    expected = PagedModel(tmp_path / "twin").logits(ids)
    found = PagedModel(tmp_path / "q").logits(ids)
    assert float((found - expected).norm() / expected.norm()) < 2e-6
    spec = PagedModel(tmp_path / "q", ops=packing.ops, dtype=torch.bfloat16).spec
    assert packing.loaded_bytes(spec.num_parameters) == spec.weight_bytes("bfloat16", "none")
    planned = read_shape(str(tmp_path / "q")).like
    assert planned.weight_bytes("bfloat16", "none") == spec.weight_bytes("bfloat16", "none")


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    save_tiny(tmp_path / "plain", "Qwen3Moe", **SIZES, **few)
    config = bnb_config(llm_int8_skip_modules=["lm_head", "experts"])
    save_quantised(tmp_path / "plain", tmp_path / "q", tmp_path / "twin", config)
    expected = PagedModel(tmp_path / "q").logits(tokens(24))
    tensors = load_file(tmp_path / "q" / SINGLE)
    experts = {name: tensors.pop(name) for name in [*tensors] if ".experts." in name}
    for scope in {name.partition(".experts.")[0] for name in experts}:
        parts: dict[str, list[Tensor]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
        names = [name for name in experts if name.startswith(f"{scope}.")]
        for name in sorted(names, key=lambda name: int(name.split(".")[-3])):
            parts[name.split(".")[-2]].append(experts[name])
        gate, up, down = map(torch.stack, parts.values())
        tensors[f"{scope}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        tensors[f"{scope}.experts.down_proj"] = down
    save_file(tensors, tmp_path / "q" / SINGLE)
    path = tmp_path / "q" / "config.json"
    path.write_text(path.read_text().replace(', "experts"', ""))
    assert torch.equal(PagedModel(tmp_path / "q").logits(tokens(24)), expected)


def test_adapters_that_requests_choose(tmp_path: Path) -> None:
    save_tiny(tmp_path / "plain", "Llama", **SIZES)
    save_quantised(tmp_path / "plain", tmp_path / "q", tmp_path / "twin", bnb_config())
    pairs = draw_pairs(linear_layers(model_files(tmp_path / "q").spec()))
    adapters = {"a": str(write_adapter(tmp_path / "a", pairs))}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, adapter="a")
    answers = []
    for name in ("q", "twin"):
        options: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "num_blocks": 32}
        with LLM(str(tmp_path / name), device="cpu", adapters=adapters, **options) as llm:
            answers.append(llm.generate([tokens(20)], params)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


LAYERS: dict[str, dict[str, Any]] = {
    "Llama": SIZES | {"tie_word_embeddings": False},
    "Qwen2": SIZES | {"tie_word_embeddings": True},
    "Mixtral": SIZES,
    "GptOss": SIZES,
    "Phi3": SIZES,
    "GPT2": {"n_embd": 64},
    # Blocks span rows. The package's own kernel for CPUs errs with some such sizes, but not these.
    "Mistral": SIZES | {"hidden_size": 72, "intermediate_size": 200, "head_dim": 18},
}
SKIPPED = ["model.layers.1.mlp", "o_proj", "lm_head", r"model.layers.0.self_attn.[qk]_proj"]
CASES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "llm_int8_skip_modules": SKIPPED,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
    "int8": {"load_in_8bit": True},
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_package(case: str, family: str, tmp_path: Path) -> None:
    """Of the weights that it dequantises: its products may round activations. A router may choose
    otherwise for a token, between experts that are equal up to rounding."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    save_tiny(tmp_path / "plain", family, **LAYERS[family])
    config = transformers.BitsAndBytesConfig(**CASES[case])
    quantised = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    quantised.save_pretrained(tmp_path / "q")
    ids = tokens(24)
    expected = reference_logits(quantised.dequantize(torch.float32), ids)
    found = PagedModel(tmp_path / "q", ops=TORCH).logits(ids)
    off = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(off.median()) < 2e-6 and float(off.quantile(0.9)) < 5e-6
