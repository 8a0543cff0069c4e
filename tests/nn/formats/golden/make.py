"""Makes golden.safetensors: small layers as the public tools pack them.

    python make.py AUTOAWQ AUTOGPTQ     with compressed-tensors 0.20 installed

where the arguments are the unpacked sources of autoawq 0.2.9 and of auto-gptq 0.7.1; of each one
file is run, which needs nothing but torch. For each case the file holds what the tool was given
(`q`, `scales`, `zeros`, `groups`: see `kvik.nn.formats.integers.Codes`; of floats `values`) and,
behind `stored.`, the tensors that it made.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor

OUTPUTS, INPUTS = 32, 96
GENERATOR = torch.Generator().manual_seed(0)


def integers(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR)


def made(bits: int, groups: int, symmetric: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a quantised layer with scales of `dtype`."""
    scales = (torch.rand(OUTPUTS, groups, generator=GENERATOR) * 0.1 + 0.01).to(dtype)
    found = {"q": integers(2**bits, OUTPUTS, INPUTS).to(torch.uint8), "scales": scales}
    if not symmetric:
        # The older GPTQ format has no zero points of 0.
        found["zeros"] = integers(2**bits, OUTPUTS, groups, low=1).to(torch.uint8)
    return found


def floats(layer: dict[str, Tensor], bits: int) -> Tensor:
    """Return the input of the tools: the dequantised codes."""
    groups = layer.get("groups")
    if groups is None:
        count = layer["scales"].shape[1]
        groups = torch.arange(INPUTS) // (INPUTS // count)
    scales = layer["scales"].float()[:, groups]
    zeros = layer["zeros"][:, groups].float() if "zeros" in layer else 2 ** (bits - 1)
    return (layer["q"].float() - zeros) * scales


def module(path: Path, stubs: dict[str, dict[str, Any]]) -> types.ModuleType:
    """Load one file of a package without its other imports."""
    for name, attributes in stubs.items():
        stub = types.ModuleType(name)
        stub.__dict__.update(attributes)
        sys.modules[name] = stub
    loaded = types.ModuleType(path.stem)
    exec(compile(path.read_text(), path, "exec"), loaded.__dict__)
    return loaded


def awq(source: Path) -> dict[str, dict[str, Tensor]]:
    stubs: dict[str, dict[str, Any]] = {
        "awq": {},
        "awq.utils": {},
        "awq.utils.module": {"try_import": lambda name: (None, "")},
        "awq.utils.utils": {"get_best_device": lambda: "cpu"},
        "awq.utils.packing_utils": {"dequantize_gemm": None},
    }
    gemm = module(source / "awq/modules/linear/gemm.py", stubs)
    layer = made(4, 3, False, torch.float16)
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = floats(layer, 4)
    packed = gemm.WQLinear_GEMM.from_linear(
        linear, 4, 32, scales=layer["scales"].t().float(), zeros=layer["zeros"].t().float()
    )
    return {"awq": layer | stored(packed, "qweight", "qzeros", "scales")}


def gptq(source: Path) -> dict[str, dict[str, Tensor]]:
    folder = source / "auto_gptq/nn_modules/qlinear"
    found = {}
    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            for ordered in (False, True):
                cuda = module(folder / "qlinear_cuda.py", {})
                layer = made(bits, 3, symmetric, torch.float16)
                groups = torch.arange(INPUTS) // 32
                if ordered:
                    layer["groups"] = groups[torch.randperm(INPUTS, generator=GENERATOR)]
                    groups = layer["groups"]
                linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False).half()
                linear.weight.data = floats(layer, bits)
                packed = cuda.QuantLinear(bits, 32, INPUTS, OUTPUTS, False)
                middle = torch.full((OUTPUTS, 3), 2 ** (bits - 1))
                zeros = layer.get("zeros", middle).float()
                packed.pack(linear, layer["scales"].float(), zeros, groups.to(torch.int32))
                name = f"gptq-{bits}-{'sym' if symmetric else 'asym'}{'-order' * ordered}"
                made_of = stored(packed, "qweight", "qzeros", "scales", "g_idx")
                made_of["stored.scales"] = made_of["stored.scales"].half()
                found[name] = layer | made_of
    return found


def stored(packed: Any, *names: str) -> dict[str, Tensor]:
    return {f"stored.{name}": getattr(packed, name).clone().contiguous() for name in names}


def compressed() -> dict[str, dict[str, Tensor]]:
    found = {}
    for bits, strategy, symmetric, format in (
        (4, "group", True, "pack-quantized"),
        (4, "group", False, "pack-quantized"),
        (4, "channel", False, "pack-quantized"),
        (3, "group", True, "pack-quantized"),
        (3, "group", False, "pack-quantized"),
        (8, "group", True, "pack-quantized"),
        (8, "channel", False, "pack-quantized"),
        (8, "channel", True, "int-quantized"),
        (8, "tensor", True, "int-quantized"),
        (8, "group", True, "int-quantized"),
        (8, "channel", False, "int-quantized"),
    ):
        groups = 3 if strategy == "group" else 1
        layer = made(bits, groups, symmetric, torch.bfloat16)
        if strategy == "tensor":
            layer["scales"] = layer["scales"][:1].expand(OUTPUTS, 1).contiguous()
        middle = 2 ** (bits - 1)
        zeros = layer.get("zeros", torch.full((OUTPUTS, groups), middle, dtype=torch.uint8))
        scales = layer["scales"][0] if strategy == "tensor" else layer["scales"]
        zeros = (zeros.to(torch.int16) - middle).to(torch.int8)
        state = {
            "weight": floats(layer, bits),
            "weight_scale": scales.clone(),
            "weight_zero_point": zeros[0] if strategy == "tensor" else zeros,
        }
        arguments = {"group_size": 32} if strategy == "group" else {}
        weights = QuantizationArgs(
            num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, **arguments
        )
        name = f"{format}-{bits}-{strategy}-{'sym' if symmetric else 'asym'}"
        found[name] = layer | compress(format, state, weights)
    for strategy, shape in (("tensor", (1,)), ("channel", (OUTPUTS, 1)), ("block", (2, 3))):
        values = (torch.randn(OUTPUTS, INPUTS, generator=GENERATOR) * 50).to(torch.float8_e4m3fn)
        # Powers of two, so that dividing by them gives the same values again.
        scales = torch.pow(2.0, integers(0, *shape, low=-9).float())
        wide = scales
        if strategy == "block":
            wide = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
        state = {"weight": values.float() * wide, "weight_scale": scales}
        arguments = {"block_structure": [16, 32]} if strategy == "block" else {}
        weights = QuantizationArgs(num_bits=8, type="float", strategy=strategy, **arguments)
        layer = {"values": values, "scales": scales}
        found[f"float-quantized-{strategy}"] = layer | compress("float-quantized", state, weights)
    return found


def compress(format: str, state: dict[str, Tensor], weights: QuantizationArgs) -> dict[str, Tensor]:
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    made = BaseCompressor.get_value_from_registry(format).compress(state, scheme)
    return {f"stored.{name}": tensor.clone().contiguous() for name, tensor in made.items()}


if __name__ == "__main__":
    cases = awq(Path(sys.argv[1])) | gptq(Path(sys.argv[2])) | compressed()
    tensors = {
        f"{case}/{name}": tensor.to(torch.int32) if name == "groups" else tensor
        for case, layer in cases.items()
        for name, tensor in layer.items()
    }
    save_file(tensors, Path(__file__).with_name("golden.safetensors"))
