"""How quantised layers are written: config keys and tensors in the layouts of other engines.

kvik's own reader reads the config back, and the formats that it names write the tensors, so that
kvik loads what it writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvik.errors import ConfigError, shown
from kvik.kernels.fp8 import SQUARE
from kvik.nn.formats.base import LinearShape
from kvik.nn.formats.compressed_tensors import WEIGHT, IntQuantized, PackQuantized
from kvik.nn.formats.fp8 import BLOCK_SCALE, Fp8
from kvik.nn.formats.integers import Awq, Gptq
from kvik.nn.formats.registry import FORMATS
from kvik.quantize.quantised import Float8, Quantised
from kvik.quantize.recipe import ROW, Recipe
from kvik.spec.fields import Fields
from kvik.spec.stored_weights import HEAD, KEY, LINEAR, read_stored_quantization

Config = dict[str, object]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """How one linear layer is stored.

    Attributes:
        scales: dtype of stored scales, where the format does not fix it.
    """

    format: Awq | Gptq | PackQuantized | IntQuantized | Fp8
    scales: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of its required tensors."""
        tensors = self.format.tensors(self.scales).values()
        return sum(torch.Size(t.shape).numel() * t.dtype.itemsize for t in tensors)

    def tensors(self, quantised: Quantised | Float8) -> dict[str, Tensor]:
        """Return the tensors to store, by their names within the layer."""
        if isinstance(quantised, Float8):
            assert isinstance(self.format, Fp8)
            scales = quantised.scales, quantised.input_scale
            found = self.format.save(quantised.values, *scales)
            narrow = {name: found[name].to(self.scales) for name in found if name != WEIGHT}
            return {**found, **narrow}
        assert not isinstance(self.format, Fp8)
        codes = quantised.codes()
        codes = replace(codes, scales=codes.scales.to(self.scales))
        if isinstance(self.format, Awq) and codes.zeros is None:
            middle = torch.full_like(codes.scales, quantised.grid.middle, dtype=torch.uint8)
            codes = replace(codes, zeros=middle)
        return self.format.save(codes)


def layouts(
    recipe: Recipe, layers: Mapping[str, LinearShape], dtype: torch.dtype
) -> dict[str, LayerLayout]:
    """Return the layout of each quantised layer, by name.

    Args:
        layers: the linear layers of all blocks.
        dtype: of the model.

    Raises:
        ConfigError: a layer cannot be stored in the recipe's layout.
    """
    config = quantization_config(recipe, layers)
    stored = read_stored_quantization(Fields({KEY: config}), layers)
    assert stored is not None
    blocks = recipe.method == "fp8" and recipe.group_size == SQUARE[1]
    names = {BLOCK_SCALE: ()} if blocks else {}
    scales = dtype if recipe.layout == "compressed-tensors" else torch.float32
    if recipe.method == "fp8":
        scales = recipe.scale_dtype(dtype)
    found = {}
    for layer, shape in layers.items():
        scheme = stored.scheme(layer)
        if scheme is None:
            continue
        try:
            format = FORMATS[scheme.layout](scheme, shape, names)
        except ValueError as error:
            raise ConfigError(
                "method", f"{recipe.method} cannot store {shown(layer)}: {error}; skip it"
            ) from None
        assert isinstance(format, Awq | Gptq | PackQuantized | IntQuantized | Fp8)
        found[layer] = LayerLayout(format, scales)
    return found


def quantization_config(
    recipe: Recipe, layers: Iterable[str], outside: Iterable[str] = ()
) -> Config:
    """Return what config.json says of the layers.

    Args:
        layers: names of the linear layers of all blocks.
        outside: those of other linear layers, which stay floats.
    """
    names = list(layers)
    skipped = [*(name for name in names if not recipe.quantises(name)), *outside]
    match recipe.layout:
        case "awq":
            return _awq(recipe, skipped)
        case "gptq":
            return _gptq(recipe, skipped)
        case "fp8":
            return _fp8(recipe, skipped)
        case "compressed-tensors":
            return _compressed(recipe, names, skipped)


def _awq(recipe: Recipe, skipped: list[str]) -> Config:
    return {
        "quant_method": "awq",
        "bits": recipe.bits,
        "group_size": recipe.group_size,
        "version": "gemm",
        "zero_point": True,  # the layout always has them
        "modules_to_not_convert": [HEAD, *skipped],
    }


def _gptq(recipe: Recipe, skipped: list[str]) -> Config:
    config: Config = {
        "quant_method": "gptq",
        "bits": recipe.bits,
        "group_size": recipe.group_size,
        "damp_percent": recipe.damping,
        "desc_act": recipe.act_order and not recipe.static_groups and recipe.group_size > 0,
        "static_groups": recipe.static_groups,
        "sym": recipe.symmetric,
        "true_sequential": True,
        "lm_head": False,
        # Every tool reads the older format, but it has no zero points that are 0.
        "checkpoint_format": "gptq" if recipe.symmetric else "gptq_v2",
    }
    if skipped:
        config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in skipped}
    return config


def _fp8(recipe: Recipe, skipped: list[str]) -> Config:
    return {
        "quant_method": "fp8",
        "fmt": recipe.fp8_format,
        "activation_scheme": recipe.activation_scheme,
        "weight_block_size": list(SQUARE) if recipe.group_size == SQUARE[1] else None,
        "modules_to_not_convert": [HEAD, *skipped],
    }


def _compressed(recipe: Recipe, names: list[str], skipped: list[str]) -> Config:
    if recipe.method == "fp8":
        format = "float-quantized"
    else:
        format = "int-quantized" if recipe.rounds_activations else "pack-quantized"
    groups: Config = {"group_0": _group(recipe, [LINEAR], recipe.bits, format)}
    others = sorted({recipe.bits_of(name) for name in names} - {recipe.bits})
    for i, bits in enumerate(others, 1):
        # names go before classes of layers
        targets = [n for n in names if recipe.bits_of(n) == bits and recipe.quantises(n)]
        if targets:
            groups[f"group_{i}"] = _group(recipe, targets, bits, format)
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [HEAD, *skipped],
        "kv_cache_scheme": None,
    }


def _group(recipe: Recipe, targets: list[str], bits: int, format: str) -> Config:
    kind = "float" if recipe.method == "fp8" else "int"
    size = recipe.group_size
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": recipe.symmetric,
        "strategy": "group" if size > 0 else "channel" if size == ROW else "tensor",
        "group_size": size if size > 0 else None,
        "actorder": "weight" if recipe.act_order else None,  # groups are of neighbours
        "dynamic": False,
    }
    dynamic = recipe.activation_scheme == "dynamic"
    activations = {
        "num_bits": 8,
        "type": kind,
        "symmetric": True,
        "strategy": "token" if dynamic else "tensor",
        "dynamic": dynamic,
    }
    rounded = format != "pack-quantized"
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": activations if rounded else None,
        "output_activations": None,
        "format": format,
    }
