"""What an exchange means: processes that have some columns of a result each get all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def gather_columns(own: Tensor, widths: Sequence[int]) -> Tensor:
    """Return all columns, by torch.distributed over whatever joins the processes (gloo, NCCL).

    Args:
        own: [rows, columns of this process].
        widths: columns of each process, in their order.

    Returns:
        [rows, sum of widths].
    """
    sent = own.new_zeros(own.shape[0], max(widths))
    sent[:, : own.shape[1]] = own
    received = own.new_empty(len(widths), *sent.shape)
    dist.all_gather_into_tensor(received.view(-1), sent.view(-1))
    return torch.cat([part[:, :width] for part, width in zip(received, widths, strict=True)], 1)
