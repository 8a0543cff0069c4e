"""Layers of AutoAWQ, AutoGPTQ and compressed-tensors are read exactly and written byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.stored_layers import (
    awq_config,
    compressed_config,
    fp8_config,
    golden,
    gptq_config,
    meaning,
    read,
)
from torch import Tensor

from kvik.kernels.weights import Weight
from kvik.nn.formats.base import LinearShape
from kvik.nn.formats.fp8 import Fp8
from kvik.nn.formats.integers import Codes
from kvik.nn.formats.registry import choose_format
from kvik.spec.stored_weights import StoredScheme
from kvik.spec.weight_kind import WeightKind
from kvik.spec.weights import loaded_kind

SHAPE = LinearShape(inputs=96, outputs=32)

INTEGERS: dict[str, dict[str, Any]] = {"awq": awq_config()}
for bits in (2, 3, 4, 8):
    for word, sym in (("sym", True), ("asym", False)):
        config = gptq_config(bits=bits, sym=sym)
        INTEGERS[f"gptq-{bits}-{word}"] = config
        INTEGERS[f"gptq-{bits}-{word}-order"] = config | {"desc_act": True}
for name in (
    "pack-quantized-4-group-sym",
    "pack-quantized-4-group-asym",
    "pack-quantized-4-channel-asym",
    "pack-quantized-3-group-sym",
    "pack-quantized-3-group-asym",
    "pack-quantized-8-group-sym",
    "pack-quantized-8-channel-asym",
    "int-quantized-8-channel-sym",
    "int-quantized-8-tensor-sym",
    "int-quantized-8-group-sym",
    "int-quantized-8-channel-asym",
):
    head, number, strategy, word = name.rsplit("-", 3)
    INTEGERS[name] = compressed_config(
        head,
        num_bits=int(number),
        strategy=strategy,
        symmetric=word == "sym",
        group_size=32 if strategy == "group" else None,
    )


def layer_of(case: str) -> tuple[dict[str, Tensor], dict[str, Tensor], StoredScheme, Any]:
    given, stored = golden(case)
    assert stored
    scheme = read(INTEGERS[case]).scheme("model.layers.0.mlp.down_proj")
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    format = choose_format("layer", shapes, scheme, SHAPE)
    wanted = format.tensors(torch.float32)
    assert {name: tensor.shape for name, tensor in wanted.items()} == {
        name: shapes[name] for name in wanted
    }
    assert not set(stored) - set(wanted) - set(format.unread)
    return given, stored, scheme, format


@pytest.mark.parametrize("case", INTEGERS)
def test_packed_layers_of_other_tools_are_read_exactly(case: str) -> None:
    given, stored, scheme, format = layer_of(case)
    expected = meaning(given, scheme.bits)
    whole: Weight = format.weight(stored, slice(0, 32))
    assert torch.equal(whole.dequantized(), expected)
    loaded = loaded_kind(scheme, SHAPE.inputs)
    assert whole.kind == (loaded or WeightKind("float32"))
    # Runs, also with ends within a word.
    for first, last in ((0, 8), (8, 32), (3, 5), (7, 13), (31, 32)):
        run = format.weight(stored, slice(first, last))
        assert torch.equal(run.dequantized(), expected[first:last])


@pytest.mark.parametrize("case", INTEGERS)
def test_the_same_bytes_are_written(case: str) -> None:
    given, stored, scheme, format = layer_of(case)
    codes = Codes(given["q"], given["scales"], given.get("zeros"), scheme.bits, given.get("groups"))
    written = format.save(codes)
    assert set(written) == set(stored)
    for name, tensor in written.items():
        assert tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name]), name
        assert tensor.is_contiguous()
    back = format.codes(written, slice(0, 32))
    assert torch.equal(back.q, codes.q) and torch.equal(back.scales, codes.scales)
    assert (back.zeros is None) == (codes.zeros is None)
    if back.zeros is not None and codes.zeros is not None:
        assert torch.equal(back.zeros, codes.zeros)


FLOATS = {
    "float-quantized-tensor": {"strategy": "tensor"},
    "float-quantized-channel": {"strategy": "channel"},
    "float-quantized-block": {"strategy": "block", "block_structure": [16, 32]},
}


@pytest.mark.parametrize("case", FLOATS)
@pytest.mark.parametrize("format_name", ["float-quantized", "naive-quantized", "fp8"])
def test_floats_of_eight_bits(case: str, format_name: str) -> None:
    given, stored = golden(case)
    config = compressed_config(
        format_name, **{"num_bits": 8, "type": "float", "group_size": None} | FLOATS[case]
    )
    if format_name == "fp8":
        if "channel" in case:
            config = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}
        else:
            block = FLOATS[case].get("block_structure")
            config = fp8_config(weight_block_size=block)
            stored["weight_scale_inv"] = stored.pop("weight_scale")
    scheme = read(config).scheme("model.layers.0.mlp.down_proj")
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    format = choose_format("layer", shapes, scheme, SHAPE)
    assert isinstance(format, Fp8) and set(format.tensors(torch.float32)) == set(stored)
    values, scales = given["values"].float(), given["scales"]
    expected = torch.empty(32, 96)
    for o in range(32):
        for i in range(96):
            at = {"tensor": (0,), "channel": (o, 0), "block": (o // 16, i // 32)}
            expected[o, i] = values[o, i] * scales[at[case.rsplit("-", 1)[1]]]
    assert torch.equal(format.weight(stored, slice(0, 32)).dequantized(), expected)
    assert torch.equal(format.weight(stored, slice(15, 18)).dequantized(), expected[15:18])
    written = format.save(given["values"], scales)
    assert set(written) == set(stored)
    assert torch.equal(written["weight"].view(torch.uint8), stored["weight"].view(torch.uint8))
    scale = next(name for name in stored if "scale" in name)
    assert torch.equal(written[scale], stored[scale].float())
