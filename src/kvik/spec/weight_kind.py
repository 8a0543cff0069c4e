"""How the weight of a linear layer is stored in memory: one description for all who must agree.

The memory plan, the loader, the kernels and engine folders read it. A new kind of weight begins
here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# How the inputs of a product are rounded: not at all, with a scale for each token, with one for
# each token and group of the weight's inputs, or with one that calibration has found.
Rounding = Literal["float", "token", "group", "static"]
FLOATS = ("float32", "bfloat16", "float16")
BITS = {"int8": 8, "int4": 4, "fp8": 8}

SCALE_BYTES = 4
# Of a group in the native kernels, which keep the size of an output's scales beside them.
NATIVE_GROUP_SCALE_BYTES = 2
ORDER_BYTES = 4
# Rows and inputs that a quantised matrix is filled up to on a GPU, and rows that share a counter.
GPU_TILE, GPU_COUNTED_ROWS = 128, 32

_NAME = re.compile(r"(w8a8|int8|int4|int4min|fp8) group ([0-9]{1,9})( [a-z]+)?")
_ROUNDED: dict[Rounding, str] = {
    "float": "",
    "token": " token",
    "group": " groups",
    "static": " static",
}


@dataclass(frozen=True, slots=True)
class WeightKind:
    """What is known of a weight before its values are.

    Attributes:
        codes: what a value is: a float dtype by its name, "int8", "int4" or "fp8" (E4M3).
        group: neighbouring inputs of an output that share a scale; 0: all of them.
        beside: what a group of int4 has beside its scale: "zeros", w = (q - zero) * scale;
            "minima", w = q * scale - minimum; "": w = (q - 8) * scale.
        activations: how the inputs of a product are rounded: of int8 to integers, of fp8 to E4M3.
        ordered: inputs are reordered, so that those of a group are neighbours (act-order of GPTQ).
    """

    codes: str
    group: int = 0
    beside: Literal["", "zeros", "minima"] = ""
    activations: Rounding = "float"
    ordered: bool = False

    @property
    def floats(self) -> bool:
        return self.codes not in BITS

    @property
    def bits(self) -> int:
        """Of a value of a quantised weight."""
        return BITS[self.codes]

    @property
    def name(self) -> str:
        """As the manifest of an engine folder has it: "int4 group 128 zeros ordered"."""
        ordered = " ordered" if self.ordered else ""
        match self.codes:
            case "int8":
                codes, rest = "int8" if self.activations == "float" else "w8a8", ""
            case "int4" if self.beside == "minima":
                codes, rest = "int4min", ""
            case "int4":
                codes, rest = "int4", " zeros" if self.beside else ""
            case "fp8":
                codes, rest = "fp8", _ROUNDED[self.activations]
            case _:
                return f"{self.codes}{ordered}"
        return f"{codes} group {self.group}{rest}{ordered}"

    @staticmethod
    def named(name: str) -> WeightKind | None:
        """Return the kind of this name; None: there is none."""
        plain = name.removesuffix(" ordered")
        ordered = plain != name
        if plain in FLOATS:
            return WeightKind(plain, ordered=ordered)
        found = _NAME.fullmatch(plain)
        if found is None:
            return None
        codes, group, rest = found[1], int(found[2]), found[3] or ""
        if codes == "fp8":
            rounding = next((a for a, word in _ROUNDED.items() if word == rest), None)
            if rounding is None or (rounding == "group" and not group):
                return None
            return WeightKind("fp8", group, activations=rounding, ordered=ordered)
        if rest and (codes, rest) != ("int4", " zeros"):
            return None
        if codes in ("int8", "w8a8"):
            rounds: Rounding = "group" if group else "token"
            rounds = "float" if codes == "int8" else rounds
            return WeightKind("int8", group, activations=rounds, ordered=ordered)
        if not group:
            return None
        beside: Literal["", "zeros", "minima"] = "zeros" if rest else ""
        beside = "minima" if codes == "int4min" else beside
        return WeightKind("int4", group, beside, ordered=ordered)

    def weight_bytes(self, inputs: int, outputs: int, kernels: str = "torch") -> int:
        """Return bytes of a quantised weight, its scales, zero points and order of inputs included.

        Args:
            kernels: "torch", "native" or "triton", whose layout it has.
        """
        if kernels == "triton":
            return self._tiled_bytes(inputs, outputs)
        native = kernels == "native"
        values = inputs * outputs * self.bits // 8
        values += inputs * ORDER_BYTES if self.ordered else 0
        values += SCALE_BYTES if self.activations == "static" else 0
        if native or not self.group:
            values += outputs * SCALE_BYTES
        if not self.group:
            return values
        scale = NATIVE_GROUP_SCALE_BYTES if native and self.codes != "fp8" else SCALE_BYTES
        beside = {"": 0, "zeros": 1, "minima": scale}[self.beside]
        return values + -(-inputs // self.group) * outputs * (scale + beside)

    def _tiled_bytes(self, inputs: int, outputs: int) -> int:
        """In whole tiles of GPU memory (kernels/triton/packed.py): a zero point lies within the
        scale of its group, and so does a minimum."""
        wide, rows = _up(inputs, GPU_TILE), _up(outputs, GPU_TILE)
        groups = -(-wide // self.group) if self.group else 1
        total = wide * rows * self.bits // 8 + groups * rows * SCALE_BYTES
        total += rows // GPU_COUNTED_ROWS * 4  # of splits that have arrived
        total += 2 * rows * SCALE_BYTES if self.beside == "minima" else 0
        total += inputs * ORDER_BYTES if self.ordered else 0
        total += SCALE_BYTES if self.activations == "static" else 0
        if self.activations == "group" and self.codes == "fp8" and self.group == GPU_TILE:
            total += rows // GPU_TILE * _up(wide // GPU_TILE, 4) * SCALE_BYTES  # of square blocks
        return total


def _up(n: int, to: int) -> int:
    return -(-n // to) * to
