"""Indexers, by every backend, compared with their definition in float64."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_backends import NAMES, make_backend
from helpers.indexed import CASES, Texts, check_choice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_largest_scores_are_chosen(
    case: str, interleaved: bool, name: str, dtype: torch.dtype
) -> None:
    check_choice(case, make_backend(name), dtype, interleaved=interleaved)


@pytest.mark.parametrize("name", NAMES)
def test_a_choice_does_not_depend_on_chunks(name: str) -> None:
    whole = Texts([70], backend=make_backend(name)).step([(0, 70)])
    texts, chunked = Texts([70], backend=make_backend(name)), []
    for first, end in ((0, 5), (5, 12), (12, 13), (13, 70)):
        chunked += texts.step([(first, end - first)])
    assert all(torch.equal(*pair) for pair in zip(whole, chunked, strict=True))
