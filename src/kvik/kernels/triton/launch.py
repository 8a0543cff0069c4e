"""Launches kernels; and arithmetic shared by their launchers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

INTERPRETED: bool = triton.knobs.runtime.interpret
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
MAX_KNOWN = 4096  # combinations of arguments whose code is known

# Bytes of shared memory that a program can have, by compute capability of data centre GPUs.
# Consumer GPUs have 99 KiB.
MAX_SHARED, ROOMY = 227 << 10, 163 << 10
SHARED: Mapping[tuple[int, int], int] = {
    (8, 0): ROOMY,
    (9, 0): MAX_SHARED,
    (10, 0): MAX_SHARED,
    (10, 3): MAX_SHARED,
}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float | None, ...],
    constants: tuple[Any, ...],
    num_warps: int = 4,
    num_stages: int = 3,
    enable_fp_fusion: bool = True,
    maxnreg: int | None = None,
) -> None:
    """Launch a kernel, whose parameters are tensors, then numbers, then constants (`tl.constexpr`).

    In every launch Triton examines all arguments to find the code that it compiled for them, which
    takes several times as long as the launch itself. Here it does so once for the same numbers,
    constants and types of tensors, which all layers of a step have in common. The code also depends
    on whether each address is a multiple of 16. Nearly all are; launches with others always go
    through Triton. Triton's launch hooks are not called, so its profiler (Proton) sees no launch.

    Args:
        grid: up to three numbers of programs.
        num_warps, num_stages, enable_fp_fusion, maxnreg: how the kernel is compiled.
    """
    addresses: list[int | None] = []
    types: list[torch.dtype | None] = []
    bits = 0  # set in any address
    for tensor in tensors:
        if tensor is None:
            addresses.append(None)
            types.append(None)
        else:
            address = tensor.data_ptr()
            addresses.append(address)
            types.append(tensor.dtype)
            bits |= address
    options = num_warps, num_stages, enable_fp_fusion, maxnreg
    if bits % 16 or INTERPRETED:
        named = dict(zip(OPTIONS, options, strict=True))
        kernel[grid](*tensors, *numbers, *constants, **named)
        return
    device = driver.active.get_current_device()
    code = _compiled(kernel.warmup, device, tuple(types), constants, options, *numbers)
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    run = code.run  # loads the code at first; only then is its function known
    settings = code.function, code.packed_metadata, None, None, None
    run(x, y, z, stream, *settings, *addresses, *numbers, *constants)


@lru_cache(MAX_KNOWN, typed=True)  # 1, 1.0 and True are equal
def _compiled(
    warmup: Callable[..., Any],
    device: int,
    types: tuple[torch.dtype | None, ...],
    constants: tuple[Any, ...],
    options: tuple[Any, ...],
    *numbers: float | None,
) -> Any:
    """Return the code of a kernel for such arguments on a device, which is the current one.

    Args:
        warmup: of the kernel; it compiles for addresses that are multiples of 16.
    """
    named = dict(zip(OPTIONS, options, strict=True))
    return warmup(*types, *numbers, *constants, grid=(1,), **named)


def power_of_two(n: int) -> int:
    """Return the least power of two that is >= n: the sizes of Triton's blocks."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(n: int, by: int) -> int:
    """Return n / by, rounded up."""
    return -(-n // by)


def in_blocks(n: int, most: int) -> tuple[int, int]:
    """Return the size and the number of blocks that n elements are divided into.

    Args:
        most: the largest size.
    """
    block = min(most, power_of_two(n))
    return block, ceil_div(n, block)


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program can have."""
    if device.type != "cuda":
        return MAX_SHARED
    return shared_by(torch.cuda.get_device_capability(device))


def shared_by(capability: tuple[int, int]) -> int:
    """See `shared_memory`."""
    return SHARED.get(capability, 99 << 10)
