"""What the reference makes of penalties; `test_cases.py` holds the others to it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from kvik.kernels.ops import Penalties
from kvik.kernels.reference.ops import REFERENCE


def penalised(logits: Tensor, prompt: list[int], output: list[int], **values: float) -> Tensor:
    """One penalised row between two that must stay as they are."""
    vocab = logits.shape[0]
    in_prompt = torch.zeros(1, vocab, dtype=torch.bool)
    in_prompt[0, prompt] = True
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab)
    defaults = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}
    columns = {k: torch.tensor([v]) for k, v in {**defaults, **values}.items()}
    batch = torch.stack((logits, logits, logits))
    penalties = Penalties(
        rows=torch.tensor([1]),
        seen=torch.tensor([0]),
        in_prompt=in_prompt,
        counts=counts[None].int(),
        **columns,
    )
    REFERENCE.penalize(batch, penalties)
    assert torch.equal(batch[0], logits) and torch.equal(batch[2], logits)
    return batch[1]


def test_repetition_matches_transformers() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0))
    prompt, output = [1, 2, 3, 3], [3, 7, 7, 39]
    for value in (0.5, 1.3, 10.0):
        expected = RepetitionPenaltyLogitsProcessor(value)(
            torch.tensor([prompt + output]), logits[None]
        )
        found = penalised(logits, prompt, output, repetition=value)
        torch.testing.assert_close(found, expected[0])


def test_frequency_and_presence_count_the_output_alone() -> None:
    logits = torch.zeros(5)
    assert penalised(logits, [0, 1], [1, 2, 2], frequency=0.5).tolist() == [0, -0.5, -1, 0, 0]
    assert penalised(logits, [0, 1], [1, 2, 2], presence=0.5).tolist() == [0, -0.5, -0.5, 0, 0]


def test_repetition_comes_before_the_subtractions() -> None:
    found = penalised(torch.tensor([4.0, -4.0]), [], [0, 1], repetition=2.0, presence=1.0)
    assert found.tolist() == [1.0, -9.0]


def test_impossible_tokens_stay_impossible() -> None:
    found = penalised(torch.tensor([-torch.inf, 1.0]), [0], [0], repetition=0.5, frequency=-2.0)
    assert found[0] == -torch.inf
