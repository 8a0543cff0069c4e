"""Prompts of every form that callers give."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch

from kvik.errors import ParamError
from kvik.prompts import Infill, as_prompts, one_prompt

IDS = [5, 6, 7]


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("", [""]),
        ("a text", ["a text"]),
        ([], []),
        (np.array([], np.int64), []),
        (IDS, [IDS]),
        (array("H", IDS), [IDS]),
        (np.array(IDS), [IDS]),
        (torch.tensor(IDS), [IDS]),
        (list(np.array(IDS)), [IDS]),
        ([torch.tensor(5), 6], [[5, 6]]),
        (np.array([IDS, IDS]), [IDS, IDS]),
        ([np.array(IDS), tuple(IDS), "a"], [IDS, IDS, "a"]),
        ({"prompt": "a"}, ["a"]),
        ([{"prompt_token_ids": IDS}, {"prompt": "a"}], [IDS, "a"]),
        ([[], "a"], [[], "a"]),
        ({"prompt": "a", "suffix": ""}, [Infill("a", "")]),
        ([{"suffix": "b", "prompt": ""}, "a"], [Infill("", "b"), "a"]),
    ],
)
def test_prompts_become_texts_and_lists(given: Any, plain: list[Any]) -> None:
    found = as_prompts(given)
    assert found == plain
    assert all(type(one) is int for prompt in found if isinstance(prompt, list) for one in prompt)
    if len(plain) == 1 and plain[0]:
        assert one_prompt(given) == plain[0]


@pytest.mark.parametrize(
    "given",
    [
        *(None, 5, 1.5, b"a", {1}, [1.5], ["a", 5], [None], [b"a"], np.array(5), np.array([1.5])),
        *({"prompt": "a", "suffix": 5}, {"prompt": IDS, "suffix": "a"}, {"suffix": "a"}),
        *({"prompt": "", "suffix": ""}, {"prompt": "a", "suffix": "b", "text": "c"}),
        *({}, {"text": "a"}, {"prompt": "a", "prompt_token_ids": IDS}, {"prompt": {"prompt": "a"}}),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(given: Any) -> None:
    for read in (as_prompts, one_prompt):
        with pytest.raises(ParamError, match="^(prompt|suffix): "):
            read(given)


@pytest.mark.parametrize("given", ["", [], [IDS], ["a"], {"prompt": ""}, np.array([IDS])], ids=repr)
def test_one_prompt_is_one_and_not_empty(given: Any) -> None:
    with pytest.raises(ParamError, match="^prompt: must"):
        one_prompt(given)
