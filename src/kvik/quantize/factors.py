"""Factors of a block's inputs: statistics, their search, and folding them into the operation
before.

W x = (W diag(s)) (diag(1/s) x) for any factors s > 0 of the inputs [inputs]. AWQ chooses s so that
weights of inputs with large activations get finer steps, SmoothQuant so that weights and inputs
have similar ranges. The operation before the layer gives x / s, so the model computes the same as
before and nothing is multiplied at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvik.quantize.block import BIAS, WEIGHT, Block
from kvik.quantize.gptq import rtn
from kvik.quantize.quantised import Grid
from kvik.quantize.recipe import TENSOR
from kvik.quantize.source import Fold

INPUTS_AT_ONCE = 1 << 25  # numbers of inputs in fp32 at a time
BLOCK = 1024  # columns of the second moment that are updated together


class InputStatistics:
    """Sums over the inputs x [inputs] of all calibration tokens.

    Products within a batch are summed in fp32, batches in fp64, because an fp32 sum of millions of
    squares drifts. Batches should be large: each one passes over the whole second moment.
    """

    def __init__(
        self,
        inputs: int,
        *,
        moment: bool = True,
        sample_size: int = 512,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            moment: whether to keep the second moment, by far the largest part.
        """
        # inputs, tokens: their numbers.
        self.inputs = inputs
        self.tokens = 0
        self.sample_size = sample_size
        # [inputs] fp64, the sum of |x|.
        self.abs_sum = torch.zeros(inputs, dtype=torch.float64, device=device)
        self.absmax = torch.zeros(inputs, device=device)  # [inputs] fp32
        # [up to `sample_size`, inputs] fp32, a uniform sample of all tokens. It depends only on
        # their positions in the stream, not on the batches.
        self.sample = torch.empty(0, inputs, device=device)
        self._keys = torch.empty(0, dtype=torch.int64, device=device)
        # x^T x; only the blocks on and below the diagonal are updated
        self._lower: Tensor | None = None
        if moment:
            self._lower = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Add x [tokens, inputs], any float dtype.

        Raises:
            ValueError: x holds NaN or infinity; nothing is added then.
        """
        if not len(x):
            return
        absmax = torch.maximum(x.amax(0), -x.amin(0)).float()
        if not bool(absmax.isfinite().all()):
            raise ValueError("the inputs of a layer hold NaN or infinity")
        self.absmax = torch.maximum(self.absmax, absmax)
        for piece in x.split(max(1, INPUTS_AT_ONCE // self.inputs)):
            wide = piece.float()
            self.abs_sum += wide.abs().sum(0)
            if self._lower is not None:
                _add_products(self._lower, wide, exact=x.dtype == torch.bfloat16)
            places = torch.arange(len(wide), device=x.device) + self.tokens
            self._draw(_keys(places), wide)
            self.tokens += len(wide)

    def mean_abs(self) -> Tensor:
        """[inputs] fp32."""
        return (self.abs_sum / max(self.tokens, 1)).float()

    def hessian(self) -> Tensor:
        """Return 2 X X^T, the Hessian of the squared error: [inputs, inputs] fp32, a copy.

        Raises:
            ValueError: the second moment was not kept.
        """
        if self._lower is None:
            raise ValueError("no second moment was kept")
        hessian = self._lower.float().mul_(2)
        for start in range(0, self.inputs, BLOCK):
            end = min(start + BLOCK, self.inputs)
            corner = hessian[start:end, start:end]
            corner.copy_(corner.tril() + corner.tril(-1).t())
            hessian[:start, start:end] = hessian[start:end, :start].t()
        return hessian

    def _draw(self, keys: Tensor, tokens: Tensor) -> None:
        """Keep the tokens with the smallest keys: a uniform sample of a stream of any length."""
        if len(self._keys) == self.sample_size:
            smaller = keys < self._keys[-1:]
            keys, tokens = keys[smaller], tokens[smaller]
        keys = torch.cat((self._keys, keys))
        indices = keys.argsort()[: self.sample_size]
        self._keys, self.sample = keys[indices], torch.cat((self.sample, tokens))[indices]


def _add_products(lower: Tensor, x: Tensor, exact: bool) -> None:
    """lower += x^T x, on and below the diagonal.

    Args:
        x: [tokens, inputs] fp32.
        exact: x is exact in bfloat16, so that its products equal those in fp32.
    """
    with _short_products() if exact else nullcontext():
        for start in range(0, len(lower), BLOCK):
            end = min(start + BLOCK, len(lower))
            lower[start:end, :end] += x[:, start:end].t() @ x[:, :end]


@contextmanager
def _short_products() -> Iterator[None]:
    """Allow fp32 matrices to be multiplied in bfloat16 if that is faster, with fp32 sums."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _keys(places: Tensor) -> Tensor:
    """Return a pseudo-random number for each of n positions: [n] int64 (splitmix64's finaliser)."""

    def shifted(z: Tensor, by: int) -> Tensor:
        return (z >> by) & (1 << 64 - by) - 1  # without the sign

    z = places * -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed number
    z = (z ^ shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ shifted(z, 31)


# Folding of the factors s of a layer's inputs: W x = (W diag(s)) (diag(1/s) x).
#
# The operation before the layer then outputs x / s: a norm by its gain, a linear layer by its rows.


def scale_inputs(w: Tensor, scales: Tensor) -> Tensor:
    """Return W diag(s), [outputs, inputs] fp32."""
    return w.float() * scales


def kept_scales(weight: Tensor, scales: Tensor, offset: float = 0.0) -> Tensor:
    """Return the factors near `scales` by which a norm's gain can be divided without rounding.

    The layers after the norm are multiplied by these. A factor is 1 if the divided gain would be
    out of range of its dtype.

    Args:
        weight: [inputs], the stored gain in the dtype of the checkpoint.
        offset: added to it to get the gain.

    Returns:
        [inputs] fp32.
    """
    gain = weight.float() + offset
    factors = gain / (divided(weight, scales, offset).float() + offset)
    factors = factors.masked_fill(~(factors.isfinite() & (factors > 0)), 1.0)
    return torch.where(gain == 0, scales, factors)


def divided(values: Tensor, scales: Tensor, offset: float = 0.0) -> Tensor:
    """Return a gain, weight or bias whose outputs are divided by s, in its dtype.

    Operations between a linear layer and its readers must be linear in each channel: attention
    after the value projection, the product with the gate after the up projection. Heads that share
    a value need equal factors.

    Args:
        values: the gain of a norm less `offset`; a bias; or a weight [outputs, inputs], with scales
            [outputs, 1].
    """
    return ((values.float() + offset) / scales - offset).to(values.dtype)


# SmoothQuant moves outliers of the inputs into the weights, so that both fit into eight bits.
#
# Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
# Language Models", section 4.


def smoothing_scales(absmax: Tensor, weights: Sequence[Tensor], alpha: float = 0.5) -> Tensor:
    """Return s = max |x|^alpha / max |w|^(1 - alpha) of each input.

    An input that is always 0, or whose weights are all 0, has the factor 1.

    Args:
        absmax: [inputs], of the layers' inputs x.
        weights: [outputs, inputs] each, of all layers that read these inputs.
        alpha: share of the difficulty that moves into the weights.

    Returns:
        [inputs] fp32.
    """
    largest = torch.stack([w.abs().amax(0).float() for w in weights]).amax(0)
    scales = absmax.float().pow(alpha) / largest.pow(1 - alpha)
    return scales.masked_fill((absmax == 0) | (largest == 0), 1.0)


# AWQ: important inputs get finer steps: their weights are scaled up, and the inputs down.
#
# Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration",
# section 3.2. No weight stays in higher precision. The clip search is that of the authors' code.

PIECE = 1 << 22  # values of a product in memory at a time
FLOOR = 1e-6  # smaller mean |x| are raised to this share of the largest, which bounds factors


def search_scaling(
    weights: Sequence[Tensor], x: Tensor, mean_abs: Tensor, grid: Grid, *, steps: int = 20
) -> Tensor:
    """Return s = mean |x|^alpha with the alpha in [0, 1] of the least error.

    The error is || Q(W diag(s)) diag(s)^-1 X - W X ||^2. Ties go to the smaller alpha.

    Args:
        weights: [outputs, inputs] each, of all layers that read these inputs.
        x: [tokens, inputs], a sample of them.
        mean_abs: [inputs], of all tokens.
        steps: alpha increases by 1/steps.

    Returns:
        [inputs] fp32, above 0.
    """

    def loss(scales: Tensor) -> float:
        rounded = (rtn(scale_inputs(w, scales), grid).dequantised().div_(scales) for w in weights)
        return sum(_squared_outputs(a.sub_(w), x) for a, w in zip(rounded, weights, strict=True))

    return min((_powers(mean_abs, step / steps) for step in range(steps + 1)), key=loss)


def search_clip(
    w: Tensor, x: Tensor, grid: Grid, *, steps: int = 10, smallest: float = 0.5
) -> Tensor:
    """Return the limit that each group of weights is clipped to, for finer steps.

    Several shares of the group's largest weight are tried; the result has the least squared error
    of the group's part of the outputs. Do not clip queries and keys: their error does not represent
    the error of attention.

    Args:
        w: [outputs, inputs] as it will be rounded, factors folded in.
        x: [tokens, inputs], a sample of its inputs.
        smallest: the least share; there are `steps` steps between it and 1.

    Returns:
        [outputs, groups], or [1, 1] for a whole tensor.
    """
    width = grid.width(w.shape[1])
    grouped = x.float().reshape(len(x), -1, width).transpose(0, 1)  # [groups, tokens, width]
    moments = grouped.transpose(1, 2) @ grouped  # [groups, width, width]
    widest = w.float().reshape(len(w), -1, width).abs().amax(-1)
    if grid.group == TENSOR:
        widest = widest.amax().view(1, 1)
    limits, best_loss = widest, torch.full_like(widest, torch.inf)
    for step in range(steps + 1):
        tried = widest * (1 - (1 - smallest) * step / steps)
        off = rtn(clip(w, tried), grid).dequantised().sub_(w)
        parts = off.view(len(w), -1, width).transpose(0, 1)  # [groups, outputs, width]
        loss = ((parts @ moments) * parts).sum(-1).t()  # [outputs, groups]
        if grid.group == TENSOR:
            loss = loss.sum().view(1, 1)
        limits = torch.where(loss < best_loss, tried, limits)
        best_loss = torch.minimum(loss, best_loss)
    return limits


def clip(w: Tensor, limits: Tensor) -> Tensor:
    """Return w [outputs, inputs] clipped to +-limits [outputs, groups], fp32."""
    grouped = w.float().reshape(len(w), limits.shape[1], -1)
    return grouped.clamp(-limits[:, :, None], limits[:, :, None]).view(w.shape)


def _powers(mean_abs: Tensor, alpha: float) -> Tensor:
    """Return mean |x|^alpha, normalised so that largest times smallest is 1; an input that is
    always 0 counts as the smallest of the others."""
    live = mean_abs > 0
    if not bool(live.any()):
        return torch.ones_like(mean_abs)
    floor = max(float(mean_abs[live].min()), FLOOR * float(mean_abs.max()))
    powers = mean_abs.clamp(min=floor).pow(alpha)
    return powers / (powers.max() * powers.min()).sqrt()


def _squared_outputs(w: Tensor, x: Tensor) -> float:
    """Return || W X ||^2, computed by a few rows of W at a time."""
    rows = max(1, PIECE // max(1, len(x)))
    return sum(float((part @ x.t()).square_().sum(dtype=torch.float64)) for part in w.split(rows))


# find(fold, weights [outputs, inputs] by name, statistics of their inputs) -> factors [inputs].
FindScales = Callable[[Fold, Mapping[str, Tensor], InputStatistics], Tensor]


@dataclass(slots=True)
class Folded:
    """The tensors of a block after folding."""

    # Of the linear layers by name, [outputs, inputs]; changed ones in fp32.
    weights: dict[str, Tensor]
    # Norms and biases that changed, by name in the checkpoint.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # Folded factors [inputs] of a matrix, by its number; its inputs are x / scales.
    scales: dict[int, Tensor] = field(default_factory=dict)

    def sample(self, matrix: int, statistics: InputStatistics) -> Tensor:
        """Return a sample [tokens, inputs] of the matrix's inputs after folding."""
        if matrix in self.scales:
            return statistics.sample / self.scales[matrix]
        return statistics.sample


def fold_block(
    block: Block,
    folds: Sequence[Fold],
    statistics: Mapping[int, InputStatistics],
    quantises: Callable[[str], bool],
    find: FindScales,
) -> Folded:
    """Search the factors of each fold and fold them into its source.

    Args:
        folds: with the names of this block's layers.
        statistics: of the inputs of each matrix.
        quantises: whether a layer, by name, is quantised. Factors are searched for these; other
            readers of the same inputs are scaled too.
    """
    matrices = {layer.name: layer.matrix for layer in block.layers}
    folded = Folded({layer.name: layer.weight for layer in block.layers})
    for fold in folds:
        served = [name for name in fold.readers if quantises(name)]
        if not served:
            continue
        matrix = matrices[fold.readers[0]]
        scales = find(fold, {name: folded.weights[name] for name in served}, statistics[matrix])
        if fold.outputs is not None:
            _into_linear(block, folded, fold.source, fold.outputs, fold.of_channels(scales))
        else:
            scales = _into_norm(block, folded, fold, scales)
        for name in fold.readers:
            folded.weights[name] = scale_inputs(folded.weights[name], scales)
        folded.scales |= {matrices[name]: scales for name in fold.readers}
    return folded


def awq_factors(grid: Callable[[str], Grid]) -> FindScales:
    """Return the search of AWQ; `grid` returns a layer's grid by name, equal for shared inputs."""

    def find(fold: Fold, weights: Mapping[str, Tensor], statistics: InputStatistics) -> Tensor:
        mean_abs = fold.average(statistics.mean_abs())
        shared = grid(next(iter(weights)))
        return search_scaling(list(weights.values()), statistics.sample, mean_abs, shared)

    return find


def smoothing_factors(alpha: float) -> FindScales:
    """Return the search of SmoothQuant, for the layers after norms."""

    def find(fold: Fold, weights: Mapping[str, Tensor], statistics: InputStatistics) -> Tensor:
        scales = smoothing_scales(statistics.absmax, list(weights.values()), alpha)
        return fold.average(scales)

    return find


def _into_norm(block: Block, folded: Folded, fold: Fold, scales: Tensor) -> Tensor:
    """Fold into a norm; return the factors actually applied, given the dtype of its gain."""
    weight_name, bias_name = fold.source + WEIGHT, fold.source + BIAS
    weight, bias = block.tensors[weight_name], block.tensors.get(bias_name)
    factors = kept_scales(weight, fold.of_channels(scales), fold.offset)
    folded.tensors[weight_name] = divided(weight, factors, fold.offset)
    if bias is not None:
        folded.tensors[bias_name] = divided(bias, factors)
    return factors[fold.channels]


def _into_linear(
    block: Block, folded: Folded, source: str, outputs: Tensor, scales: Tensor
) -> None:
    weight = folded.weights[source].float()
    bias_name = source + BIAS
    bias = folded.tensors.get(bias_name, block.tensors.get(bias_name))
    by_row = torch.ones(len(weight), device=weight.device)
    by_row[outputs] = scales
    folded.weights[source] = divided(weight, by_row[:, None])
    if bias is not None:
        folded.tensors[bias_name] = divided(bias, by_row)
