"""Every backend with windows that have sinks: visible keys, and queries rotated for sinks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.attention_backends import STEPS
from helpers.windows import sinks

from kvik.attention.base import AttentionSpec, HeadNorms

WINDOWS = [
    sinks(*pair) for pair in ((1, 1), (4, 20), (15, 2), (16, 16), (17, 40), (70, 9), (3, 600))
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_matches_the_definition(backend, make_step, name, window):
    step = make_step(STEPS[name]).with_rotation(window)
    for each in (step, replace(step, sink_rotation=None)):
        each.check(each.run(backend, window), window)


@pytest.mark.parametrize(("cached", "new"), [(0, 1), (0, 640), (1023, 1), (1500, 40), (1090, 3)])
@pytest.mark.parametrize("window", [sinks(4, 252), sinks(600, 30), sinks(520, 520)], ids=str)
def test_many_splits(backend, make_step, cached, new, window):
    step = make_step([(cached, new)], heads=2, kv_heads=1).with_rotation(window)
    step.check(step.run(backend, window), window)


def test_queries_are_normalised_before_rotation_for_sinks(backend, make_step):
    window = sinks(5, 9)
    plain = make_step(STEPS["mixed"]).with_rotation(window)
    dim = plain.q.shape[2]
    ones = HeadNorms(torch.ones(dim), torch.ones(dim), 1e-6)
    step = replace(plain, spec=AttentionSpec(0.3, ones))
    normal = plain.q * torch.rsqrt(plain.q.square().mean(-1, keepdim=True) + 1e-6)
    keys = []
    for all_keys, (cached, _) in zip(plain.keys, STEPS["mixed"], strict=True):
        new = all_keys[cached:]
        new = new * torch.rsqrt(new.square().mean(-1, keepdim=True) + 1e-6)
        keys.append(torch.cat((all_keys[:cached], new)))
    expected = replace(plain, q=normal, keys=keys).expected(window)
    torch.testing.assert_close(step.run(backend, window).double(), expected, rtol=1e-4, atol=2e-6)
