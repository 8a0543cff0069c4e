"""Where the memory of a model's weights comes from."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Protocol, assert_never

import torch
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.weights import (
    FloatKind,
    Fp8Activations,
    Fp8Kind,
    Int4Kind,
    Int4MinKind,
    Int8Kind,
    Matrix,
    MatrixSpec,
    OrderedKind,
    PlainKind,
    WeightKind,
)

# Kinds of weights in a word, as the manifest of an engine folder names them, and back.

ORDERED, GROUP, ZEROS = " ordered", " group ", " zeros"
ROUNDED: dict[Fp8Activations, str] = {
    "float": "",
    "token": " token",
    "group": " groups",
    "static": " static",
}
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def name_of_kind(kind: WeightKind) -> str:
    """For example "int4 group 128 zeros ordered"."""
    match kind:
        case OrderedKind(plain):
            return f"{name_of_kind(plain)}{ORDERED}"
        case FloatKind(dtype):
            return {value: name for name, value in FLOATS.items()}[dtype]
        case Int8Kind(quantize_activations, group):
            return f"{'w8a8' if quantize_activations else 'int8'}{GROUP}{group}"
        case Int4Kind(group, zeros):
            return f"int4{GROUP}{group}{ZEROS if zeros else ''}"
        case Int4MinKind(group):
            return f"int4min{GROUP}{group}"
        case Fp8Kind(group, activations):
            return f"fp8{GROUP}{group}{ROUNDED[activations]}"
        case _:
            assert_never(kind)


def kind_named(name: str) -> WeightKind | None:
    """None: there is no such kind."""
    plain = _plain(name.removesuffix(ORDERED))
    return OrderedKind(plain) if plain is not None and name.endswith(ORDERED) else plain


def _plain(name: str) -> PlainKind | None:
    if name in FLOATS:
        return FloatKind(FLOATS[name])
    found = re.fullmatch(rf"(\w+){GROUP}([0-9]{{1,9}})( \w+)?", name)
    if found is None:
        return None
    group, rest = int(found[2]), found[3] or ""
    if found[1] == "fp8":
        named = {word: activations for activations, word in ROUNDED.items()}
        fits = rest in named and (group or named[rest] != "group")
        return Fp8Kind(group, named[rest]) if fits else None
    if rest and (found[1], rest) != ("int4", ZEROS):
        return None
    if group == 0 and found[1] in ("int4", "int4min"):
        return None
    match found[1]:
        case "w8a8":
            return Int8Kind(True, group)
        case "int8":
            return Int8Kind(False, group)
        case "int4":
            return Int4Kind(group, bool(rest))
        case "int4min":
            return Int4MinKind(group)
        case _:
            return None


class Storage(Protocol):
    """Names are those of the checkpoint; a matrix has those of its layers in one."""

    @property
    def names(self) -> Collection[str]:
        """Of all that it holds the values of; none: its memory is new."""
        ...

    def matrix(self, name: str, spec: MatrixSpec) -> Matrix:
        """Of the size and with what follows the product as `spec` says."""
        ...

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor: ...


class FreshStorage:
    """New memory, to be filled by a loader. It keeps what it gave."""

    names: Collection[str] = ()

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.matrices: dict[str, Matrix] = {}
        self.tensors: dict[str, Tensor] = {}

    def matrix(self, name: str, spec: MatrixSpec) -> Matrix:
        self.matrices[name] = self._ops.matrix(spec)
        return self.matrices[name]

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        self.tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        return self.tensors[name]
