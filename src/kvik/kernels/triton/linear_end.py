"""The end of matrix products: parts of a sum are added, then bias, activation, residual.

If the inputs are divided into splits, so that few tokens occupy the whole GPU, every program writes
its part to memory, and the last one to arrive adds them in the order of the splits, so the sum does
not depend on which was last. The counter of arrivals is an integer, and is reset to 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.activation import activated, factor_of
from kvik.kernels.triton.launch import in_blocks, launch
from kvik.kernels.weights import ACTIVATIONS, PAIRED, Activation

BLOCK = 1024  # outputs of a program of `finish`: 16 bytes of bf16 for each of 128 threads


@triton.jit
def tile_at(pid, rows, tokens, BO: tl.constexpr, BT: tl.constexpr):
    """Return the first output and first token of a program. Eight consecutive tiles of outputs
    share the part of x that they read, and then the next tokens share the weights."""
    token_tiles = tl.cdiv(tokens, BT)
    band = pid // (8 * token_tiles) * 8
    within, width = pid % (8 * token_tiles), tl.minimum(tl.cdiv(rows, BO) - band, 8)
    return (band + within % width) * BO, within // width * BT


@triton.jit
def sum_of_splits(part, here, partials, arrivals, tile, split, SPLITS: tl.constexpr):
    """Return (whether this program is the last of its tile, and if so the sum of all splits).

    part: [BO, BT], int32 or fp32. here: [BT], which tokens exist. partials: SPLITS * BT * BO of the
    same dtype for each tile. arrivals: [tiles] int32, 0.
    """
    BO: tl.constexpr = part.shape[0]
    BT: tl.constexpr = part.shape[1]
    at = tl.arange(0, BT)[None, :] * BO + tl.arange(0, BO)[:, None]
    mine = partials + tile.to(tl.int64) * (SPLITS * BO * BT) + at
    here = here[None, :]
    tl.store(mine + split * (BO * BT), part, mask=here)
    tl.debug_barrier()  # all threads of this program have stored before it is counted
    arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
    last = arrived == SPLITS - 1
    total = part
    if last:
        # Bypass the L1 cache, which other programs' stores do not update.
        total = tl.load(mine, mask=here, other=0, cache_modifier=".cg")
        for _ in range(1, SPLITS):
            mine += BO * BT
            total += tl.load(mine, mask=here, other=0, cache_modifier=".cg")
        tl.store(arrivals + tile, 0)
    return last, total


@triton.jit
def end_and_store(
    sums, first, t, bias, residual, y, tokens, rows, residual_stride,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Apply bias, activation and residual to sums, and store them in y, [tokens, outputs].

    sums: [BO, BT] fp32, of rows first.. and tokens t; for paired activations rows of gate and up
    alternate, while bias [rows] has all of gate first. bias and residual: None if there is none.
    """
    BO: tl.constexpr = sums.shape[0]
    BT: tl.constexpr = sums.shape[1]
    PAIRED: tl.constexpr = ACTIVATION % 2 == 1
    o = first + tl.arange(0, BO)
    if bias is not None:
        at = o // 2 + o % 2 * (rows // 2) if PAIRED else o
        sums += tl.load(bias + at, mask=o < rows, other=0.0).to(tl.float32)[:, None]
    z = tl.trans(sums)  # [BT, BO]: outputs of a token are neighbours in y
    outputs = rows
    if PAIRED:
        gate, up = tl.split(tl.reshape(z, (BT, BO // 2, 2)))
        z = activated(gate, ACTIVATION) * factor_of(up, ACTIVATION)
        o = first // 2 + tl.arange(0, BO // 2)
        outputs = rows // 2
    else:
        z = activated(z, ACTIVATION)
    inside = (t < tokens)[:, None] & (o < outputs)[None, :]
    token = t.to(tl.int64)[:, None]
    if residual is not None:
        at = residual + token * residual_stride + o[None, :]
        z += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * outputs + o[None, :], z.to(y.dtype.element_ty), mask=inside)


@triton.jit
def finish_kernel(
    z, bias, residual, y, rows, z_stride, residual_stride,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [tokens, blocks]; z [tokens, rows], for paired activations all of gate first"""
    PAIRED: tl.constexpr = ACTIVATION % 2 == 1
    token = tl.program_id(0).to(tl.int64)
    outputs = rows // 2 if PAIRED else rows
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < outputs
    at = z + token * z_stride + o
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + o, mask=inside, other=0.0).to(tl.float32)
    if PAIRED:
        up = tl.load(at + outputs, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            up += tl.load(bias + outputs + o, mask=inside, other=0.0).to(tl.float32)
        x = activated(x, ACTIVATION) * factor_of(up, ACTIVATION)
    else:
        x = activated(x, ACTIVATION)
    if residual is not None:
        near = residual + token * residual_stride + o
        x += tl.load(near, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * outputs + o, x.to(y.dtype.element_ty), mask=inside)


def finish(
    z: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute activation(z + bias) + residual, for products computed by a library.

    Floor: memory; z is read and y written once.

    Args:
        z: [tokens, rows], rows of gate before those of up.
    """
    tokens, rows = z.shape
    outputs = rows // 2 if activation in PAIRED else rows
    y = torch.empty(tokens, outputs, dtype=out_dtype, device=z.device)
    if not tokens:
        return y
    block, blocks = in_blocks(outputs, BLOCK)
    numbers = (rows, z.stride(0), 0 if residual is None else residual.stride(0))
    tensors, constants = (z, bias, residual, y), (ACTIVATIONS[activation], block)
    launch(finish_kernel, (tokens, blocks), tensors, numbers, constants)
    return y
