"""Factors moved between layers do not change the block's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers.calibrated import FAMILIES, model_blocks, normal, random_windows
from helpers.tiny_models import save_tiny
from torch import Tensor

from kvik.kernels.rounding import round_tokens
from kvik.models.model_spec import ModelSpec, read_model_spec
from kvik.quantize import factors as module
from kvik.quantize.block import Block, BlockInputs, unwatched
from kvik.quantize.factors import (
    Folded,
    InputStatistics,
    clip,
    divided,
    fold_block,
    kept_scales,
    scale_inputs,
    search_clip,
    search_scaling,
    smoothing_scales,
)
from kvik.quantize.gptq import rtn
from kvik.quantize.model_blocks import walk
from kvik.quantize.quantised import Grid, Quantised
from kvik.quantize.recipe import ROW, TENSOR
from kvik.quantize.source import Fold, folds


def one_block(folder: Path, index: int = 0) -> tuple[ModelSpec, Block, BlockInputs]:
    """The spec, a block, and what it reads."""
    spec = read_model_spec(folder)
    model = model_blocks(folder, 9, torch.float32)
    block, inputs, _ = next(islice(walk(model, random_windows(4, 9)), index, None))
    return spec, block, inputs


def of_block(spec: ModelSpec, block: Block, index: int = 0) -> list[Fold]:
    """Return the folds of a block by the names that its checkpoint has."""
    place = f".{index}."
    scope = block.layers[0].name.partition(place)[0]

    def stored(name: str) -> str:
        return scope + place + name.format(index).partition(place)[2]

    return [
        replace(f, readers=tuple(map(stored, f.readers)), source=stored(f.source))
        for f in folds(spec, index)
    ]


def drawn(fold: Fold, weights: Mapping[str, Tensor], statistics: InputStatistics) -> Tensor:
    """Return factors from 0.2 to 5, equal where required."""
    generator = torch.Generator().manual_seed(len(fold.readers))
    by_channel = torch.empty(fold.num_channels).uniform_(-1.6, 1.6, generator=generator).exp()
    return by_channel[fold.channels]


def put(block: Block, folded: Folded) -> None:
    for name, weight in folded.weights.items():
        block.set_weight(name, weight)
    for name, values in folded.tensors.items():
        block.set_tensor(name, values)


# Its file has all experts in one tensor.
STACKED = {"GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}}


# Models whose second block is of another kind than the first.
SECOND = (
    *("Gemma4", "DeepseekV2", "DeepseekV3", "Lfm2", "Qwen3_5", "Qwen3Next", "GraniteMoeHybrid"),
    *("NemotronH", "Cohere2Moe", "OlmoHybrid", "KimiLinear", "Laguna", "MiMoV2Flash"),
    *("Jamba", "HYV4", "MiniMax", "MiniMaxM3VL", "BailingHybrid", "Step3p7"),
)


@pytest.mark.parametrize(
    ("family", "index"),
    [
        *((family, 0) for family in (*FAMILIES, *STACKED)),
        *((family, 1) for family in SECOND),
        *(("Gemma3n", 2), ("Gemma4", 2), ("NemotronH", 2), ("NemotronH", 3)),
    ],
)
def test_outputs_do_not_change(tmp_path: Path, family: str, index: int) -> None:
    save_tiny(tmp_path, family, **{**FAMILIES, **STACKED}[family])
    spec, block, x = one_block(tmp_path, index=index)
    statistics = {layer.matrix: InputStatistics(layer.weight.shape[1]) for layer in block.layers}
    expected = block.run(x, unwatched)
    seen: list[dict[int, Tensor]] = [{}, {}]
    block.run(x, seen[0].setdefault)
    folded = fold_block(block, of_block(spec, block, index), statistics, lambda name: True, drawn)
    put(block, folded)
    torch.testing.assert_close(block.run(x, unwatched), expected, rtol=1e-4, atol=1e-4)
    # They did move: all except the inputs after a GELU and those without a norm.
    block.run(x, seen[1].setdefault)
    others = {
        "GPT2": (3,),
        "Starcoder2": (3,),
        "Mamba2": (2,),
        "Mamba": (1,),
        "FalconMamba": (1,),
        "Jamba": (1 + 1 + 2 * 4, 2 + 2),
        "GPTBigCode": (3,),
        "CodeGen": (1,),
        "Persimmon": (3,),
        "OPT": (3,),
        "BioGpt": (3,),
        "Bloom": (3,),
        "Mpt": (3,),
        "BitNet": (5,),  # gate and up are two matrices
        "OpenAIGPT": (1,),  # its norms have several readers
        "Nemotron": (3,),
        "Apertus": (3,),
        "Arcee": (3,),
        "GPTNeoX": (3,),
        "Falcon": (3,),
        "Olmo": (2,),
        "Olmo2": (2,),
        "Cohere2Moe": (2, 1 + 4 + 1),
        "Cohere2": (2,),
        "GptOss": (2 + 1 + 4,),
        "Glm5Next": (2,),  # of a delta net, its outputs and what the MLP reads
        "Gemma3n": (2,) * 3,  # attention is not the only reader of its norm
        "Gemma4": (3 + 2 * 4,) * 3,
        "GraniteMoeHybrid": (2 + 1 + 2 + 2 * 4,) * 2,  # and those of the MLP for all tokens
        "NemotronH": (2, 1, 2, 1 + 1 + 4),  # nothing after squared ReLU
        "Qwen3Moe": (2 + 1 + 2 * 6,),  # the router, and two per expert
        "DeepseekV2": (5, 3 + 1 + 2 * 6 + 2),
        "DeepseekV3": (6, 4 + 1 + 2 * 6 + 2),
        "AXK1": (4 + 1 + 2 * 6 + 2,),
        "MiniCPM3": (6,),
        "HunYuanMoEV1": (2 + 1 + 2 * 6 + 2,),
        "FalconH1": (1 + 1 + 1 + 1,),  # nothing from values to outputs
        "NanoChat": (1,),  # its norms have no gains
        "Qwen3_5": (5, 4),
        "OlmoHybrid": (5, 2),
        "GlmMoeDsa": (9,),
        "AXK2": (3,),
        "MiniMax": (1 + 6, 1 + 6),  # nothing after norms of which the residual stream continues
        "MiniMaxM3VL": (3, 12),
        "HYV4": (5, 3 + 1 + 6 + 2),  # nothing after clamped gates
        "KimiLinear": (5, 3 + 1 + 2 * 6 + 2),
        "BailingHybrid": (5, 4 + 1 + 2 * 6 + 2),
        "Step3p7": (4, 3 + 1 + 6 + 1),  # nothing after limits
        "Laguna": (5, 3 + 1 + 2 * 6 + 2),
        "Kolibri1": (2 + 1 + 2 * 6 + 2,),
        "MiMoV2Flash": (4, 2 + 1 + 2 * 6),
        "ModernBertDecoder": (3,),  # no norm before the first attention
        "Dbrx": (1 + 1 + 2 * 6,),  # nothing from clipped values to outputs
        "Flint": (2 + 1 + 2 * 6 + 2,),
        "Qwen3Next": (3 + 2 + 2 * 6 + 2, 2 + 2 + 2 * 6 + 2),
    }
    assert len(folded.scales) == others.get(family, (4, 4))[index]
    for matrix, given in seen[0].items():
        scaled = given / folded.scales[matrix] if matrix in folded.scales else given
        torch.testing.assert_close(seen[1][matrix], scaled, rtol=1e-4, atol=1e-4)
        # Earlier statistics are scaled to the new inputs.
        before, after = (InputStatistics(given.shape[1]) for _ in range(2))
        before.add(given)
        after.add(scaled)
        torch.testing.assert_close(folded.sample(matrix, before), after.sample)


def test_factors_serve_all_layers_that_are_rounded(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    spec, block, _ = one_block(tmp_path)
    statistics = {layer.matrix: InputStatistics(layer.weight.shape[1]) for layer in block.layers}
    served: list[list[str]] = []

    def find(fold: Fold, weights: Mapping[str, Tensor], inputs: InputStatistics) -> Tensor:
        served.append([name.rpartition(".")[2] for name in weights])
        return drawn(fold, weights, inputs)

    fold_block(
        block, of_block(spec, block), statistics, lambda name: not name.endswith("k_proj"), find
    )
    assert served == [["o_proj"], ["down_proj"], ["q_proj", "v_proj"], ["gate_proj", "up_proj"]]


def test_in_bfloat16_the_gain_is_not_rounded(tmp_path: Path) -> None:
    """Layers are multiplied by what the gain's rounding left of the factors."""
    save_tiny(tmp_path, "Llama", dtype="bfloat16")
    model = tmp_path / "model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({k: v.bfloat16() for k, v in load_file(model).items()}, model)
    spec, block, _ = one_block(tmp_path)
    statistics = {layer.matrix: InputStatistics(layer.weight.shape[1]) for layer in block.layers}
    folded = fold_block(block, of_block(spec, block), statistics, lambda name: True, drawn)
    name = "model.layers.0.input_layernorm.weight"
    q = block.layers[0]
    assert folded.tensors[name].dtype == torch.bfloat16
    before = block.tensors[name].float() * q.weight.float()
    after = folded.tensors[name].float() * folded.weights[q.name]
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)


def test_heads_that_share_a_value_share_its_factors() -> None:
    fold = Fold((), "v", torch.tensor([0, 1, 0, 1, 2, 3, 2, 3]), torch.arange(4))
    values = torch.tensor([1.0, 2.0, 3.0, 6.0, 5.0, 5.0, 9.0, 1.0])
    assert fold.average(values).tolist() == [2.0, 4.0, 2.0, 4.0, 7.0, 3.0, 7.0, 3.0]
    assert fold.of_channels(fold.average(values)).tolist() == [2.0, 4.0, 7.0, 3.0]


def test_dtypes_are_kept() -> None:
    weight, scales = torch.ones(4, 3).bfloat16(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    folded = divided(weight, scales[:, None])
    assert folded.dtype == torch.bfloat16
    assert torch.equal(folded[2], torch.full((3,), 1 / 3).bfloat16())
    assert scale_inputs(weight, torch.ones(3)).dtype == torch.float32


def test_factors_that_fit_a_gain() -> None:
    """W (s kept) times the rounded gain is W times the gain, unlike W s."""
    generator = torch.Generator().manual_seed(3)
    gain = torch.randn(64, generator=generator).bfloat16()
    scales = torch.empty(64).uniform_(0.1, 9, generator=generator)
    kept = kept_scales(gain, scales)
    folded = divided(gain, kept)
    torch.testing.assert_close(folded.float() * kept, gain.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(kept, scales, rtol=2**-8, atol=0)
    rounded = divided(gain, scales)
    assert torch.equal(rounded, folded)
    assert float((rounded.float() * scales - gain.float()).abs().max()) > 1e-4


def test_any_factor_fits_a_gain_of_zero() -> None:
    scales = torch.tensor([2.0, 3.0])
    assert kept_scales(torch.tensor([0.0, 3.0]), scales).tolist() == [2.0, 3.0]


def test_factors_that_do_not_fit_the_gain() -> None:
    """In fp16 it would be infinite or 0."""
    gain, scales = torch.tensor([1.0, 1.0, 2.0]).half(), torch.tensor([1e-6, 1e9, 4.0])
    kept = kept_scales(gain, scales)
    assert kept.tolist() == [1.0, 1.0, 4.0]
    assert divided(gain, kept).tolist() == [1.0, 1.0, 0.5]


# SmoothQuant: the same outputs before rounding, smaller errors after.


def outliers(tokens: int, inputs: int, seed: int) -> Tensor:
    """Return [tokens, inputs] with two inputs a hundred times as large, the purpose of
    SmoothQuant."""
    x = normal(tokens, inputs, seed=seed)
    x[:, [3, 40]] *= 100
    return x


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_the_formula(alpha: float) -> None:
    x, weights = outliers(50, 64, seed=0), [normal(8, 64, seed=1), normal(4, 64, seed=2) * 3]
    absmax = x.abs().amax(0)
    found = smoothing_scales(absmax, weights, alpha)
    for j in range(64):
        largest = max(float(w[:, j].abs().max()) for w in weights)
        expected = float(absmax[j]) ** alpha / largest ** (1 - alpha)
        assert found[j].item() == pytest.approx(expected, rel=1e-5)
    # At one half, inputs become as hard to round as weights.
    if alpha == 0.5:
        scaled = torch.cat([scale_inputs(w, found) for w in weights])
        torch.testing.assert_close(absmax / found, scaled.abs().amax(0))


def test_dead_inputs_keep_the_factor_one() -> None:
    x, w = normal(20, 8, seed=5), normal(4, 8, seed=6)
    x[:, 2], w[:, 5] = 0.0, 0.0
    scales = smoothing_scales(x.abs().amax(0), [w])
    assert scales[2] == 1.0 and scales[5] == 1.0
    assert scales.isfinite().all() and (scales > 0).all()


def test_eight_bits_by_eight_bits_with_outliers() -> None:
    x, w = outliers(200, 64, seed=7), normal(32, 64, seed=8)
    exact = x @ w.t()

    def off(smoothing: Tensor) -> float:
        weight = rtn(scale_inputs(w, smoothing), Grid(8, ROW, True)).dequantised()
        return float((round_tokens(x / smoothing) @ weight.t() - exact).norm() / exact.norm())

    assert off(smoothing_scales(x.abs().amax(0), [w])) < 0.5 * off(torch.ones(64))


# AWQ: the search minimises its loss, with the final quantiser.

INT4 = Grid(4, 32, False)


def awq(w: Tensor, scales: Tensor, limits: Tensor | None, grid: Grid) -> Quantised:
    """Quantise W diag(s), for a layer with inputs x / s.

    Args:
        w: [outputs, inputs].
        scales: [inputs], of `search_scaling`.
        limits: of `search_clip` with W diag(s) and x / s; None: no weight is clipped.

    Raises:
        ValueError: as `Grid.fit`.
    """
    scaled = scale_inputs(w, scales)
    return rtn(scaled if limits is None else clip(scaled, limits), grid)


def salient(tokens: int, inputs: int, seed: int) -> Tensor:
    """Return [tokens, inputs], one input in sixteen ten times as large."""
    sizes = torch.ones(inputs)
    sizes[::16] = 10.0
    return normal(tokens, inputs, seed=seed) * sizes


def output_error(w: Tensor, rounded: Tensor, x: Tensor) -> float:
    return float(((rounded - w).double() @ x.double().t()).square().sum())


def scaled_error(w: Tensor, scales: Tensor, x: Tensor, grid: Grid) -> float:
    return output_error(w, awq(w, scales, None, grid).dequantised() / scales, x)


def by_definition(weights: list[Tensor], x: Tensor, grid: Grid, steps: int) -> Tensor:
    """Return s = mean |x|^alpha of the least || Q(W diag(s)) diag(s)^-1 X - W X ||^2, in fp64."""
    mean_abs, tried = x.abs().mean(0), list[tuple[float, Tensor]]()
    for step in range(steps + 1):
        s = mean_abs ** (step / steps)
        s = s / (s.max() * s.min()).sqrt()
        tried.append((sum(scaled_error(w, s, x, grid) for w in weights), s))
    return min(tried, key=lambda one: one[0])[1]


@pytest.mark.parametrize("group", [32, ROW, TENSOR])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("power", "piece"), [(0, 300), (1, module.PIECE)])  # parts of rows
def test_the_scales_are_those_of_the_definition(
    symmetric: bool, group: int, power: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    w, x, grid = normal(24, 64, seed=0), salient(200, 64, seed=1), Grid(3, group, symmetric)
    w /= x.abs().mean(0) ** power  # alpha 1 is best for power 1
    found = search_scaling([w], x, x.abs().mean(0), grid, steps=5)
    torch.testing.assert_close(found, by_definition([w], x, grid, 5))


def test_layers_that_share_inputs_are_searched_together() -> None:
    """The best scales for both differ from the best for either."""
    x = salient(200, 64, seed=6)
    first, second = normal(8, 64, seed=7), normal(40, 64, seed=8)
    second[:, ::16] *= 8  # large where the inputs are: scaling costs the others
    sets = [first], [second], [first, second]
    found = [search_scaling(weights, x, x.abs().mean(0), INT4) for weights in sets]
    for weights, scales in zip(sets, found, strict=True):
        torch.testing.assert_close(scales, by_definition(weights, x, INT4, 20))
    assert not torch.equal(found[0], found[1])


def test_scales_are_normalised_and_dead_inputs_harmless() -> None:
    w, x = normal(16, 64, seed=9), salient(100, 64, seed=10)
    x[:, 5] = 0.0
    mean_abs = x.abs().mean(0)
    found = search_scaling([w], x, mean_abs, INT4)
    assert found.isfinite().all() and found.max() > found.min() > 0
    assert float(found.max() * found.min()) == pytest.approx(1.0, rel=1e-5)
    assert found[5] == found.min()
    for dead in (torch.zeros(64), mean_abs):  # with the latter, every alpha has the same error
        nothing = search_scaling([w], torch.zeros(3, 64), dead, INT4)
        assert torch.equal(nothing, torch.ones(64))


def test_inputs_that_are_nearly_dead() -> None:
    """Factors stay small enough for the layer they are folded into."""
    w, x = normal(16, 64, seed=9), salient(100, 64, seed=10)
    x[:, 5] *= 1e-18
    found = search_scaling([w], x, x.abs().mean(0), INT4)
    assert 1 < float(found.max() / found.min()) <= 1.001e6


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, ROW, TENSOR])
def test_the_clip_is_the_best_of_those_tried(group: int, symmetric: bool) -> None:
    """Group by group, each with its own inputs."""
    w, x, grid = normal(6, 64, seed=15), salient(80, 64, seed=16), Grid(3, group, symmetric)
    limits = search_clip(w, x, grid, steps=5, smallest=0.5)
    width = grid.width(64)
    assert limits.shape == ((1, 1) if group == TENSOR else (6, 64 // width))
    rows = [slice(0, 6)] if group == TENSOR else [slice(o, o + 1) for o in range(6)]
    shares = [1 - 0.1 * step for step in range(6)]
    chosen = set()
    for r, row in enumerate(rows):
        for g in range(64 // width):
            columns = slice(g * width, (g + 1) * width)
            part, own = w[row, columns], x[:, columns]
            most = float(part.abs().max())
            losses = []
            for share in shares:
                cut = part.clamp(-share * most, share * most)
                rounded = rtn(cut, Grid(3, group, symmetric)).dequantised()
                losses.append(output_error(part, rounded, own))
            best = shares[losses.index(min(losses))]
            assert limits[r, g].item() == pytest.approx(best * most, rel=1e-5)
            chosen.add(best)
    assert len(chosen) > 1 or group == TENSOR


def test_clip() -> None:
    w = torch.tensor([[1.0, -2.0, 3.0, -4.0], [0.1, 0.2, 0.3, 0.4]]).bfloat16()
    limits = torch.tensor([[1.5, 3.5], [9.0, 0.35]])
    expected = torch.tensor([[1.0, -1.5, 3.0, -3.5], [0.1, 0.2, 0.3, 0.35]])
    torch.testing.assert_close(clip(w, limits), expected, rtol=3e-3, atol=0)
    assert clip(w, torch.tensor([[2.5]])).tolist()[0] == [1.0, -2.0, 2.5, -2.5]
