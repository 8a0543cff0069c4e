"""Quantising the bundled model at load: it runs, and generates nearly the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.paged_model import PagedModel

import kvik
from kvik import LLM, SamplingParams
from kvik.kernels.torch_ops import TORCH
from kvik.text.tokenizer import Tokenizer

FOLDER = Path(kvik.__file__).parent / "bundled" / "stories"
TEXT = (
    "Once upon a time there lived an old king who had three daughters. The youngest of them was so "
    "kind that even the birds of the forest came to her window every morning and sang."
)
# Relative error of the logits on this text. Measured: 0.0168, 0.0076, 0.0946, 0.1188 and 0.0296; a
# third more is allowed.
DISTANCE = {"int8": 0.022, "int8-weight-only": 0.010, "int4": 0.125, "mxfp4": 0.158, "fp8": 0.039}


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return Tokenizer.load(FOLDER).encode(TEXT)


@pytest.fixture(scope="module")
def plain(ids: list[int]) -> torch.Tensor:
    return PagedModel(FOLDER, ops=TORCH).logits(ids)


@pytest.mark.parametrize("quantization", DISTANCE)
def test_logits_are_near_those_of_the_float_model(
    quantization: str, ids: list[int], plain: torch.Tensor
) -> None:
    found = PagedModel(FOLDER, ops=TORCH, quantization=quantization).logits(ids)
    distance = float((found - plain).norm() / plain.norm())
    assert 0.2 * DISTANCE[quantization] < distance < DISTANCE[quantization]


def scores_of(llm: LLM) -> torch.Tensor:
    """Return the log probability of each token of TEXT but the first."""
    (output,) = llm.score([TEXT])
    return torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:] if entry])


@pytest.mark.parametrize("quantization", DISTANCE)
def test_the_engine_generates(quantization: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = ["Once upon a time", "The fox", "A"]
    with LLM(quantization=quantization, device="cpu", threads=1, num_blocks=64) as llm:
        outputs = llm.generate(prompts, params)
        assert [output.num_output_tokens for output in outputs] == [12, 12, 12]
        assert all(output.text.strip() for output in outputs)
        scores = scores_of(llm)
        with LLM(device="cpu", threads=1, num_blocks=64) as plain:
            assert llm.resolved.memory.weights < 0.6 * plain.resolved.memory.weights
            off = (scores - scores_of(plain)).abs().mean()
    assert (
        0.001 < float(off) < 4 * DISTANCE[quantization]
    )  # the worker did quantise, with little loss


def test_random_weights() -> None:
    with LLM(
        str(FOLDER),
        quantization="int4",
        load_format="random",
        device="cpu",
        threads=1,
        num_blocks=64,
    ) as llm:
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert output.num_output_tokens == 3
