"""The native kernels for tests: called by name, on every instruction set and several teams.

Importing this skips the test file if the package was built without its extension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("kvik.kernels.cpu._native")

from kvik.kernels.cpu import _native
from kvik.kernels.cpu.native import DTYPES

# Name -> id, and name and kind ("p", "i" or "f") of each argument.
KERNELS = {name: (number, arguments) for number, (name, arguments) in enumerate(_native.kernels())}
FLOATS = (torch.float32, torch.bfloat16)
THREADS = (1, 2, 5)


@dataclass(frozen=True)
class Runtime:
    """An instruction set and a number of threads. Tests are parametrised with these, because the
    extension's own objects would live until the process ends."""

    isa: str
    threads: int


Value = Tensor | torch.dtype | int | float | None


def call(runtime: Runtime, kernel: str, **arguments: Value) -> None:
    """Run a kernel. A tensor is passed as its address, None as a null pointer, a dtype as its
    number. Kernels check nothing: shapes and types must be right.

    Raises:
        TypeError: an argument is missing, unknown or of the wrong kind.
    """
    number, signature = KERNELS[kernel]
    names = [name for name, _ in signature]
    if set(names) != set(arguments):
        raise TypeError(f"{kernel} differs in {sorted(set(names) ^ set(arguments))}")
    values = [_word(kernel, name, kind, arguments[name]) for name, kind in signature]
    _native.Runtime(runtime.isa, runtime.threads).run(number, values)


def _word(kernel: str, name: str, kind: str, value: Value) -> int | float:
    if kind == "p" and (value is None or isinstance(value, Tensor)):
        return 0 if value is None else value.data_ptr()
    if kind == "i" and isinstance(value, torch.dtype):
        return DTYPES[value]
    if (kind == "i" and isinstance(value, int)) or (kind == "f" and isinstance(value, float)):
        return value
    raise TypeError(f"{kernel}: {name} cannot be {value!r}")


def runtimes(threads: Sequence[int] = THREADS) -> list:
    """Return test parameters: every instruction set of this machine with each number of threads."""
    return [
        pytest.param(Runtime(isa, n), id=f"{isa}-{n}")
        for isa in _native.instruction_sets()
        for n in threads
    ]


class Poisoned:
    """Memory for a kernel's result, filled with bytes 0xff (NaN in every float type) and surrounded
    by more of them.

    Attributes:
        view: [*shape], with `gap` elements between rows (the first dimension), otherwise dense.
    """

    MARGIN = 256  # bytes before and after

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, gap: int = 0) -> None:
        width = math.prod(shape[1:])
        self.stride = width + gap
        size = shape[0] * self.stride * dtype.itemsize
        self._bytes = torch.full((size + 2 * self.MARGIN,), 0xFF, dtype=torch.uint8)
        rows = self._bytes[self.MARGIN : self.MARGIN + size].view(dtype).view(shape[0], self.stride)
        self.view = rows[:, :width].unflatten(1, shape[1:]) if shape[1:] else rows[:, 0]
        self._before, self._behind = self._bytes[: self.MARGIN], self._bytes[self.MARGIN + size :]
        self._gaps = rows[:, width:]

    def assert_rest_untouched(self) -> None:
        """Check that nothing was written outside `view`."""
        for part in (self._before, self._behind, self._gaps.contiguous().view(torch.uint8)):
            assert bool((part == 0xFF).all()), "written outside of the result"


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return seeded normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
