"""Calls of the native kernels from Python: run at once, or recorded to a tape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from kvik.kernels.cpu import _native
from kvik.kernels.cpu.buffers import WeightMemory
from kvik.kernels.cpu.recording import OnlyViews, Recording


def _signatures() -> Iterator[tuple[str, tuple[int, list[str], list[tuple[str, str]]]]]:
    """Yield each kernel, with its id, the names of its arguments in order, and which arguments of
    `Native.launch` follow from which others."""
    for number, (kernel, arguments) in enumerate(_native.kernels()):
        names = [name for name, _ in arguments]
        implied = [(name, names[0]) for name in names if name in ("rows", "dtype")]
        implied += [(f"{name}_stride", name) for name in names if f"{name}_stride" in names]
        yield kernel, (number, names, implied)


_KERNELS = dict(_signatures())

DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.int8: 2,
    torch.float8_e4m3fn: 3,
    torch.uint8: 4,  # two numbers of four bits
}

_NUMBERS = (int, float)
Argument = Tensor | torch.dtype | int | float | None  # of a kernel


def notices() -> list[str]:
    """Return what a user should know about this build on this machine."""
    return [
        f"the native kernels for {isa} compute wrongly on this machine and are not used"
        for isa in _native.rejected_instruction_sets()
    ]


class Native:
    """Kernels of one instruction set, and the threads that run them. Not thread-safe.

    The caller must have checked shapes and types: kernels read memory without checks.
    """

    def __init__(
        self,
        threads: int,
        isa: str | None = None,
        memory: np.ndarray | None = None,
        adapt: bool = False,
    ) -> None:
        """
        Args:
            threads: most threads.
            isa: one of `instruction_sets()`; None: the best.
            memory: for weights; see `WeightMemory`.
            adapt: recordings run on fewer threads while other processes keep the cores busy.
        """
        self._runtime = _native.Runtime(isa or _native.instruction_sets()[0], threads, adapt)
        self._recording: Recording | None = None
        self.weights = WeightMemory(memory)

    @property
    def working(self) -> int:
        """Threads that recordings run on, unless `limit` sets fewer."""
        return self._runtime.working

    @property
    def recording(self) -> bool:
        """Whether calls are recorded and not run."""
        return self._recording is not None

    def limit(self, threads: int) -> None:
        """Run the next recordings on at most this many threads."""
        self._runtime.limit(threads)

    def launch(self, kernel: str, **arguments: Argument) -> None:
        """Run a kernel, or record it.

        Args:
            arguments: by their names in csrc/arguments.hpp. A tensor stands for its address, a
                dtype for its number, None for 0. NAME_stride may be left out next to NAME, and so
                may `rows` and `dtype` if they are those of the kernel's first argument.
        """
        number, names, implied = _KERNELS[kernel]
        for name, source in implied:
            if name not in arguments:
                of = arguments.get(source)
                if of is None:
                    arguments[name] = 0
                elif isinstance(of, Tensor):
                    if name == "rows":
                        arguments[name] = self.rows(of)
                    else:
                        arguments[name] = of.dtype if name == "dtype" else of.stride(0)
        if len(arguments) != len(names):
            raise TypeError(f"{kernel} takes {', '.join(names)}")
        values = [
            0 if (x := arguments[name]) is None
            else x if isinstance(x, _NUMBERS)
            else x.data_ptr() if isinstance(x, Tensor)
            else DTYPES[x]
            for name in names
        ]  # fmt: skip
        if self._recording is None:
            self._runtime.run(number, values)
        else:
            self._recording.append(number, values)

    def rows(self, tensor: Tensor) -> int:
        """Return the number of rows of a tensor, as an argument of `launch`."""
        count = tensor.shape[0]
        return count if self._recording is None else self._recording.rows(count)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a kernel's result."""
        if self._recording is None:
            return torch.empty(shape, dtype=dtype)
        return self._recording.pool.take(shape, dtype)

    @contextmanager
    def record(self, sizes: Mapping[int, int]) -> Iterator[Recording]:
        """Record everything launched inside; nothing runs.

        Args:
            sizes: see `Recording`.

        Raises:
            CaptureError: something inside cannot be recorded.
        """
        self._recording = Recording(sizes)
        try:
            with OnlyViews():
                yield self._recording
        finally:
            self._recording = None

    def replay(self, recording: Recording, inputs: Sequence[int]) -> None:
        """Run a recording.

        Args:
            inputs: rows of this step, by the indices of the recording's `sizes`.
        """
        self._runtime.replay(recording.tape, inputs)

    def replay_timed(self, recording: Recording, inputs: Sequence[int]) -> list[tuple[str, int]]:
        """Run a recording, and return each call's kernel and nanoseconds."""
        times = self._runtime.replay_timed(recording.tape, inputs)
        names = list(_KERNELS)
        return [(names[k], t) for k, t in zip(recording.tape.calls, times, strict=True)]
