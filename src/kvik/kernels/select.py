"""The fastest table of operations for a device."""

from __future__ import annotations

import torch

from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.torch_ops import TORCH

_BY_DEVICE = {"cpu": TORCH, "cuda": TORCH}


def select(device: torch.device) -> Ops:
    """The reference serves devices nothing faster has been tested on."""
    return _BY_DEVICE.get(device.type, REFERENCE)
