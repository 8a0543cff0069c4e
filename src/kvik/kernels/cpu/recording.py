"""Record kernel calls to a tape instead of running them, and detect what cannot be recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvik.kernels.cpu._native import Tape
from kvik.kernels.cpu.buffers import BufferPool


class CaptureError(RuntimeError):
    """A forward pass does something that a tape cannot repeat."""


class Input(int):
    """A number known only at replay, given by its index among the replay's inputs."""


class Recording:
    """A tape being recorded.

    A recorded forward runs on tensors with the size of the largest step. Steps differ only in how
    many of these rows are used, which every kernel takes as an argument. Sizes that mean "rows of
    this step" are recognised by their value: `sizes` maps each to the index of the replay's input
    that replaces it.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.tape = Tape()
        self.pool = BufferPool()
        self._sizes = {size: Input(index) for size, index in sizes.items()}

    def append(self, kernel: int, values: Sequence[int | float]) -> None:
        inputs = [(i, int(value)) for i, value in enumerate(values) if isinstance(value, Input)]
        self.tape.append(kernel, values, inputs)

    def rows(self, count: int) -> Input:
        """Return the input of the replay that stands for `count` rows.

        Raises:
            CaptureError: the number of rows is not one of the step's sizes.
        """
        if count not in self._sizes:
            raise CaptureError(f"a kernel over {count} rows, which is not a step size")
        return self._sizes[count]


class OnlyViews(TorchDispatchMode):
    """While a forward is recorded, lets torch only make views of tensors: arithmetic would run
    once, on buffers without content, and be missing from the tape.

    Raises:
        CaptureError: from the operation that computes or copies.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False; for True torch would import its compiler (46 MB, half a second)."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not func.is_view:
            raise CaptureError(f"{func} has no native kernel")
        result = func(*args, **(kwargs or {}))
        made = [result] if isinstance(result, Tensor) else result
        # reshape, for example, copies if it cannot make a view
        if any(_storage(tensor) != _storage(args[0]) for tensor in made):
            raise CaptureError(f"{func} has no native kernel when it copies")
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
