"""Mixtures of experts by the native kernels (csrc/experts.hpp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.kernels.cpu.matrix import CpuPacked
from kvik.kernels.cpu.native import Native
from kvik.kernels.weights import ACTIVATIONS, ExpertSet, Matrix
from kvik.spec.experts import SCORES, Router


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the matrices of all experts, an `ExpertMatrix` each, as kernels read them."""

    # up, down: [experts, 6] int64.
    up: Tensor
    down: Tensor


class CpuExperts:
    """The router, and the experts that it chooses."""

    def __init__(self, native: Native, *, shared: bool = False) -> None:
        """
        Args:
            shared: other processes read residuals, which must not change.
        """
        self.native = native
        self._shared = shared

    def route(
        self,
        logits: Tensor,
        router: Router,
        correction: Tensor | None,
        scales: Tensor | None,
        given_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.route`."""
        tokens = logits.shape[0]
        ids = self.native.empty(tokens, router.columns, dtype=torch.int64)
        weights = self.native.empty(tokens, router.columns, dtype=torch.float32)
        self.native.launch(
            "route",
            logits=logits,
            stride=logits.stride(0),
            experts=router.outputs,
            active=router.active,
            scores=SCORES.index(router.scores),
            correction=correction,
            groups=router.groups,
            kept_groups=router.kept_groups,
            two_of_group=int(router.group_by == "best two"),
            normalise=int(router.normalised),
            scale=router.scale,
            each_scale=scales,
            jitter=router.jitter,
            given=given_ids,
            zero=router.zero,
            ids=ids,
            weights=weights,
        )
        return ids, weights

    def expert_set(self, up: Sequence[Matrix], down: Sequence[Matrix]) -> ExpertSet:
        """See `Ops.expert_set`."""
        return ExpertSet(tuple(up), tuple(down), Addresses(_addresses(up), _addresses(down)))

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        experts: ExpertSet,
        residual: Tensor | None,
    ) -> Tensor:
        """See `Ops.experts`."""
        y = residual
        if y is None or self._shared:
            y = self.native.empty(x.shape[0], experts.outputs, dtype=x.dtype)
        self.launch(0, x, ids, weights, experts, residual, None, y)
        return y

    def launch(
        self,
        part: int,
        x: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        experts: ExpertSet,
        residual: Tensor | None,
        made: Tensor | None,
        y: Tensor,
        among: tuple[range, int] | None = None,
    ) -> None:
        """Run all of `Ops.experts`, or a part of it.

        Args:
            part: 0, or 1 to 4 as in csrc/arguments.hpp.
            made: the intermediate result, [tokens * active, inner] or some columns of it; None: it
                is not shared with other processes.
            y: [tokens, outputs] or some columns of it, as many as the down matrices have rows.
            among: the numbers of these experts, and the total number; None: these are all.
        """
        at, up, down = experts.data, experts.up[0], experts.down[0]
        assert isinstance(at, Addresses)
        assert isinstance(up.data, CpuPacked) and isinstance(down.data, CpuPacked)
        pair = up.spec.outputs if up.data.bias_pair is None else up.data.bias_pair
        self.native.launch(
            "experts",
            x=x,
            ids=ids,
            weights=weights,
            weigh_inputs=int(experts.weigh_inputs),
            active=ids.shape[1],
            count=len(experts.up) if among is None else among[1],
            first=0 if among is None else among[0].start,
            owned=len(experts.up),
            up=at.up,
            down=at.down,
            inputs=up.spec.inputs,
            inner=down.spec.inputs if part == 2 else up.spec.outputs,
            outputs=down.spec.outputs,
            activation=ACTIVATIONS[up.spec.activation],
            bias_pair=pair,
            up_kind=up.data.kind,
            up_group=up.data.group,
            up_fp8_x=up.data.fp8_activations,
            down_kind=down.data.kind,
            down_group=down.data.group,
            down_fp8_x=down.data.fp8_activations,
            residual=residual,
            part=part,
            made=made,
            y=y,
        )


def _addresses(matrices: Sequence[Matrix]) -> Tensor:
    """Return [experts, 6] int64, in the order of `ExpertMatrix`; 0 for parts that do not exist."""
    return torch.tensor([_address(matrix) for matrix in matrices], dtype=torch.int64)


def _address(matrix: Matrix) -> tuple[int, ...]:
    packed = matrix.data
    assert isinstance(packed, CpuPacked)
    parts = (
        *(packed.weight, packed.scales, packed.zeros if packed.zeros.numel() else None),
        *(packed.order, matrix.bias, packed.input_scale),
    )
    return tuple(0 if part is None else part.data_ptr() for part in parts)
