"""A model computed block by block equals the whole model."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from helpers.calibrated import FAMILIES, FAMILIES_BY_TIER, model_blocks, random_windows
from helpers.paged_model import PagedModel
from helpers.tiny_models import save_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik.errors import ModelError
from kvik.quantize.block import BlockInputs, unwatched
from kvik.quantize.model_blocks import walk


@pytest.mark.parametrize("family", FAMILIES_BY_TIER)
def test_block_by_block_is_the_model(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family, **FAMILIES[family])
    windows = random_windows(3, 11)
    model = model_blocks(tmp_path, 11)
    model.check()
    *_, (_, _, x) = walk(model, windows)
    whole = PagedModel(tmp_path)
    trunk = getattr(whole.model, "trunk", whole.model)
    expected = whole.step(dict(enumerate(windows.tolist())))
    for i, found in enumerate(x):
        logits = whole.model.logits(trunk.leave(found))
        torch.testing.assert_close(logits, expected[i], rtol=1e-4, atol=1e-4)


def test_trunk_without_its_prefix(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    tensors = load_file(tmp_path / "model.safetensors")
    expected = model_blocks(tmp_path, 4).block(1)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors")
    block = model_blocks(tmp_path, 4).block(1)
    assert block.layers[0].name == "layers.1.self_attn.q_proj"
    for layer, other in zip(block.layers, expected.layers, strict=True):
        assert torch.equal(layer.weight, other.weight)


def test_layers_are_named_and_grouped(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", attention_bias=True)
    block = model_blocks(tmp_path, 4).block(2)
    names = [layer.name.removeprefix("model.layers.2.") for layer in block.layers]
    assert names == [
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
    ]
    q, k, v, o, gate, up, down = (layer.matrix for layer in block.layers)
    assert q == k == v
    assert gate == up
    assert len({q, o, gate, down}) == 4
    assert "model.layers.2.input_layernorm.weight" in block.tensors
    assert "model.layers.2.self_attn.q_proj.bias" in block.tensors


def test_stored_transposed(tmp_path: Path) -> None:
    save_tiny(tmp_path, "GPT2")
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in model_blocks(tmp_path, 4).block(0).layers:
        assert layer.transposed
        assert torch.equal(layer.weight, tensors[f"{layer.name}.weight"].t())


def test_watched_inputs_are_those_of_the_products(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    model = model_blocks(tmp_path, 5)
    block, inputs, _ = next(walk(model, random_windows(2, 5)))
    seen: dict[int, Tensor] = {}

    def watch(matrix: int, given: Tensor) -> Tensor:
        seen[matrix] = given
        return torch.zeros_like(given)

    # Nothing is added to the residual stream, so x does not change.
    assert torch.equal(block.run(inputs, watch), inputs.x)
    widths = {layer.matrix: layer.weight.shape[1] for layer in block.layers}
    assert {matrix: given.shape for matrix, given in seen.items()} == {
        matrix: (10, width) for matrix, width in widths.items()
    }


@pytest.mark.full
def test_a_block_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    """Blocks are large, and the garbage collector counts objects, not bytes."""
    save_tiny(tmp_path, "Llama")
    model = model_blocks(tmp_path, 5)
    (x,) = model.input_layers(random_windows(2, 5)).embed(2)
    gc.collect()
    gc.disable()
    try:
        block = model.block(0)
        weight = weakref.ref(block.layers[0].weight)
        block.run(BlockInputs(x), unwatched)
        del block
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    save_tiny(tmp_path, "Llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = bad
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj\.weight.* holds NaN"):
        model_blocks(tmp_path, 4).check()


def test_tensors_that_are_missing_or_of_another_shape(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    tensors = load_file(tmp_path / "model.safetensors")
    short = tensors | {"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 32)}
    save_file(short, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"must have shape \[56, 32\]"):
        model_blocks(tmp_path, 4).check()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack .*layers\.1\.mlp\.up_proj\.weight"):
        model_blocks(tmp_path, 4).check()
