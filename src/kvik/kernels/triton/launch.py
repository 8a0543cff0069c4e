"""What the launchers of the kernels share: block sizes by shape, and what a kernel may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

MAX_REGISTERS = 255  # of a thread, on every NVIDIA GPU; what does not fit is spilled to memory
MAX_SHARED = 227 << 10  # bytes of shared memory that one program can have on sm_90

# torch's dtypes as Triton spells them in a signature, pointers with a "*" before.
TYPES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}


@dataclass(frozen=True, slots=True)
class Loop:
    """What the compiler must make of the loop with most products of tensor cores, by instructions
    of a warp.

    Attributes:
        copies: of 16 bytes for each thread, from memory to shared memory while the warp goes on;
            at least.
        products: of four warps, that read shared memory themselves; at least.
        waits: for such products, at most. More than a loop has matrix products means that each
            instruction is waited for, as the compiler does where registers are too few.
        loads: from memory into registers, which the warp waits for in the same turn; at most.
        barriers: at most. instructions: at most, of the whole loop.
    """

    copies: int = 0
    products: int = 0
    waits: int = 1 << 20
    loads: int = 0
    barriers: int = 1 << 20
    instructions: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Resources:
    """One compilation of a kernel for sm_90, and what it may use: checked without a GPU.

    Every file of kernels lists its own in `RESOURCES`, for the few shapes that matter; they are
    joined in `kvik_bench.triton_resources`. A kernel spills no register unless `max_spills` says
    so.

    Attributes:
        kernel: the `@triton.jit` function.
        what: the shape in words, such as "hidden 4096, bf16".
        types: of its arguments in order, without constants: "*bf16", "i32", "fp32", ...
        constants: its `tl.constexpr` arguments by name; an argument that is None counts.
        aligned: integer arguments that are multiples of 16, as Triton finds them at a launch.
            Pointers always are.
        most_registers: that the compiler may use, as `maxnreg` says; None: all.
        fused_products: sums of products may be rounded once, as `enable_fp_fusion` says.
        max_registers: of a thread.
        max_spills: bytes of a thread.
        max_shared: bytes of a program.
        loop: where a bar of speed rests on it; None: not looked at.
    """

    kernel: Any
    what: str
    types: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    aligned: frozenset[str] = field(default=frozenset())
    most_registers: int | None = None
    fused_products: bool = True
    max_registers: int = MAX_REGISTERS
    max_spills: int = 0
    max_shared: int = MAX_SHARED
    loop: Loop | None = None

    @property
    def name(self) -> str:
        return f"{self.kernel.__name__} ({self.what})"


def power_of_two(n: int) -> int:
    """The least one that is >= n, which Triton's blocks are."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(n: int, by: int) -> int:
    return -(-n // by)
