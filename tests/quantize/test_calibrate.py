"""The calibration pass: its results give the same model, and it can be interrupted anywhere."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.calibrated import (
    FAMILIES,
    FAMILIES_BY_TIER,
    LEFT,
    calibrated,
    model_blocks,
    quiet,
    random_windows,
    save_multiplied_out,
)
from helpers.held_out import TEXT
from helpers.paged_model import PagedModel
from helpers.tiny_models import IMAGE_PREFIXES, save_tiny, save_tiny_with_images, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik.config.model_source import BUNDLED
from kvik.errors import ConfigError, ModelError
from kvik.kernels.fp8 import round_activations
from kvik.kernels.rounding import round_tokens
from kvik.kernels.torch_ops import TORCH
from kvik.models.model_spec import read_model_spec
from kvik.quantize import calibrate as module
from kvik.quantize.block import Block, BlockInputs, unwatched
from kvik.quantize.calibrate import calibration_windows, quantise_blocks
from kvik.quantize.model_blocks import ModelBlocks
from kvik.quantize.quantised import BlockResult, Float8, Quantised
from kvik.quantize.recipe import Recipe
from kvik.quantize.save import Output, quantise_folder
from kvik.quantize.source import keeping_floats, open_source
from kvik.text.tokenizer import Tokenizer

METHODS = {
    "rtn": Recipe("rtn", 8, 8),
    "gptq": Recipe("gptq", 8, 8),
    "gptq-act-order": Recipe("gptq", 8, 8, act_order=True),
    "awq": Recipe("awq", 8, 8, symmetric=False),
    "smoothquant": Recipe("smoothquant", 8, -1),
}


def same(results: list[BlockResult], others: list[BlockResult]) -> None:
    assert [r.index for r in results] == [r.index for r in others]
    for result, other in zip(results, others, strict=True):
        assert result.changed.keys() == other.changed.keys()
        for name, values in result.changed.items():
            assert torch.equal(values, other.changed[name])
        for a, b in zip(result.layers, other.layers, strict=True):
            assert (a.name, a.error, a.on_inputs) == (b.name, b.error, b.on_inputs)
            if a.quantised is None:  # the router
                assert b.quantised is None
                continue
            assert torch.equal(a.quantised.q, b.quantised.q)
            assert torch.equal(a.quantised.scales.scales, b.quantised.scales.scales)


@pytest.mark.each(1)  # `test_factors.py` folds every family
@pytest.mark.parametrize("family", FAMILIES_BY_TIER)
@pytest.mark.parametrize("method", METHODS)
def test_in_eight_bits_the_model_is_the_same(tmp_path: Path, family: str, method: str) -> None:
    """Rounding errors are then small, unlike those of wrong factors."""
    save_tiny(tmp_path / "model", family, **FAMILIES[family])
    recipe = METHODS[method]
    windows = random_windows(16, 16)
    results = calibrated(tmp_path / "model", recipe, windows, tmp_path / "work")
    save_multiplied_out(tmp_path / "model", results, tmp_path / "after")
    ids = tokens(24, seed=5)
    expected = PagedModel(tmp_path / "model").logits(ids)
    found = PagedModel(tmp_path / "after").logits(ids)
    # Random states double the effect of noise in weights on the logits.
    bound = (
        0.08 if any(layer.state for layer in read_model_spec(tmp_path / "model").layers) else 0.04
    )
    assert float((found - expected).norm() / expected.norm()) < bound
    assert all(layer.on_inputs for result in results for layer in result.layers)
    rounded = [la for result in results for la in result.layers if la.quantised is not None]
    assert all(0 < layer.error < 0.05 for layer in rounded)
    left = {la.name.rpartition(".")[2] for result in results for la in result.layers} - {
        layer.name.rpartition(".")[2] for layer in rounded
    }
    assert left == LEFT.get(family, set())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Gemma4", FAMILIES["Gemma4"]),
        *(
            pytest.param(f, FAMILIES[f], marks=pytest.mark.full)
            for f in ("Gemma3n", "Qwen3Moe", "DeepseekV3")
        ),
        ("OPT", FAMILIES["OPT"] | {"word_embed_proj_dim": 16}),  # matrices around the blocks
    ],
)
def test_a_saved_folder_has_the_weights_of_the_results(
    tmp_path: Path, family: str, options: dict[str, object]
) -> None:
    save_tiny(tmp_path / "model", family, **options)
    recipe, windows = Recipe("gptq", 4, 8), random_windows(16, 16)
    results = calibrated(tmp_path / "model", recipe, windows, tmp_path / "work")
    save_multiplied_out(tmp_path / "model", results, tmp_path / "after")
    source = open_source(tmp_path / "model")
    quantise_folder(source, recipe, windows, Output(tmp_path / "q", source), quiet)
    ids = tokens(24, seed=5)
    expected = PagedModel(tmp_path / "after").logits(ids)
    found = PagedModel(tmp_path / "q", ops=TORCH).logits(ids)
    assert float((found - expected).norm() / expected.norm()) < 2e-6


@pytest.mark.parametrize(
    ("family", "with_experts"), [("Qwen3Moe", 2), ("DeepseekV3", 2), ("Qwen3Next", 3)]
)
@pytest.mark.parametrize("method", METHODS)
def test_experts_that_no_token_reaches_are_rounded_to_nearest(
    tmp_path: Path, method: str, family: str, with_experts: int
) -> None:
    save_tiny(tmp_path, family, **{**FAMILIES[family], "num_experts_per_tok": 1})
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".mlp.gate." in name]:
        two = tensors[name][:2]  # one of them is always better
        tensors[name][5] = two.mean(0) if name.endswith("weight") else two.min()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    windows = random_windows(16, 16)
    results = calibrated(tmp_path, METHODS[method], windows, tmp_path / "work")
    layers = [layer for result in results for layer in result.layers]
    unreached = [layer for layer in layers if ".experts.5." in layer.name]
    assert len(unreached) == with_experts * 3
    for layer in layers:
        assert layer.on_inputs == (layer not in unreached)
    assert all(layer.quantised is not None and 0 < layer.error < 0.05 for layer in unreached)


@pytest.mark.parametrize(
    ("family", "method", "pattern"),
    [
        ("Llama", "awq", ("*.v_proj", "*.up_proj", "*.q_proj")),
        ("Llama", "smoothquant", ("*.v_proj", "*.up_proj", "*.q_proj")),
        ("GPT2", "awq", ("*.c_attn",)),
    ],
)
def test_factors_are_folded_into_float_layers_too(
    tmp_path: Path, family: str, method: str, pattern: tuple[str, ...]
) -> None:
    save_tiny(tmp_path / "model", family, **FAMILIES[family])
    recipe = replace(METHODS[method], skip=pattern)
    results = calibrated(tmp_path / "model", recipe, random_windows(16, 16), tmp_path / "work")
    left = {la.name for la in results[0].layers if la.quantised is None}
    assert len(left) == len(pattern)
    assert left <= {name.removesuffix(".weight") for name in results[0].changed}
    save_multiplied_out(tmp_path / "model", results, tmp_path / "after")
    ids = tokens(24, seed=5)
    expected = PagedModel(tmp_path / "model").logits(ids)
    found = PagedModel(tmp_path / "after").logits(ids)
    assert float((found - expected).norm() / expected.norm()) < 0.04


@pytest.mark.parametrize("method", ["rtn", "fp8"])
def test_without_data(tmp_path: Path, method: str) -> None:
    save_tiny(tmp_path / "model", "Llama")
    recipe = Recipe("fp8", 8, -1) if method == "fp8" else Recipe("rtn", 4, 8)
    results = calibrated(tmp_path / "model", recipe, None, tmp_path / "work")
    kind = Float8 if method == "fp8" else Quantised
    layers = [layer for result in results for layer in result.layers]
    assert len(layers) == 21
    assert all(isinstance(layer.quantised, kind) and not layer.on_inputs for layer in layers)
    assert all(0 < layer.error < 0.2 for layer in layers)
    assert not (tmp_path / "work").exists()


def bundled_windows(count: int, size: int, skip: int = 0) -> Tensor:
    tokenizer = Tokenizer.load(BUNDLED)
    return calibration_windows("builtin", tokenizer, samples=count + skip, tokens=size)[skip:]


def block_error(result: BlockResult, block: Block, x: Tensor) -> float:
    """Return the error of a block's outputs with the layers of the result."""
    expected = block.run(BlockInputs(x), unwatched).float()
    for layer in result.layers:
        block.set_weight(layer.name, layer.quantised.dequantised())
    for name, values in result.changed.items():
        block.set_tensor(name, values)
    return float(
        (block.run(BlockInputs(x), unwatched).float() - expected).norm() / (expected - x).norm()
    )


@pytest.mark.full
@pytest.mark.parametrize("group", [pytest.param(-1, marks=pytest.mark.nightly), 64])
def test_gptq_and_awq_are_better_than_rounding(tmp_path: Path, group: int) -> None:
    """On text outside of the calibration, in the bundled model's first block."""
    spec = read_model_spec(BUNDLED)
    spec = replace(spec, layers=spec.layers[:1])
    windows = bundled_windows(64, 128, skip=8)
    model = model_blocks(BUNDLED, 128, spec=spec)
    (x,) = model.input_layers(bundled_windows(8, 128)).embed(8)
    errors = {}
    for method in ("rtn", "gptq", "awq"):
        recipe = Recipe(method, 4, group)
        work = tmp_path / method
        (result,) = quantise_blocks(BUNDLED, spec, recipe, windows, work, quiet)
        errors[method] = block_error(result, model.block(0), x)
    assert errors["gptq"] < 0.9 * errors["rtn"]
    assert errors["awq"] < 0.95 * errors["rtn"]


def test_later_blocks_see_rounded_ones(tmp_path: Path) -> None:
    """Including the rounding of activations, if the engine will round them."""
    save_tiny(tmp_path / "model", "Llama")
    spec, windows = read_model_spec(tmp_path / "model"), random_windows(4, 16)
    model = model_blocks(tmp_path / "model", 16)
    (x,) = model.input_layers(windows).embed(4)
    for name, recipe in METHODS.items():
        work = tmp_path / name
        steps = quantise_blocks(tmp_path / "model", spec, recipe, windows, work, quiet)
        result = next(steps)
        found = torch.frombuffer(bytearray((work / "hidden-1").read_bytes()), dtype=torch.float32)
        block = model.block(0)
        for layer in result.layers:
            block.set_weight(layer.name, layer.quantised.dequantised())
        for tensor, values in result.changed.items():
            block.set_tensor(tensor, values)
        rounds = recipe.rounds_activations
        expected = block.run(
            BlockInputs(x), lambda m, given, r=rounds: round_tokens(given) if r else given
        )
        assert torch.equal(found.view_as(x), expected)
        assert not torch.equal(expected, model.block(0).run(BlockInputs(x), unwatched))


def test_static_scales_reach_the_largest_input_and_round_it(tmp_path: Path) -> None:
    """Of each matrix; later blocks see the rounded outputs."""
    save_tiny(tmp_path / "model", "Llama")
    spec, windows = read_model_spec(tmp_path / "model"), random_windows(4, 16)
    model = model_blocks(tmp_path / "model", 16)
    (x,) = model.input_layers(windows).embed(4)
    recipe = Recipe("fp8", 8, -1, activation_scheme="static")
    steps = quantise_blocks(tmp_path / "model", spec, recipe, windows, tmp_path / "w", quiet)
    result = next(steps)
    found = bytearray((tmp_path / "w" / "hidden-1").read_bytes())
    block, scales = model.block(0), dict[int, Tensor]()

    def look(matrix: int, given: Tensor) -> Tensor:
        scales[matrix] = (given.abs().max() / 448).reshape(1)
        return given

    block.run(BlockInputs(x), look)
    for place, layer in zip(block.layers, result.layers, strict=True):
        assert isinstance(layer.quantised, Float8) and layer.quantised.input_scale is not None
        assert torch.equal(layer.quantised.input_scale, scales[place.matrix])
        assert 0 < layer.error < 0.1 and layer.on_inputs
        block.set_weight(layer.name, layer.quantised.dequantised())
    expected = block.run(BlockInputs(x), lambda m, given: round_activations(given, 0, scales[m]))
    assert torch.equal(torch.frombuffer(found, dtype=torch.float32).view_as(x), expected)


@pytest.mark.parametrize(("family", "saved"), [("Llama", 1), ("Llama", 2), ("Gemma4", 2)])
def test_an_interrupted_pass_is_resumed(tmp_path: Path, family: str, saved: int) -> None:
    """After an end before or after the last result was saved."""
    save_tiny(tmp_path / "model", family, **FAMILIES[family])
    spec, work = read_model_spec(tmp_path / "model"), tmp_path / "work"
    recipe, windows = keeping_floats(Recipe("gptq", 4, 8), spec), random_windows(6, 12)
    whole = calibrated(tmp_path / "model", recipe, windows, tmp_path / "whole")
    steps = quantise_blocks(tmp_path / "model", spec, recipe, windows, work, quiet)
    begun = [next(steps), next(steps)]
    steps.close()
    (work / ".kvik-cut").write_bytes(b"half a file")
    rest = calibrated(tmp_path / "model", recipe, windows, work, first=saved)
    same([*begun[:saved], *rest], whole)
    assert not list(work.iterdir())


def test_resuming_without_saved_states_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Llama")
    recipe, windows = Recipe("gptq", 4, 8), random_windows(6, 12)
    with pytest.raises(ModelError, match="hidden-1' is missing or from another run"):
        calibrated(tmp_path / "model", recipe, windows, tmp_path / "work", first=1)


@pytest.mark.full
def test_one_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model", "Llama")
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    load = ModelBlocks.block

    def block(self: ModelBlocks, index: int) -> Block:
        alive.append(sum(ref() is not None for ref in made))
        found = load(self, index)
        made.append(weakref.ref(found.layers[-1].weight))
        return found

    monkeypatch.setattr(ModelBlocks, "block", block)
    spec = read_model_spec(tmp_path / "model")
    gc.collect()
    gc.disable()
    try:
        for recipe in METHODS.values():
            for result in quantise_blocks(
                tmp_path / "model", spec, recipe, random_windows(4, 8), tmp_path / "work", quiet
            ):
                assert len(list((tmp_path / "work").iterdir())) == 2
                del result
    finally:
        gc.enable()
    assert alive == [0] * 3 * len(METHODS)


def test_progress_names_layers_and_only_grows(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Llama")
    spec, seen = read_model_spec(tmp_path / "model"), []
    for _ in quantise_blocks(
        tmp_path / "model",
        spec,
        METHODS["gptq"],
        random_windows(4, 8),
        tmp_path / "work",
        lambda doing, share: seen.append((doing, share)),
    ):
        pass
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 1
    assert any("model.layers.2.mlp.down_proj" in doing for doing, _ in seen)


# Calibration text: enough of it, evenly sampled, else one clear error.


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED)


def test_builtin(tokenizer: Tokenizer) -> None:
    windows = calibration_windows("builtin", tokenizer, samples=128, tokens=256)
    assert windows.shape == (128, 256)
    assert windows.dtype == torch.int64
    assert len(windows.unique(dim=0)) == 128


def test_builtin_text_does_not_overlap_with_evaluation() -> None:
    text = module.TEXT.read_text(encoding="utf-8")
    lines = [line for line in TEXT.splitlines() if len(line) > 40]
    assert len(lines) > 50
    assert not [line for line in lines if line in text]
    assert text.isascii()


def test_a_file_is_sampled_evenly(tmp_path: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    found = len(ids) // 16
    windows = calibration_windows(tmp_path / "text", tokenizer, samples=found + 5, tokens=16)
    assert windows.flatten().tolist() == ids[: 16 * found]
    half = calibration_windows(str(tmp_path / "text"), tokenizer, samples=found // 2, tokens=16)
    assert len(half) == found // 2
    assert half[0].tolist() == windows[0].tolist()
    places = [int((windows == window).all(1).nonzero()[0]) for window in half]
    assert max(places) >= found - 4
    assert max(b - a for a, b in pairwise(places)) <= 3


def test_a_long_file_is_not_read_to_its_end(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 1000)
    (tmp_path / "text").write_bytes(TEXT.encode() * 3 + b"\xff")
    windows = calibration_windows(tmp_path / "text", tokenizer, samples=2, tokens=16)
    assert windows.shape == (2, 16)
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        calibration_windows(tmp_path / "text", tokenizer, samples=2000, tokens=16)


def test_parts_are_cut_between_lines(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    whole = calibration_windows(tmp_path / "text", tokenizer, samples=999, tokens=16)
    monkeypatch.setattr(module, "PART", 700)
    parts = calibration_windows(tmp_path / "text", tokenizer, samples=999, tokens=16)
    same = (tokenizer.decode(w.flatten().tolist()) for w in (whole, parts))
    assert len({text[:5000] for text in same}) == 1


@pytest.mark.parametrize("space", [" ", ""])
def test_a_line_without_an_end(
    space: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it read to its end, and words stay whole."""
    monkeypatch.setattr(module, "PART", 1000)
    line = f"tree{space}" * 9000
    (tmp_path / "line").write_bytes(line.encode() + b"\xff")
    windows = calibration_windows(tmp_path / "line", tokenizer, samples=4, tokens=16)
    assert windows.shape == (4, 16)
    if space:
        ids = tokenizer.encode(line, add_special_tokens=False)
        assert windows[0].tolist() == ids[:16] and len(windows[1:].unique()) == 1


def test_unsuitable_texts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "short").write_text("Once upon a time.")
    with pytest.raises(ConfigError, match=r"has \d+ tokens, one window needs 512"):
        calibration_windows(tmp_path / "short", tokenizer, samples=8, tokens=512)
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="has 0 tokens"):
        calibration_windows(tmp_path / "empty", tokenizer, samples=8, tokens=512)
    with pytest.raises(ConfigError, match=r"cannot read .*none' \(No such file"):
        calibration_windows(tmp_path / "none", tokenizer, samples=8, tokens=512)
    with pytest.raises(ConfigError, match=r"cannot read .*Is a directory"):
        calibration_windows(tmp_path, tokenizer, samples=8, tokens=512)
    with pytest.raises(ConfigError, match="samples: must be at least 1"):
        calibration_windows("builtin", tokenizer, samples=0, tokens=512)
    with pytest.raises(ConfigError, match="samples: must be at most 32768 of 512 tokens"):
        calibration_windows("builtin", tokenizer, samples=10**20, tokens=512)
    with pytest.raises(ConfigError, match="calib_tokens: must be at least 2"):
        calibration_windows("builtin", tokenizer, samples=1, tokens=1)


@pytest.mark.parametrize("prefix", IMAGE_PREFIXES)
def test_the_text_model_of_a_model_with_images(tmp_path: Path, prefix: str) -> None:
    save_tiny_with_images(tmp_path / "model", prefix)
    recipe = Recipe("rtn", 8, 8)
    results = calibrated(tmp_path / "model", recipe, None, tmp_path / "work")
    names = [layer.name for result in results for layer in result.layers]
    assert len(names) == 3 * 7 and all(name.startswith(f"{prefix}.layers.") for name in names)
