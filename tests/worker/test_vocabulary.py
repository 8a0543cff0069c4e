"""A draft model's logits and tokens in the words of its target."""

from __future__ import annotations

import torch

from kvik.worker.drafters.draft_model import Vocabulary

CPU = torch.device("cpu")


def test_equal_vocabularies_pass_through() -> None:
    same = Vocabulary(5, 5, None, CPU)
    logits, tokens = torch.randn(2, 5), torch.tensor([1, 4])
    assert same.same and same.widened(logits) is logits
    same.narrow_(tokens)
    assert tokens.tolist() == [1, 4]


def test_padding_is_cut_and_what_is_unknown_is_never_drafted() -> None:
    larger, smaller = Vocabulary(4, 6, None, CPU), Vocabulary(6, 4, None, CPU)
    logits = torch.tensor([[0.0, 1, 2, 3, 4, 5]])
    assert not larger.same and not smaller.same
    assert larger.widened(logits).tolist() == [[0, 1, 2, 3]]
    assert smaller.widened(logits[:, :4]).tolist() == [[0, 1, 2, 3, -torch.inf, -torch.inf]]


def test_other_ids_are_mapped_both_ways() -> None:
    mapped = Vocabulary(4, 3, (3, -1, 0), CPU)  # of a draft model with three tokens
    assert mapped.widened(torch.tensor([[7.0, 8, 9]])).tolist() == [[9, -torch.inf, -torch.inf, 7]]
    tokens = torch.tensor([0, 3, 1])  # the last it does not know
    mapped.narrow_(tokens)
    assert tokens.tolist() == [2, 0, 0]
