"""Weights of bitsandbytes: NF4 and FP4 in blocks (Dettmers et al. 2023, QLoRA), and integers of
eight bits (Dettmers et al. 2022, LLM.int8())."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.errors import shown
from kvik.kernels.weights import NUMBERS, Weight, float_weight, int8_weight, table_weight
from kvik.nn.formats.base import LinearShape, OutputAxis, Shapes, StoredTensor, TensorError
from kvik.nn.formats.bits import unpack_nibbles
from kvik.nn.formats.compressed_tensors import WEIGHT
from kvik.nn.formats.integers import finite
from kvik.spec.stored_weights import BNB_TABLES, StoredScheme
from kvik.spec.weights import loaded_kind

SCALES, MAP, STATE = "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__"
NESTED_SCALES, NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)  # weights that share a scale
NESTED_BLOCK = 256  # scales that share a scale
# Storage of codes, by the bytes of an element. Floats of 16 bits are interchangeable.
STORAGE = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}
TOLERANCE = 1e-6  # of the numbers of a table
MAX_STATE = 4096  # bytes of JSON, of which there are about 200


class Bnb4Bit:
    """The flattened weight [outputs * inputs / 2, 1], the even number in the high half of a byte,
    as bytes or as floats of the same bits; a scale for each block of it, fp32 or, with a second
    level of scales, the code of an entry of `weight.nested_quant_map`; the table of numbers; and
    sizes in JSON."""

    unread = ()

    def __init__(self, scheme: StoredScheme, shape: LinearShape, stored: Shapes) -> None:
        """See `GroupedFormat`."""
        if shape.inputs % 2:
            raise ValueError(f"its {shape.inputs} inputs do not fill bytes of two codes")
        self.scheme, self.shape = scheme, shape
        self.count = shape.outputs * shape.inputs
        self.number = scheme.layout.removeprefix("bnb-")
        self.state = f"{STATE}{self.number}"
        self.state_bytes = min(math.prod(stored.get(self.state, (0,))), MAX_STATE)
        self.nested = NESTED_SCALES in stored
        scales = math.prod(stored.get(SCALES, ()))
        sizes = (size for size in BLOCKS if -(-self.count // size) == scales)
        self.block = next(sizes, scheme.group)
        elements = math.prod(stored.get(WEIGHT, ()))
        widths = (width for width in STORAGE if elements * width * 2 == self.count)
        self.width = next(widths, 1)

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        per_element = 2 * self.width
        tensors = {
            WEIGHT: self._tensor(per_element, STORAGE[self.width], 1),
            SCALES: self._tensor(self.block, torch.uint8 if self.nested else torch.float32),
            MAP: StoredTensor((len(NUMBERS["nf4"]),), torch.float32),
            self.state: StoredTensor((self.state_bytes,), torch.uint8),
        }
        if self.nested:
            tensors[NESTED_SCALES] = self._tensor(self.block * NESTED_BLOCK, torch.float32)
            tensors[NESTED_MAP] = StoredTensor((256,), torch.float32)
        return tensors

    def _tensor(self, per_entry: int, dtype: torch.dtype, *more: int) -> StoredTensor:
        """Return a tensor with an entry for each `per_entry` weights of the flattened matrix."""
        shared = math.gcd(per_entry, self.shape.inputs)
        axis = OutputAxis(0, per_entry // shared, self.shape.inputs // shared)
        because = f"{self.number} in blocks of {self.block}"
        return StoredTensor((-(-self.count // per_entry), *more), dtype, axis, because=because)

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        offset = self._checked(tensors)
        inputs, block = self.shape.inputs, self.block
        # The rows begin and end with whole bytes, but perhaps within a block.
        first, end = rows.start * inputs, rows.stop * inputs
        packed = self._bytes(tensors[WEIGHT])[first // 2 : end // 2].view(-1, inputs // 2)
        packed = packed << 4 | packed >> 4
        scales = self._scales(tensors, slice(first // block, -(-end // block)), offset)
        step = math.gcd(block, inputs)  # of weights with one scale, however the rows begin
        starts = torch.arange(first, end, step, device=packed.device)
        scales = scales[starts // block - first // block].view(len(packed), -1)
        kind = loaded_kind(self.scheme, inputs)
        table = BNB_TABLES[self.scheme.layout]
        if kind is not None:
            parts = step // kind.group
            return table_weight(table, packed, scales.repeat_interleave(parts, 1), kind.group)
        numbers = torch.tensor(NUMBERS[table], device=packed.device)
        values = numbers[unpack_nibbles(packed).int()].view(*scales.shape, -1)
        return float_weight(values.mul_(scales[:, :, None]).flatten(1))

    def _bytes(self, weight: Tensor) -> Tensor:
        if weight.itemsize != self.width:
            expected = f"must be of {self.width} bytes an element by its shape"
            raise TensorError(WEIGHT, f"{expected}, not {weight.itemsize}")
        return weight.flatten().view(torch.uint8)

    def _scales(self, tensors: Mapping[str, Tensor], blocks: slice, offset: float) -> Tensor:
        """Return the scales of some blocks, fp32."""
        scales = tensors[SCALES][blocks]
        if not self.nested:
            return finite(SCALES, scales).float()
        index = torch.arange(blocks.start, blocks.stop, device=scales.device) // NESTED_BLOCK
        factors = tensors[NESTED_SCALES].float()[index]
        numbers = finite(NESTED_MAP, tensors[NESTED_MAP].float())[scales.int()]
        return finite(NESTED_SCALES, numbers * factors + offset)

    def _checked(self, tensors: Mapping[str, Tensor]) -> float:
        """Check the facts about the layer, and return what is added to its scales: 0 if these are
        not quantised.

        Raises:
            TensorError: the layer is stored in another way than its tensors' shapes say.
        """
        facts = self._facts(tensors)
        expected: dict[str, object] = {
            "quant_type": self.number,
            "blocksize": self.block,
            "shape": [self.shape.outputs, self.shape.inputs],
        }
        expected |= {"nested_blocksize": NESTED_BLOCK} if self.nested else {}
        for name, value in expected.items():
            if facts.get(name) != value:
                message = f"must hold {name} {shown(value)}, not {shown(facts.get(name))}"
                raise TensorError(self.state, message)
        offset = facts.get("nested_offset") if self.nested else 0.0
        if not isinstance(offset, float) or not math.isfinite(offset):
            message = f"must hold a finite nested_offset, not {shown(offset)}"
            raise TensorError(self.state, message)
        table = tensors[MAP].float().cpu()
        numbers = torch.tensor(NUMBERS[BNB_TABLES[self.scheme.layout]])
        if not bool(((table - numbers).abs() < TOLERANCE).all()):
            raise TensorError(MAP, f"must hold the numbers of {self.number}")
        return offset

    def _facts(self, tensors: Mapping[str, Tensor]) -> Mapping[str, object]:
        try:
            facts = json.loads(bytes(tensors[self.state].tolist()))
        except (RecursionError, ValueError):
            facts = None
        if not isinstance(facts, dict):
            raise TensorError(self.state, "must hold a JSON object")
        return facts


class Bnb8Bit:
    """weight [outputs, inputs] int8 and SCB [outputs], 127 times the scales; perhaps weight_format,
    0 for this order."""

    unread = ()

    def __init__(self, scheme: StoredScheme, shape: LinearShape, stored: Shapes) -> None:
        """See `GroupedFormat`."""
        self.shape = shape
        self.has_order = "weight_format" in stored

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        outputs, inputs = self.shape.outputs, self.shape.inputs
        tensors = {
            WEIGHT: StoredTensor((outputs, inputs), torch.int8, OutputAxis()),
            "SCB": StoredTensor((outputs,), torch.float32, OutputAxis()),
        }
        if self.has_order:
            tensors["weight_format"] = StoredTensor((), torch.uint8)
        return tensors

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        if self.has_order and int(tensors["weight_format"]):
            raise TensorError("weight_format", "must be 0, by rows")
        scales = finite("SCB", tensors["SCB"][rows]).float() / 127
        return int8_weight(tensors[WEIGHT][rows], scales, quantize_activations=False)
