"""Every backend with windows that have sinks: visible keys, and queries rotated for sinks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.attention_backends import KV_FORMATS, STEPS, one_sequence
from helpers.windows import as_window, sinks

from kvik.attention.base import Attend, AttentionSpec, HeadNorms, LayerKV

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


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("window", [sinks(3, 20), sinks(18, 40)], ids=str)
def test_chunks_equal_one_prefill_to_the_bit(make_step, backend, window, kv_format):
    """Also in a batch, where the work is divided otherwise. "reference" and "sdpa" sum in another
    order."""
    dtype, kv_dtype = torch.bfloat16, KV_FORMATS[kv_format]
    total = 70
    whole = make_step([(0, total)], dtype=dtype, kv_dtype=kv_dtype, dim=32).with_rotation(window)
    expected = whole.run(backend, window)
    bound = 0 if backend.caps.name == "cpu" else 4e-2
    for chunk in (1, 13, 16, 33):
        kv = LayerKV(
            *(t if t is None else t.clone() for t in (whole.kv.k, whole.kv.v)),
            *(t if t is None else t.clone() for t in (whole.kv.k_scales, whole.kv.v_scales)),
        )
        for start in range(0, total, chunk):
            end = min(start + chunk, total)
            part = slice(start, end)
            layout = one_sequence(whole.layout.block_table, whole.layout.slot_mapping[part], end)
            of = whole.q[part].clone(), whole.k[part].clone(), whole.v[part]
            metadata = backend.plan(layout, as_window(window))
            rotation = whole.sink_rotation[part].contiguous()
            found = backend.run(Attend(*of, kv, metadata, whole.spec, sink_rotation=rotation))
            torch.testing.assert_close(found, expected[part], rtol=0, atol=bound)
