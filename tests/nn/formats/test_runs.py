"""Runs of outputs of a layer equal those of the whole, with any start and end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.stored_layers import awq_config, compressed_config, gptq_config, read
from helpers.stored_models import multiplied_out, rounded

from kvik.nn.formats.base import LinearShape
from kvik.nn.formats.compressed_tensors import PackQuantized
from kvik.nn.formats.registry import FORMATS

INT8 = {"num_bits": 8, "strategy": "channel", "group_size": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": awq_config(),
    "gptq": gptq_config(sym=False),
    "gptq-3": gptq_config(sym=False, bits=3),
    "gptq-8": gptq_config(sym=False, bits=8, desc_act=True),
    "packed": compressed_config(symmetric=False),
    "packed-3": compressed_config(symmetric=False, num_bits=3),
    "packed-8": compressed_config(symmetric=False, num_bits=8),
    "int8": compressed_config("int-quantized", symmetric=False, **INT8),
}
RUNS = ((0, 32), (32, 64), (40, 72), (31, 33), (64, 96), (95, 96))


@pytest.mark.parametrize("case", CONFIGS)
def test_runs(case: str) -> None:
    scheme = read(CONFIGS[case]).scheme("model.layers.0.mlp.down_proj")
    format = FORMATS[scheme.layout](scheme, LinearShape(64, 96), {})
    w = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    # Scales and zero points differ between outputs.
    codes = rounded(w * torch.arange(1, 97)[:, None] / 100 + w[:, :1] / 2, scheme)
    tensors, expected = format.save(codes), multiplied_out(codes)
    for first, last in RUNS:
        run = format.weight(tensors, slice(first, last))
        assert torch.equal(run.dequantized(), expected[first:last])


def test_a_last_word_that_is_not_full() -> None:
    """36 zero points of three bits, the last of which are in a separate word."""
    scheme = read(CONFIGS["packed-3"]).scheme("model.layers.0.mlp.down_proj")
    format = PackQuantized(scheme, LinearShape(64, 36), {})
    codes = rounded(torch.randn(36, 64, generator=torch.Generator().manual_seed(1)), scheme)
    tensors = format.save(codes)
    assert tensors["weight_zero_point"].shape == (4, 2)
    for first, last in ((0, 36), (32, 36), (30, 35)):
        run = format.weight(tensors, slice(first, last))
        assert torch.equal(run.dequantized(), multiplied_out(codes)[first:last])
