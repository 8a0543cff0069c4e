"""Triton's kernels in test files: on the GPU if there is one, else in Triton's interpreter.

A file that imports kvik.kernels.triton starts with
`pytest.importorskip("triton", reason=NO_TRITON)`.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from kvik.config.hardware import find_gpus

if TYPE_CHECKING:
    import torch

TRITON = find_spec("triton") is not None
NO_TRITON = "triton is not installed: it has wheels for Linux on x86-64 only"
# Of files whose engines run on CPU tensors.
INTERPRETED_ONLY = pytest.mark.skipif(
    bool(find_gpus()), reason="there is a GPU, for which kernels are compiled, not interpreted"
)


def interpret_without_gpu() -> None:
    """Before anything imports triton, which reads the variable as it is imported."""
    if not find_gpus():
        os.environ["TRITON_INTERPRET"] = "1"
        if TRITON:
            _take_scalars_as_bounds()
            _patch_once_a_launch()


def _take_scalars_as_bounds() -> None:
    """The interpreter keeps a scalar as an array of one number, which numpy 2.4 no longer takes for
    an index: `range(0, n)` of an argument n would fail."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _patch_once_a_launch() -> None:
    """The interpreter replaces Triton's functions when a kernel is launched, and again whenever a
    kernel calls a function: to look through all of them took most of a test's time. Here it does so
    once for each module whose functions a launch calls."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__
    done: set[int] = set()

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in done:
            interpreter._patch_lang(self.fn)
            done.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = begin
    interpreter.InterpretedFunction.__call__ = call


def device() -> torch.device:
    """Where kernels run in tests."""
    import torch

    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
