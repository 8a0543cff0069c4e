"""The specialisation that Triton would compile for a launch, from its own binding of arguments;
nothing is compiled or interpreted."""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any

from helpers.triton_resources import BACKEND
from triton.runtime.jit import KernelParam, create_function_from_signature


def compilation(kernel: Any, *args: Any, **options: Any) -> str:
    """Return the name of a kernel with its specialisation.

    Args:
        kernel: under the interpreter.
        args, options: of a launch, without its grid.
    """
    _, kinds, others = _binding(kernel)(*args, **options)
    return f"{kernel.fn.__name__} {kinds} {others}"


@cache
def _binding(kernel: Any) -> Any:
    """Return the kernel's binder, cached because making it takes milliseconds."""
    unknown = kernel.kwargs["do_not_specialize"] or ()
    unaligned = kernel.kwargs["do_not_specialize_on_alignment"] or ()
    parameters = [
        KernelParam(i, each, each.name in unknown, each.name in unaligned)
        for i, each in enumerate(signature(kernel.fn).parameters.values())
    ]
    return create_function_from_signature(signature(kernel.fn), parameters, BACKEND)
