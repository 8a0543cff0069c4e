"""The loss of each format and method with the bundled model, on a story that no model was trained
on. `docs/quantisation.md` has the figures on more text."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.held_out import TEXT
from helpers.optional_native import NATIVE
from safetensors.torch import load_file, save_file

from kvik.cli.main import main
from kvik.config.config import EngineConfig
from kvik.config.model_source import BUNDLED
from kvik.evaluate.quality import Quality, measure_quality
from kvik.nn.checkpoint import SINGLE

WINDOW = 512
PLAIN = EngineConfig(device="cpu", threads=1, kernels="native" if NATIVE else "torch")
# Few and short, to be fast; with all of the text the methods have the same order.
CALIBRATION = ("--samples", "16", "--calib-tokens", "256")


def quality(**changed: object) -> Quality:
    config = replace(PLAIN, **changed)
    return measure_quality(config, [TEXT], window=WINDOW, reference=PLAIN)


@pytest.fixture(scope="module")
def nearest(folder: Path) -> Quality:
    return quantised(folder, "--method", "rtn")


@pytest.fixture(scope="module")
def plain() -> float:
    return measure_quality(PLAIN, [TEXT], window=WINDOW).perplexity


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the bundled model in fp32: products of bf16 take a CPU without
    instructions for them nine times as long, and calibration has many."""
    folder = tmp_path_factory.mktemp("quantised")
    copy = shutil.copytree(BUNDLED, folder / "model")
    weights = {name: tensor.float() for name, tensor in load_file(copy / SINGLE).items()}
    save_file(weights, copy / SINGLE)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    return folder


def quantised(folder: Path, *words: str) -> Quality:
    out = folder / "-".join(word.strip("-") for word in words)
    if not out.exists():
        without = words[1] == "rtn" or (words[1] == "fp8" and "static" not in words)
        flags = () if without else CALIBRATION
        options = (str(folder / "model"), "-o", str(out), "--eval", "none", "--no-speed")
        assert main(["quantize", *options, "--method", *words[1:], *flags]) == 0
    return quality(model=str(out))


@pytest.mark.full
@pytest.mark.parametrize(
    ("scheme", "bound", "divergence"),
    [("int8-weight-only", 0.005, 0.0012), ("int8", 0.01, 0.004), ("fp8", 0.01, 0.008)],
)
def test_eight_bits_at_load(scheme: str, bound: float, divergence: float, plain: float) -> None:
    found = quality(quantization=scheme)
    assert abs(found.perplexity / plain - 1) < bound
    assert 0 < found.divergence < divergence


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "bound", "divergence"),
    [
        (("--method", "rtn", "--bits", "8", "--group-size", "-1"), 0.005, 0.001),
        (("--method", "smoothquant"), 0.01, 0.005),
        pytest.param(("--method", "fp8"), 0.01, 0.012, marks=pytest.mark.nightly),
        (("--method", "fp8", "--activation-scheme", "static"), 0.01, 0.012),
    ],
)
def test_stored_eight_bits(
    words: tuple[str, ...], bound: float, divergence: float, plain: float, folder: Path
) -> None:
    found = quantised(folder, *words)
    assert abs(found.perplexity / plain - 1) < bound
    assert 0 < found.divergence < divergence


@pytest.mark.full
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibrated_four_bits_are_nearer_than_rounding(
    method: str, plain: float, folder: Path, nearest: Quality
) -> None:
    found = quantised(folder, "--method", method)
    assert found.perplexity / plain - 1 < 0.06
    assert found.divergence < 0.85 * nearest.divergence
    assert found.agreement > nearest.agreement
