"""Losses, divergence and agreement beside torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from kvik.evaluate.distributions import compared, losses

ROWS, VOCAB = 21, 50  # more rows than are widened at a time


@pytest.fixture
def logits() -> torch.Tensor:
    return 4 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def reference(logits: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(2))
    return logits + 0.5 * noise


def test_losses(logits: torch.Tensor) -> None:
    ids = torch.arange(ROWS) % VOCAB
    expected = cross_entropy(logits.double(), ids, reduction="none")
    torch.testing.assert_close(losses(logits, ids), expected)


def test_divergence_is_from_the_reference_to_the_model(
    logits: torch.Tensor, reference: torch.Tensor
) -> None:
    found = compared(logits, reference)
    p, q = (x.double().log_softmax(-1) for x in (reference, logits))
    expected = kl_div(q, p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found.divergence, expected)
    other = compared(reference, logits).divergence
    assert not torch.allclose(found.divergence, other, rtol=1e-3)
    assert torch.equal(found.agrees, logits.argmax(-1) == reference.argmax(-1))
    assert 0 < int(found.agrees.sum()) < ROWS


def test_equal_models_do_not_differ(logits: torch.Tensor) -> None:
    found = compared(logits, logits + 3)  # softmax forgets a constant, rounding does not quite
    assert float(found.divergence.abs().max()) < 1e-12
    assert bool(found.agrees.all())


def test_a_small_divergence_is_not_lost_in_rounding(logits: torch.Tensor) -> None:
    off = torch.zeros(VOCAB)
    off[3] = 1e-4
    found = compared(logits, logits + off).divergence
    p = logits.double().softmax(-1)[:, 3]
    expected = p * (1 - p) * 1e-8 / 2  # to second order
    torch.testing.assert_close(found, expected, rtol=0.05, atol=1e-13)


def test_impossible_tokens(logits: torch.Tensor) -> None:
    masked = logits.clone()
    masked[:, 7] = -torch.inf
    both = compared(masked, masked.clone())
    assert torch.equal(both.divergence, torch.zeros(ROWS, dtype=torch.float64))
    lost = compared(masked, logits)  # what the reference allows and the model does not
    assert bool(lost.divergence.isinf().all())
    assert bool(compared(logits, masked).divergence.isfinite().all())
