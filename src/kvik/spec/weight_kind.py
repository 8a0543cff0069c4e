"""Weight kinds: the format of a linear layer's weight in memory.

The memory plan, the loader, the kernels and engine folders all use this description. A new kind of
weight is declared here first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# Quantisation of the inputs of a product: none, with a scale for each token, with a scale for each
# token and group of the weight's inputs, or with a calibrated scale.
Rounding = Literal["float", "token", "group", "static"]
FLOATS = ("float32", "bfloat16", "float16")
BITS = {"int8": 8, "int4": 4, "fp8": 8, "mxfp4": 4, "nvfp4": 4, "iq4": 4, "nf4": 4, "bnb_fp4": 4}
# Codes of the numbers of a table in groups of any size.
TABLE_CODES = ("nvfp4", "iq4", "nf4", "bnb_fp4")
# On a GPU these are stored as their numbers, in 8 bits.
WIDE_ON_GPU = ("iq4", "nf4", "bnb_fp4")

SCALE_BYTES = 4
# mxfp4: the inputs of a group, and the bytes of its scale, with all kernels.
MX_GROUP, MX_SCALE_BYTES = 32, 1
# Bytes of a group's scale in the native kernels, which also have one fp32 factor per output.
NATIVE_GROUP_SCALE_BYTES = 2
ORDER_BYTES = 4
# On a GPU, rows and inputs of a quantised matrix are padded to a multiple of GPU_TILE.
# GPU_COUNTED_ROWS share a counter of splits.
GPU_TILE, GPU_COUNTED_ROWS = 128, 32

_NAME = re.compile(rf"(w8a8|int4min|{'|'.join(BITS)}) group ([0-9]{{1,9}})( [a-z]+)?")
_ROUNDED: dict[Rounding, str] = {
    "float": "",
    "token": " token",
    "group": " groups",
    "static": " static",
}


@dataclass(frozen=True, slots=True)
class WeightKind:
    """The kind of a weight."""

    # Type of a value: the name of a float dtype, "int8", "int4", "fp8" (E4M3), "mxfp4" (E2M1 in
    # groups of MX_GROUP that share a power of two), "nvfp4" (E2M1 with other scales) or "iq4",
    # "nf4" and "bnb_fp4" (sixteen numbers of a table, `weights.NUMBERS`).
    codes: str
    group: int = 0  # number of consecutive inputs of an output that share a scale; 0: all of them
    # Second parameter of an int4 group: "zeros", w = (q - zero) * scale; "minima", w = q * scale -
    # minimum; "": none, w = (q - 8) * scale.
    offsets: Literal["", "zeros", "minima"] = ""
    # Quantisation of the inputs of a product: with int8 to integers, with fp8 to E4M3.
    activations: Rounding = "float"
    ordered: bool = False  # inputs are reordered, so that groups are contiguous (act-order of GPTQ)

    @property
    def floats(self) -> bool:
        return self.codes not in BITS

    @property
    def bits(self) -> int:
        """Bits of a value of a quantised weight."""
        return BITS[self.codes]

    @property
    def gpu_bits(self) -> int:
        """Bits of a value on a GPU, where some codes are replaced by their numbers."""
        return 8 if self.codes in WIDE_ON_GPU else self.bits

    @property
    def name(self) -> str:
        """The name in the manifest of an engine folder: "int4 group 128 zeros ordered"."""
        ordered = " ordered" if self.ordered else ""
        if self.floats:
            return f"{self.codes}{ordered}"
        codes, rest = self.codes, ""
        if codes == "int8" and self.activations != "float":
            codes = "w8a8"
        elif codes == "int4" and self.offsets == "minima":
            codes = "int4min"
        elif codes == "int4" and self.offsets:
            rest = " zeros"
        elif codes == "fp8":
            rest = _ROUNDED[self.activations]
        return f"{codes} group {self.group}{rest}{ordered}"

    @staticmethod
    def named(name: str) -> WeightKind | None:
        """Return the kind with this name; None: there is none."""
        plain = name.removesuffix(" ordered")
        ordered = plain != name
        if plain in FLOATS:
            return WeightKind(plain, ordered=ordered)
        match = _NAME.fullmatch(plain)
        if match is None:
            return None
        codes, group, rest = match[1], int(match[2]), match[3] or ""
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
        if codes == "mxfp4":
            return WeightKind("mxfp4", group, ordered=ordered) if group == MX_GROUP else None
        if not group:
            return None
        if codes in TABLE_CODES:
            return WeightKind(codes, group, ordered=ordered)
        offsets: Literal["", "zeros", "minima"] = "zeros" if rest else ""
        offsets = "minima" if codes == "int4min" else offsets
        return WeightKind("int4", group, offsets, ordered=ordered)

    def weight_bytes(self, inputs: int, outputs: int, kernels: str = "torch") -> int:
        """Return the bytes of a quantised weight, including scales, zero points and order of
        inputs.

        Args:
            kernels: whose layout it has: "torch", "native" or "triton".
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
        scale = self.group_scale_bytes(native=native)
        offset_bytes = {"": 0, "zeros": 1, "minima": scale}[self.offsets]
        return values + -(-inputs // self.group) * outputs * (scale + offset_bytes)

    def group_scale_bytes(self, *, native: bool) -> int:
        """Return the bytes of a group's scale, in the native kernels' layout or the others'."""
        if self.codes == "mxfp4":
            return MX_SCALE_BYTES
        return NATIVE_GROUP_SCALE_BYTES if native and self.codes != "fp8" else SCALE_BYTES

    def _tiled_bytes(self, inputs: int, outputs: int) -> int:
        """Return the bytes in whole tiles of GPU memory (kernels/triton/packed.py), where the scale
        of a group and its zero point or minimum share a word."""
        wide, rows = _up(inputs, GPU_TILE), _up(outputs, GPU_TILE)
        groups = -(-wide // self.group) if self.group else 1
        total = wide * rows * self.gpu_bits // 8 + groups * rows * self.group_scale_bytes(
            native=False
        )
        total += rows // GPU_COUNTED_ROWS * 4  # counters of finished splits
        total += 2 * rows * SCALE_BYTES if self.offsets == "minima" else 0
        total += inputs * ORDER_BYTES if self.ordered else 0
        total += SCALE_BYTES if self.activations == "static" else 0
        if self.activations == "group" and self.codes == "fp8" and self.group == GPU_TILE:
            total += rows // GPU_TILE * _up(wide // GPU_TILE, 4) * SCALE_BYTES  # of square blocks
        return total


def _up(n: int, to: int) -> int:
    return -(-n // to) * to
