"""GPTQ: the columns not yet rounded compensate the rounding error of each column.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", section 3.3 and algorithm 1. With H = 2 X X^T of the inputs X and H^-1 = U^T U, U
upper triangular, rounding column i to q_i leaves the error e = (w_i - q_i) / U_ii, and each later
column j becomes w_j - e U_ij: the least squared change of the outputs W X.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvik.quantize.quantised import Grid, Quantised, Scales, quantise

# Round to nearest: each weight independently; the baseline of the other methods.


def rtn(w: Tensor, grid: Grid) -> Quantised:
    """Round each weight to its nearest code.

    Args:
        w: [outputs, inputs], any float dtype.

    Raises:
        ValueError: as `Grid.fit`.
    """
    scales = grid.fit(w)
    return Quantised(quantise(w, scales, grid), scales, grid)


def gptq(
    w: Tensor,
    hessian: Tensor,
    grid: Grid,
    *,
    damping: float = 0.01,
    act_order: bool = False,
    static_groups: bool = False,
    block: int = 128,
) -> Quantised:
    """Round w so that || (W - Q) X || is small, instead of || W - Q ||.

    The weights of an input that is 0 in all calibration text are rounded to nearest.

    Args:
        w: [outputs, inputs], any float dtype.
        hessian: [inputs, inputs], 2 X X^T up to a factor.
        damping: share of the mean diagonal that is added to the diagonal.
        act_order: columns with the largest inputs are rounded first, while many others remain to
            compensate. The result is in the order of the layer; groups are then contiguous in the
            order of rounding, and `Quantised.order` holds the group of each input.
        static_groups: scales of all groups come from w, not from the updated columns when the
            group's first one is rounded. With `act_order`, groups stay contiguous in the layer.
        block: columns whose errors are applied to all later columns at once.

    Raises:
        ValueError: as `Grid.fit`, or the Hessian is not finite or not positive.
    """
    inputs = w.shape[1]
    width = grid.width(inputs)
    order = torch.arange(inputs, device=w.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(hessian, order, damping)
    fixed = grid.fit(w)  # validates w; used if groups are static
    # Transposed, so that a column is contiguous: [inputs, outputs], in the order of rounding.
    rest = w.float().t()[order]
    codes = torch.empty_like(rest, dtype=torch.uint8)
    group_of = (order if static_groups else torch.arange(inputs, device=w.device)) // width
    scales = fixed.scales.t().clone()  # [groups, outputs]
    zeros = None if fixed.zeros is None else fixed.zeros.t().clone()
    groups = group_of.tolist()

    for start, end in _blocks(inputs, width, block):
        errors = rest[start:end]  # each column's error replaces the column
        upper = factor[start:end]
        for i in range(end - start):
            column = start + i
            g = groups[column]
            if not static_groups and column % width == 0:
                fresh = grid.fit(rest[column : column + width].t())
                scales[g] = fresh.scales[:, 0]
                if zeros is not None and fresh.zeros is not None:
                    zeros[g] = fresh.zeros[:, 0]
            zero = grid.middle if zeros is None else zeros[g]
            q = grid.codes(errors[i], scales[g], zero)
            codes[column] = q
            errors[i].sub_(q.sub_(zero).mul_(scales[g])).div_(upper[i, column])
            errors[i + 1 :].addr_(upper[i, column + 1 : end], errors[i], alpha=-1)
        rest[end:].addmm_(upper[:, end:].t(), errors, alpha=-1)

    back = order.argsort()
    regrouped = act_order and not static_groups and width < inputs
    group_scales = Scales(
        scales.t().contiguous(), None if zeros is None else zeros.t().contiguous()
    )
    return Quantised(
        codes[back].t().contiguous(), group_scales, grid, group_of[back] if regrouped else None
    )


def inverse_factor(hessian: Tensor, order: Tensor, damping: float) -> Tensor:
    """Return U, upper triangular, with H^-1 = U^T U for the damped H in this order.

    Row i of U, from its diagonal on, is row i of the inverse of H without its first i columns,
    divided by the root of that row's diagonal. (Rows of the whole inverse would be wrong here.)

    H^-1 itself is not needed: with J, which reverses the order, J H J = L L^T, so U = J L^-1 J.

    Returns:
        [inputs, inputs] fp32.

    Raises:
        ValueError: H holds NaN or infinity, or is not positive.
    """
    turned = order.flip(0)
    damped = hessian[turned][:, turned].double()
    diagonal = damped.diagonal()
    if not bool(diagonal.isfinite().all()):
        raise ValueError("the second moment of the inputs holds NaN or infinity")
    dead = diagonal == 0
    live = (~dead).sum().clamp(min=1)
    diagonal += damping * diagonal.sum() / live
    diagonal[dead] = 1.0
    failed = torch.empty((), dtype=torch.int32, device=hessian.device)
    # both in place: the largest layers have matrices of a gigabyte
    torch.linalg.cholesky_ex(damped, out=(damped, failed))
    if int(failed):
        raise ValueError("the second moment of the inputs is not positive; raise the damping")
    inverse = torch.eye(len(order), dtype=torch.float64, device=hessian.device)
    torch.linalg.solve_triangular(damped, inverse, upper=False, out=inverse)
    return inverse.float().flip(0, 1)


def _blocks(inputs: int, width: int, block: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of columns that are whole groups or a part of one group, so that all columns of
    a group are up to date when its first is rounded."""
    span = max(block // width, 1) * width
    for start in range(0, inputs, span):
        end = min(start + span, inputs)
        for part in range(start, end, block):
            yield part, min(part + block, end)
