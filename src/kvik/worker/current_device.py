"""The device that a worker's kernels and streams are meant for, whichever thread calls it.

CUDA has a current device for each thread, and where none is named that is meant: by Triton's
launches, streams, events and graphs. An engine may be made by one thread and stepped by another,
two of one process may have a GPU each, and the caller's thread may use a third. So a worker enters
its own wherever it is called, and leaves the caller's as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """It is the current one within."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def inference_on(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return a factory of contexts, one for each step: nothing is noted down for gradients within,
    and the device is the current one. On a CPU there is nothing to enter but the former."""
    return torch.inference_mode if device.type == "cpu" else partial(_Inference, device)


class _Inference:
    def __init__(self, device: torch.device) -> None:
        self._device = torch.cuda.device(device)
        self._mode = torch.inference_mode()

    def __enter__(self) -> None:
        self._device.__enter__()
        self._mode.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        self._device.__exit__(kind, error, trace)
