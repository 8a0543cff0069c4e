"""SmoothQuant: outliers of the inputs move into the weights, so that both fit into eight bits.

Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models", section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def smoothing_scales(absmax: Tensor, weights: Sequence[Tensor], alpha: float = 0.5) -> Tensor:
    """s = max |x|^alpha / max |w|^(1 - alpha) of each input; what comes before gives x / s.

    An input that is 0 everywhere, or that no layer reads, keeps the factor 1.

    Args:
        absmax: [inputs], of the layers' inputs x.
        weights: [outputs, inputs] each, of all layers that read these inputs.
        alpha: how much of the difficulty the weights take over.

    Returns:
        [inputs] fp32.
    """
    largest = torch.stack([w.abs().amax(0).float() for w in weights]).amax(0)
    scales = absmax.float().pow(alpha) / largest.pow(1 - alpha)
    return scales.masked_fill((absmax == 0) | (largest == 0), 1.0)
