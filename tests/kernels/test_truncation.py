"""Truncation compared with the definitions and with transformers' warpers."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from kvik.kernels.ops import Draws, Truncation
from kvik.kernels.reference.draw import truncate
from kvik.kernels.torch_ops import TORCH, with_torch_for_others

NO_TOKENS = torch.empty(0, dtype=torch.int64)


def logits_of(rows: int, vocab: int, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * scale


def weights_of(logits: Tensor) -> Tensor:
    return (logits - logits.amax(-1, keepdim=True)).exp()


def rules(rows: int, vocab: int, **options: float) -> Truncation:
    dtypes = {"top_k": torch.int64, "min_p": torch.float32}
    return Truncation(
        **{
            k: torch.full((rows,), v, dtype=dtypes.get(k, torch.float64))
            for k, v in options.items()
        }
    )


WARPERS: dict[str, tuple[type[LogitsProcessor], list[float]]] = {
    "top_k": (TopKLogitsWarper, [1, 2, 7, 60, 99, 100]),
    "top_p": (TopPLogitsWarper, [0.01, 0.3, 0.5, 0.9, 0.999]),
    "min_p": (MinPLogitsWarper, [0.001, 0.05, 0.3, 1.0]),
    "typical_p": (TypicalLogitsWarper, [0.01, 0.2, 0.5, 0.9, 0.99]),
}


@pytest.mark.parametrize("vocab", [1, 2, 100, 3000])
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, values) in WARPERS.items() for value in values]
)
def test_matches_transformers(name: str, value: float, vocab: int) -> None:
    logits = logits_of(20, vocab)
    expected = WARPERS[name][0](value)(NO_TOKENS, logits)
    value = min(value, vocab) if name == "top_k" else value
    weights = truncate(weights_of(logits), rules(20, vocab, **{name: value}))
    assert torch.equal(weights > 0, expected.isfinite())
    shares = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(shares, expected.softmax(-1))


def test_order_of_the_rules_matches_transformers() -> None:
    logits = logits_of(50, 400)
    expected = logits
    for warper in (
        TopKLogitsWarper(80),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.02),
        TypicalLogitsWarper(0.8),
    ):
        expected = warper(NO_TOKENS, expected)
    all_rules = rules(50, 400, top_k=80, top_p=0.9, min_p=0.02, typical_p=0.8)
    weights = truncate(weights_of(logits), all_rules)
    assert torch.equal(weights > 0, expected.isfinite())


@pytest.mark.parametrize("vocab", [6, 3000])
def test_lower_ids_of_equally_likely_tokens_stay(vocab: int) -> None:
    weights = torch.full((2, vocab), 0.5)
    weights[:, 4] = 1.0
    kept = truncate(weights, rules(2, vocab, top_k=3))
    assert kept[0].nonzero()[:, 0].tolist() == [0, 1, 4]
    kept = truncate(weights, rules(2, vocab, top_p=2.0 / (vocab + 1)))  # exactly token 4's share
    assert kept[0].nonzero()[:, 0].tolist() == [4]
    kept = truncate(weights, rules(2, vocab, top_p=3.5 / (vocab + 1)))
    assert kept[0].nonzero()[:, 0].tolist() == [0, 1, 4]


def test_one_token_always_stays() -> None:
    logits = logits_of(30, 50)
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"typical_p": 1e-9}):
        kept = truncate(weights_of(logits), rules(30, 50, **options)).count_nonzero(-1)
        assert kept.tolist() == [1] * 30


@pytest.mark.parametrize("vocab", [64, 5000])
def test_rows_without_a_rule_are_unchanged(vocab: int) -> None:
    weights = weights_of(logits_of(3, vocab, scale=20.0))  # a tail too small to change a sum
    off = Truncation(
        top_k=torch.tensor([vocab, 5, vocab]),
        top_p=torch.tensor([1.0, 0.9, 1.0], dtype=torch.float64),
        min_p=torch.tensor([0.0, 0.1, 0.0]),
        typical_p=torch.tensor([1.0, 0.9, 1.0], dtype=torch.float64),
    )
    kept = truncate(weights, off)
    assert torch.equal(kept[0], weights[0]) and torch.equal(kept[2], weights[2])
    assert 1 <= int(kept[1].count_nonzero()) <= 5


@pytest.mark.parametrize("vocab", [300, 5000, 40000])
def test_a_row_does_not_depend_on_the_batch(vocab: int) -> None:
    """To the bit, although few large rows are sorted by another routine than many small ones, and
    bfloat16 logits have many ties."""
    weights = weights_of(logits_of(6, vocab).bfloat16().float())
    together = Truncation(
        top_k=torch.tensor([1, 7, 40, vocab, 20, vocab]),
        top_p=torch.tensor([1.0, 0.9, 0.5, 0.95, 1.0, 1.0], dtype=torch.float64),
        min_p=torch.tensor([0.0, 0.0, 0.1, 0.01, 0.0, 0.2]),
        typical_p=torch.tensor([1.0, 0.8, 1.0, 0.9, 1.0, 1.0], dtype=torch.float64),
    )
    kept = truncate(weights, together)
    for row in range(6):
        part = slice(row, row + 1)
        alone = Truncation(
            together.top_k[part],
            None if together.top_p[row] == 1 else together.top_p[part],
            None if together.min_p[row] == 0 else together.min_p[part],
            None if together.typical_p[row] == 1 else together.typical_p[part],
        )
        assert torch.equal(truncate(weights[part], alone)[0], kept[row])


def test_torch_samples_rows_with_rules_that_a_kernel_lacks() -> None:
    """Each row gets the same result as alone, and no rule is ignored silently."""
    rows: list[int] = []

    def known(truncation: Truncation, count: int) -> None:
        assert truncation.beyond(("top_k", "top_p")) is None
        rows.append(count)

    def draw(logits: Tensor, draws: Draws) -> Tensor:
        known(replace(draws.truncation, min_p=None), len(logits))
        return TORCH.draw(logits, draws)

    def probabilities(logits: Tensor, temperature: Tensor, truncation: Truncation) -> Tensor:
        known(replace(truncation, min_p=None), len(logits))
        return TORCH.probabilities(logits, temperature, truncation)

    ops = with_torch_for_others(
        replace(TORCH, draw=draw, probabilities=probabilities), ("top_k", "top_p")
    )
    logits = logits_of(4, 300)
    truncation = Truncation(top_k=torch.full((4,), 50), min_p=torch.tensor([0.0, 0.2, 0.0, 0.05]))
    uniforms = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    draws = Draws(torch.ones(4), uniforms, truncation)
    assert torch.equal(ops.draw(logits, draws), TORCH.draw(logits, draws))
    of_all = (logits, draws.temperature, truncation)
    assert torch.equal(ops.probabilities(*of_all), TORCH.probabilities(*of_all))
    assert rows == [2, 2]  # the other two were sampled by torch
    assert with_torch_for_others(TORCH, [one.name for one in fields(Truncation)]) is TORCH
