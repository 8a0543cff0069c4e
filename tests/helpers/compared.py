"""Operations compared with the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from helpers.kernel_cases import Argument, Case, arguments, outputs
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE

Arguments = tuple[Argument, ...]


def check_case(
    ops: Ops,
    case: Case,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    rounded: Callable[[Arguments], Arguments] = lambda args: args,
) -> tuple[Tensor, ...]:
    """Compare results with the reference's, and check that other arguments do not change.

    Args:
        device: None: the CPU.
        rounded: returns the arguments for the reference.

    Returns:
        The results.
    """
    rtol, atol = case.tolerance(dtype)
    place = device or torch.device("cpu")
    given, args, unchanged = (arguments(case, dtype, place) for _ in range(3))
    expected, found = outputs(REFERENCE, case, rounded(given)), outputs(ops, case, args)
    for i, before in enumerate(unchanged):
        if i not in (*case.spoiled, *case.written) and isinstance(before, Tensor):
            for after in (given[i], args[i]):
                assert isinstance(after, Tensor) and torch.equal(after, before)
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    return found
