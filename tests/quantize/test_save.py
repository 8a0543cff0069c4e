"""Saved folders have the intended weights for kvik's loader, in each method's layout."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.calibrated import FAMILIES
from helpers.paged_model import PagedModel
from helpers.rounded_blocks import meaning, rounded_blocks
from helpers.tiny_models import (
    IMAGE_PREFIXES,
    LONGCAT,
    ZAMBA2,
    save_tiny,
    save_tiny_with_images,
    tokens,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.quantizers.quantizers_utils import should_convert_module

from kvik.errors import ConfigError, KvikError, ModelError
from kvik.kernels.torch_ops import TORCH
from kvik.models.model_spec import read_model_spec
from kvik.nn.checkpoint import INDEX, SINGLE, open_checkpoint
from kvik.nn.formats.registry import choose_format
from kvik.quantize import save
from kvik.quantize import save as output_module
from kvik.quantize.quantised import BlockResult
from kvik.quantize.recipe import Recipe
from kvik.quantize.save import STATE, Output, Saved, check_request, quantise_folder
from kvik.quantize.source import Source, open_source
from kvik.spec.weight_kind import WeightKind

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
DOWN, Q = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"
OTHER_BITS = dict.fromkeys(
    (f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 2) for x in "qkv"), 8
)

CASES: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn"},
    "rtn-asym": {"method": "rtn", "symmetric": False},
    "rtn-rows": {"method": "rtn", "group_size": -1},
    "rtn-3": {"method": "rtn", "bits": 3, "symmetric": False},
    "rtn-2": {"method": "rtn", "bits": 2},
    "rtn-8": {"method": "rtn", "bits": 8, "group_size": -1},
    "rtn-8-groups": {"method": "rtn", "bits": 8},
    "rtn-some": {"method": "rtn", "skip": ("*.1.*", "*.v_proj")},
    "gptq": {"method": "gptq"},
    "gptq-asym": {"method": "gptq", "symmetric": False},
    "gptq-3": {"method": "gptq", "bits": 3},
    "gptq-8": {"method": "gptq", "bits": 8},
    "gptq-order": {"method": "gptq", "act_order": True},
    "gptq-order-3": {"method": "gptq", "act_order": True, "bits": 3, "symmetric": False},
    "gptq-static": {"method": "gptq", "act_order": True, "static_groups": True},
    "gptq-order-rows": {"method": "gptq", "act_order": True, "group_size": -1},
    "gptq-some": {"method": "gptq", "skip": ("*.down_proj",)},
    "awq": {"method": "awq", "symmetric": False},
    "awq-sym": {"method": "awq"},
    "awq-some": {"method": "awq", "skip": (DOWN, "*.0.self_attn.*")},
    "awq-3": {"method": "awq", "bits": 3},
    "smoothquant": {"method": "smoothquant", "bits": 8, "group_size": -1},
    "fp8": {"method": "fp8", "bits": 8, "group_size": -1},
    "fp8-one": {"method": "fp8", "bits": 8, "group_size": 0},
    "fp8-static": {
        "method": "fp8", "bits": 8, "group_size": -1, "activation_scheme": "static",
    },
    "fp8-e5m2": {"method": "fp8", "bits": 8, "group_size": 128, "fp8_format": "e5m2"},
    "fp8-e5m2-one": {"method": "fp8", "bits": 8, "group_size": 0, "fp8_format": "e5m2"},
    "fp8-blocks": {"method": "fp8", "bits": 8, "group_size": 128, "skip": (DOWN,)},
    "mixed": {"method": "rtn", "average_bits": 5.0, "layer_bits": OTHER_BITS},
    "mixed-static": {
        "method": "gptq", "act_order": True, "static_groups": True, "average_bits": 5.0,
        "layer_bits": OTHER_BITS, "skip": ("*.2.mlp.*",),
    },
}  # fmt: skip


def recipe_of(case: str) -> Recipe:
    return Recipe(**{"group_size": 32} | CASES[case])


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def any_plain(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain(tmp_path_factory.mktemp(request.param), getattr(torch, request.param))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain(tmp_path_factory.mktemp("plain"), torch.float32)


def make_plain(folder: Path, dtype: torch.dtype) -> Path:
    model = save_tiny(folder, "Llama", **SIZES, tie_word_embeddings=False)
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"never copied")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def without_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "quantise_blocks", rounded_blocks)
    monkeypatch.setattr(save, "choose_bits", lambda folder, spec, recipe, *rest: recipe)


def quantise(plain: Path, folder: Path, recipe: Recipe) -> Saved:
    source = open_source(plain)
    windows = torch.zeros(1, 8, dtype=torch.int64)
    return quantise_folder(
        source, recipe, windows, Output(folder, source), lambda what, share: None
    )


@pytest.mark.parametrize("family", ["HYV4", "Glm5Next"])
def test_what_weighs_streams_is_no_layer(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family, **FAMILIES[family])
    layers = open_source(tmp_path).layers
    assert layers and not [name for name in layers if ".hc_" in name or "kpool" in name]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_the_loader_reads_the_intended_weights(case: str, any_plain: Path, tmp_path: Path) -> None:
    """Every weight, exactly."""
    recipe = recipe_of(case)
    quantise(any_plain, tmp_path / "q", recipe)
    meant = meaning(any_plain, recipe)
    stored = {path: load_file(path) for path in sorted((tmp_path / "q").glob("*.safetensors"))}
    tensors = {name: tensor for file in stored.values() for name, tensor in file.items()}
    quantization = read_model_spec(tmp_path / "q").quantization
    read = set()
    for layer, shape in open_source(any_plain).layers.items():
        own = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.rpartition(".")[0] == layer}
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        scheme = quantization.scheme(layer)
        assert (scheme is not None) == recipe.quantises(layer)
        format = choose_format(layer, shapes, scheme, shape)
        assert set(own) == set(format.tensors(torch.float32))
        weight = format.weight(own, slice(0, shape.outputs))
        assert torch.equal(weight.dequantized(), meant[f"{layer}.weight"].float())
        read |= {f"{layer}.{name}" for name in own}
    for name in set(tensors) - read:  # the rest, including folded factors
        assert torch.equal(tensors[name], meant[name])
    assert quantization.scheme("lm_head") is None


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_the_model_gives_the_logits_of_the_dequantised_floats(
    case: str, plain: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(case)
    quantise(plain, tmp_path / "q", recipe)
    twin = tmp_path / "twin"
    twin.mkdir()
    save_file({n: t.contiguous() for n, t in meaning(plain, recipe).items()}, twin / SINGLE)
    shutil.copy(plain / "config.json", twin)
    ids = tokens(24)
    expected, found = PagedModel(twin), PagedModel(tmp_path / "q", ops=TORCH)
    if recipe.rounds_activations:
        weight = found.model.layers[0].attention.qkv.linears[0].matrix.data
        dynamic = recipe.activation_scheme == "dynamic"
        float8 = WeightKind("fp8", activations="token" if dynamic else "static")
        assert weight.kind == (
            float8 if recipe.method == "fp8" else WeightKind("int8", activations="token")
        )
        return
    logits = expected.logits(ids)
    assert float((found.logits(ids) - logits).norm() / logits.norm()) < 2e-6
    assert found.greedy(ids[:6], 8, sequence=1) == expected.greedy(ids[:6], 8, sequence=1)


def test_the_folder_is_complete(plain: Path, tmp_path: Path) -> None:
    saved = quantise(plain, tmp_path / "q", recipe_of("gptq"))
    assert saved.bytes_before == open_source(plain).num_bytes
    shards = {path: sum(e.size for e in entries) for path, entries in files_of(tmp_path / "q")}
    assert sum(shards.values()) == saved.bytes_after < 0.6 * saved.bytes_before
    assert len(shards) == 4  # three blocks and the rest
    names = {path.name for path in (tmp_path / "q").iterdir()} - {path.name for path in shards}
    assert names == {
        "chat_template.jinja", "config.json", "generation_config.json", INDEX, STATE,
        "tokenizer_config.json",
    }  # fmt: skip
    before, after = (json.loads((f / "config.json").read_text()) for f in (plain, tmp_path / "q"))
    assert before == {k: v for k, v in after.items() if k != "quantization_config"}
    index = json.loads((tmp_path / "q" / INDEX).read_text())
    assert index["metadata"]["total_size"] == saved.bytes_after
    layer = next(layer for layer in saved.layers if layer.name == DOWN)
    assert layer.weights == 64 * 96 and layer.bits == 4
    # Codes, scales in fp16, zero points, group index.
    assert layer.bytes == 64 * 96 // 2 + 3 * 64 * 2 + 3 * 64 // 2 + 96 * 4
    Output(tmp_path / "q", open_source(plain)).report({"done": True})
    assert not (tmp_path / "q" / STATE).exists()
    assert json.loads((tmp_path / "q" / output_module.REPORT).read_text()) == {"done": True}


def files_of(folder: Path) -> Any:
    return open_checkpoint(folder).files


@pytest.mark.parametrize("case", ["gptq-order", "mixed", "fp8-blocks"])
@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
@pytest.mark.parametrize("problem", [KeyboardInterrupt(), OSError(28, "no space left")])
def test_an_interrupted_run_gives_the_same_bytes(
    case: str,
    blocks: int,
    problem: BaseException,
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = recipe_of(case)
    quantise(plain, tmp_path / "whole", recipe)
    firsts = []

    def watched(*arguments: Any, first: int = 0) -> Iterator[BlockResult]:
        firsts.append(first)
        return rounded_blocks(*arguments, first=first)

    def cut(*arguments: Any, first: int = 0) -> Iterator[BlockResult]:
        yield from islice(watched(*arguments, first=first), blocks)
        raise problem

    monkeypatch.setattr(save, "quantise_blocks", cut)
    with pytest.raises((KeyboardInterrupt, ConfigError), match="no space left|^$"):
        quantise(plain, tmp_path / "cut", recipe)
    assert not (tmp_path / "cut" / "config.json").exists()
    (tmp_path / "cut" / ".kvik-half").write_bytes(b"of a shard, when the power failed")
    monkeypatch.setattr(save, "quantise_blocks", watched)
    again = quantise(plain, tmp_path / "cut", recipe)
    # With all blocks saved, nothing is left for the pass.
    assert firsts == [0, *([blocks] if blocks < 3 else [])]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert len(again.layers) == 21


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_finished_run_can_be_repeated(plain: Path, tmp_path: Path) -> None:
    """After an interruption of the measurements that follow."""
    first = quantise(plain, tmp_path / "q", recipe_of("awq"))
    assert quantise(plain, tmp_path / "q", recipe_of("awq")) == first


def test_unsuitable_folders(plain: Path, tmp_path: Path) -> None:
    recipe = recipe_of("rtn")
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    for folder, message in (
        (tmp_path / "file", "must be a folder"),
        (tmp_path / "file" / "under", "cannot write"),
        (tmp_path / "full", "is not empty"),
        (plain, "must not be the model's own folder"),
    ):
        before = sorted(plain.iterdir())
        with pytest.raises(ConfigError, match=f"output: .*{message}"):
            quantise(plain, folder, recipe)
        assert sorted(plain.iterdir()) == before
    quantise(plain, tmp_path / "q", recipe)
    with pytest.raises(ConfigError, match="a part of another run"):
        quantise(plain, tmp_path / "q", recipe_of("rtn-asym"))
    Output(tmp_path / "q", open_source(plain)).report({})
    with pytest.raises(ConfigError, match="is not empty"):
        quantise(plain, tmp_path / "q", recipe)


def test_two_runs_at_once(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(*arguments: Any, first: int = 0) -> Iterator[BlockResult]:
        for recipe in (recipe_of("rtn"), recipe_of("rtn-3")):
            with pytest.raises(ConfigError, match="output: another run is working in"):
                quantise(plain, tmp_path / "q", recipe)
        return rounded_blocks(*arguments, first=first)

    monkeypatch.setattr(save, "quantise_blocks", meanwhile)
    quantise(plain, tmp_path / "q", recipe_of("rtn"))


def test_another_run_without_a_saved_block_is_discarded(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*arguments: Any, first: int = 0) -> Iterator[BlockResult]:
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(save, "quantise_blocks", cut)
        quantise(plain, tmp_path / "q", recipe_of("rtn"))
    quantise(plain, tmp_path / "q", recipe_of("rtn-3"))


def test_a_model_with_nan_leaves_no_folder(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nan(*arguments: Any, first: int = 0) -> Iterator[BlockResult]:
        raise ModelError("model", "holds NaN")
        yield

    monkeypatch.setattr(save, "quantise_blocks", nan)
    with pytest.raises(ModelError):
        quantise(plain, tmp_path / "q", recipe_of("rtn"))
    assert not (tmp_path / "q").exists()


def test_a_disk_that_is_too_small(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(output_module.shutil, "disk_usage", lambda place: usage)
    with pytest.raises(ConfigError, match=r"output: needs about .* of disk, 1.0 MiB are free"):
        quantise(plain, tmp_path / "q" / "deep", recipe_of("rtn"))
    assert not (tmp_path / "q").exists()


def test_recipes_that_are_impossible_for_the_model(plain: Path, tmp_path: Path) -> None:
    source = open_source(plain)

    def refusal(source: Source = source, **options: Any) -> str:
        with pytest.raises(KvikError) as caught:
            check_request(source, Recipe(**options), tmp_path / "q", None)
        return str(caught.value)

    message = refusal(method="gptq", group_size=64)
    assert message == (
        "group_size: 64 does not divide the 96 inputs of 'model.layers.0.mlp.down_proj': "
        "take 32 or -1, or skip such layers"
    )
    check_request(source, Recipe("gptq", group_size=64, skip=("*.down_proj",)), tmp_path, None)
    assert refusal(method="rtn", skip=("*",)) == "skip: leaves no layer to quantise"
    check_request(source, Recipe("rtn", group_size=32, skip=("lm_head",)), tmp_path, None)
    assert "'down_proj' matches no layer" in refusal(method="rtn", skip=("*.k_proj", "down_proj"))
    options = {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16}
    save_tiny(tmp_path / "experts", "Qwen3Moe", **SIZES | options)
    message = refusal(
        open_source(tmp_path / "experts"), method="rtn", group_size=-1, skip=("*.experts.3.*",)
    )
    assert message == "skip: must take all experts of layer 0, or none of them"
    save_tiny(tmp_path / "odd", "Llama", **SIZES | {"intermediate_size": 100})
    odd = open_source(tmp_path / "odd")
    message = refusal(odd, method="gptq", group_size=-1, bits=4)
    assert "gptq cannot store 'model.layers.0.mlp.gate_proj': its 100 outputs" in message
    check_request(odd, Recipe("rtn", group_size=-1), tmp_path, None)


@pytest.mark.parametrize("case", ["rtn", "gptq", "awq", "fp8-blocks"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_layers_of_an_encoder_and_of_a_head_that_drafts(
    case: str, prefix: str, tmp_path: Path
) -> None:
    """config.json excludes each of them, by the rules of the library of its format; transformers
    has "model." before the names in some files."""
    model = save_tiny(tmp_path / "plain", "Qwen2_5_VL", **SIZES)
    tensors = load_file(tmp_path / "plain" / SINGLE)
    tensors["mtp.fc.weight"] = torch.ones(64, 128)
    tensors["mtp.layers.0.mlp.experts.1.up_proj.weight"] = torch.ones(8, 64)
    save_file(tensors, tmp_path / "plain" / SINGLE)
    recipe = replace(recipe_of(case), skip=())
    quantise(tmp_path / "plain", tmp_path / "q", recipe)
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]

    def excluded(layer: str) -> bool:
        if recipe.layout in ("awq", "fp8"):
            return not should_convert_module(layer, config["modules_to_not_convert"])
        if recipe.layout == "gptq":
            return any(re.match(pattern.removeprefix("-:"), layer) for pattern in config["dynamic"])
        patterns = [name.removeprefix("re:") for name in config["ignore"] if name[:3] == "re:"]
        return layer in config["ignore"] or any(re.match(p, layer) for p in patterns)

    images = [
        name.removeprefix("model.")
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and "visual" in name
    ]
    for layer in (*images, "mtp.fc", "mtp.layers.0.mlp.experts.1.up_proj"):
        assert excluded(prefix + layer)
    assert not any(map(excluded, open_source(tmp_path / "plain").layers))
    assert len(images) > 5


@pytest.mark.parametrize("case", ["rtn", "gptq", "awq", "fp8-blocks"])
@pytest.mark.parametrize(
    ("family", "prefix"),
    [*(("Gemma3", prefix) for prefix in IMAGE_PREFIXES), ("Qwen3_5", "model.language_model")],
)
def test_skipped_layers_of_files_with_images(
    case: str, family: str, prefix: str, tmp_path: Path
) -> None:
    save_tiny_with_images(tmp_path / "plain", prefix, family)
    recipe = Recipe(**{"group_size": 8} | CASES[case] | {"skip": ("*.o_proj",)})
    quantise(tmp_path / "plain", tmp_path / "q", recipe)
    spec = read_model_spec(tmp_path / "q")
    for linear in spec.declaration.linears:
        if (name := linear.names[0]).endswith(("o_proj", "down_proj")):
            assert (spec.quantization.scheme(name) is None) == name.endswith("o_proj")
    assert PagedModel(tmp_path / "q", ops=TORCH).logits(tokens(12)).isfinite().all()


@pytest.mark.parametrize("case", ["rtn", "gptq", "awq", "smoothquant", "fp8-blocks"])
@pytest.mark.parametrize("named", ["embed_out", "language_model.lm_head"])
def test_heads_with_other_names(case: str, named: str, tmp_path: Path) -> None:
    if named == "embed_out":
        save_tiny(tmp_path / "plain", "GPTNeoX", **SIZES | {"num_key_value_heads": 4})
    else:
        save_tiny_with_images(tmp_path / "plain", "language_model.model", "Ministral3")
    recipe = Recipe(**{"group_size": 8} | CASES[case] | {"skip": ()})
    quantise(tmp_path / "plain", tmp_path / "q", recipe)
    assert f"{named}.weight" in load_file(max((tmp_path / "q").glob("*.safetensors")))
    assert PagedModel(tmp_path / "q", ops=TORCH).logits(tokens(12)).isfinite().all()
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    exclusions = {"compressed-tensors": "ignore", "gptq": "dynamic"}
    excluded = config[exclusions.get(recipe.layout, "modules_to_not_convert")]
    assert named in {name.removeprefix("-:^").rstrip("$").replace("\\.", ".") for name in excluded}


@pytest.mark.parametrize(("family", "options"), [("Zamba2", ZAMBA2), ("LongcatFlash", LONGCAT)])
def test_layers_that_are_no_blocks_are_refused(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, **options)
    with pytest.raises(ModelError, match="model: has layers that share matrices or experts"):
        open_source(tmp_path)


def test_a_quantised_model_is_refused(plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "q", recipe_of("rtn"))
    with pytest.raises(ModelError, match="quantised already"):
        open_source(tmp_path / "q")


@pytest.mark.parametrize("bare", [False, True])
def test_other_architectures(bare: bool, tmp_path: Path) -> None:
    """Transposed matrices, biases, q, k and v in one layer; names without the trunk's prefix."""
    save_tiny(tmp_path / "plain", "GPT2", n_embd=64, tie_word_embeddings=True)
    if bare:
        tensors = load_file(tmp_path / "plain" / SINGLE)
        tensors = {n.removeprefix("transformer."): t for n, t in tensors.items()}
        save_file(tensors, tmp_path / "plain" / SINGLE)
    recipe = Recipe("rtn", group_size=32, symmetric=False)
    quantise(tmp_path / "plain", tmp_path / "q", recipe)
    (tmp_path / "twin").mkdir()
    meant: dict[str, Tensor] = meaning(tmp_path / "plain", recipe)
    layers = open_source(tmp_path / "plain").layers
    meant = {
        name: t.t().contiguous() if name.removesuffix(".weight") in layers else t
        for name, t in meant.items()
    }
    save_file(meant, tmp_path / "twin" / SINGLE)
    shutil.copy(tmp_path / "plain" / "config.json", tmp_path / "twin")
    ids = tokens(12)
    expected = PagedModel(tmp_path / "twin").logits(ids)
    found = PagedModel(tmp_path / "q").logits(ids)
    assert float((found - expected).norm() / expected.norm()) < 2e-6
