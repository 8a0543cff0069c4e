"""The operations on a GPU. Those that torch does as well in one launch are left to torch."""

from __future__ import annotations

import torch

from kvik.kernels.ops import Ops
from kvik.kernels.torch_ops import TORCH, with_torch_for_others
from kvik.kernels.triton import activation, draw, norm, rotary, route, rows, states
from kvik.kernels.triton.adapters import with_low_rank
from kvik.kernels.triton.experts import TritonExperts
from kvik.kernels.triton.matrix import TritonMatrices


def triton_ops(device: torch.device) -> Ops:
    """Return the operations for one device: a GPU, or a CPU with Triton's interpreter."""
    matrices = TritonMatrices(device)
    experts = TritonExperts(matrices)
    table = Ops(
        matrix=matrices.matrix,
        pack_rows=matrices.pack_rows,
        linear=matrices.linear,
        route=route.route,
        expert_set=experts.expert_set,
        experts=with_low_rank(experts),
        linear_each=TORCH.linear_each,
        matrix_rows=matrices.rows,
        gather_rows=rows.gather_rows,
        add=TORCH.add,
        largest=rows.largest,
        penalize=draw.penalize,
        mask=draw.mask,
        draw=draw.draw,
        probabilities=draw.probabilities,
        rms_norm=norm.rms_norm,
        layer_norm=norm.layer_norm,
        rescaled=norm.rescaled,
        rotations=rotary.rotations,
        rotary=rotary.rotary,
        activate=activation.activate,
        activate_top=norm.activate_top,
        xielu=activation.xielu,
        scaled=activation.scaled,
        clipped=TORCH.clipped,
        joined=TORCH.joined,
        weighted_sums=rows.weighted_sums,
        stream_weights=norm.stream_weights,
        softcap=activation.softcap,
        gated=states.gated,
        causal_conv=states.causal_conv,
        recurrence=states.recurrence,
        store_kv=rows.store_kv,
        copy_blocks=rows.copy_blocks,
    )
    return with_torch_for_others(table, draw.RULES)
