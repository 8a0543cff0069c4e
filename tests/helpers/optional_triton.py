"""The Triton kernels in tests: on the GPU if there is one, else in Triton's interpreter.

A file that imports kvik.kernels.triton starts with
`pytest.importorskip("triton", reason=NO_TRITON)`.
"""

from __future__ import annotations

import math
import os
import sys
from functools import cache
from importlib.util import find_spec
from inspect import getmembers
from typing import TYPE_CHECKING, Any

import pytest

from kvik.config.hardware import find_gpus

if TYPE_CHECKING:
    import torch

TRITON = find_spec("triton") is not None
NO_TRITON = "triton is not installed: it has wheels for Linux on x86-64 only"
# For files whose engines run on CPU tensors.
INTERPRETED_ONLY = pytest.mark.skipif(
    bool(find_gpus()), reason="there is a GPU, for which kernels are compiled, not interpreted"
)


def interpret_without_gpu() -> None:
    """Set TRITON_INTERPRET without a GPU. Call this before any import of triton, which reads it."""
    if not find_gpus():
        os.environ["TRITON_INTERPRET"] = "1"
        if TRITON:
            _take_scalars_as_bounds()
            _patch_once_a_launch()
            _remember_types()
            _ignore_nan()


def _ignore_nan() -> None:
    """Let `tl.maximum` and `tl.minimum` return the number if one argument is NaN, as on a GPU."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    for name, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        setattr(InterpreterBuilder, name, lambda self, a, b, do=function: self.binary_op(a, b, do))


def _take_scalars_as_bounds() -> None:
    """Let the interpreter use scalars as bounds of `range`. It stores them as arrays of one
    element, which numpy 2.4 no longer accepts as an index."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _patch_once_a_launch() -> None:
    """Let the interpreter patch Triton's functions once per launch and language module.

    It does so in every call of a function by a kernel, and searches all names for them each time,
    which took most of a test's time. Here the names are searched only once.
    """
    from triton import language
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__
    done: set[tuple[bool, ...]] = set()

    @cache
    def used(module: str) -> tuple[bool, ...]:
        names = vars(sys.modules[module]).values()
        return tuple(any(name is it for name in names) for it in (language, language.core))

    @cache
    def builtins(owner: Any) -> list[str]:
        return [name for name, it in getmembers(owner) if language.core.is_builtin(it)]

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        for name in builtins(owner):
            member = getattr(owner, name)
            if language.core.is_builtin(member):
                interpreter._patch_attr(owner, name, member, builder, scope)

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        uses = used(self.fn.__module__)
        if uses not in done:
            interpreter._patch_lang(self.fn)
            done.add(uses)
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_builtin = patch
    interpreter.GridExecutor.__call__ = begin
    interpreter.InterpretedFunction.__call__ = call


def _remember_types() -> None:
    """Cache types and shapes of blocks, and leave out checks for overflow, in the interpreter.

    It makes types, shapes and a table of types again in each operation, and its check for overflow
    has an effect only in debug mode: together, two thirds of a kernel's time.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    begin_block = core.block_type.__init__

    @cache
    def shape_of_block(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        made = core.block_type.__new__(core.block_type)
        begin_block(made, core.int1, list(sizes))
        return made.shape, made.numel, str(made.shape)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        self.element_ty = element_ty
        self.shape, self.numel, shown = shape_of_block(sizes)
        self.name = f"<{shown}, {element_ty}>"

    @cache
    def shape_of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        shape = core.tuple([core.constexpr(size) for size in sizes])
        return shape, core.constexpr(math.prod(sizes))

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        self.shape, self.numel = shape_of_tensor(sizes)

    numpy_type = cache(interpreter._get_np_dtype)
    pointer = numpy_type(core.uint64)

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_unlike(self: Any, left: Any, right: Any) -> Any:
        alike = left.type.is_block() and right.type.is_block()
        if alike and left.type.shape is right.type.shape:
            return left, right
        return broadcast(self, left, right)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_unlike
    interpreter._get_np_dtype = lambda of: (
        pointer if of.scalar.is_ptr() else numpy_type(of.scalar)  # pointers have no hash
    )
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


def device() -> torch.device:
    """Return the device on which kernels run in tests."""
    import torch

    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
