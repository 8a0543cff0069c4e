"""Copies of host arrays to a device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return the array on the device, without waiting for it. On a CPU it is the same memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":  # without pinned memory the host would wait for the copy
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
