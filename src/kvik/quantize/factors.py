"""Factors of a block's inputs: found by a method, folded into what comes before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvik.quantize.awq import search_scaling
from kvik.quantize.block import BIAS, WEIGHT, Block
from kvik.quantize.folding import fold_into_linear, fold_into_norm, kept_scales, scale_inputs
from kvik.quantize.grid import Grid
from kvik.quantize.smoothquant import smoothing_scales
from kvik.quantize.statistics import InputStatistics
from kvik.quantize.structure import Fold

# Finds the factors [inputs] of layers that share inputs, by name [outputs, inputs] each.
FindScales = Callable[[Fold, Mapping[str, Tensor], InputStatistics], Tensor]


@dataclass(slots=True)
class Folded:
    """A block in which factors went from the inputs of layers to what comes before them.

    Attributes:
        weights: of the linear layers by name, [outputs, inputs]; fp32 where they changed.
        tensors: norms and biases that changed, by name in the checkpoint.
        scales: of the inputs of each matrix that has any: it is given x / scales.
    """

    weights: dict[str, Tensor]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[int, Tensor] = field(default_factory=dict)

    def sample(self, matrix: int, statistics: InputStatistics) -> Tensor:
        """[tokens, inputs] of what the matrix is given."""
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
    """
    Args:
        folds: with the names of this block's layers.
        statistics: of the inputs of each matrix.
        quantises: whether a layer, by name, is. Factors serve these; others that read the same
            inputs go along.
    """
    matrices = {layer.name: layer.matrix for layer in block.layers}
    folded = Folded({layer.name: layer.weight for layer in block.layers})
    for fold in folds:
        served = [name for name in fold.readers if quantises(name)]
        if not served:
            continue
        matrix = matrices[fold.readers[0]]
        scales = find(fold, {name: folded.weights[name] for name in served}, statistics[matrix])
        if fold.linear:
            _into_linear(block, folded, fold, scales)
        else:
            scales = _into_norm(block, folded, fold, scales)
        for name in fold.readers:
            folded.weights[name] = scale_inputs(folded.weights[name], scales)
        folded.scales |= {matrices[name]: scales for name in fold.readers}
    return folded


def awq_factors(grid: Callable[[str], Grid]) -> FindScales:
    """Those of AWQ; `grid` is that of a layer by name. Layers that share inputs have one."""

    def find(fold: Fold, weights: Mapping[str, Tensor], statistics: InputStatistics) -> Tensor:
        mean_abs = fold.average(statistics.mean_abs())
        shared = grid(next(iter(weights)))
        return search_scaling(list(weights.values()), statistics.sample, mean_abs, shared).scales

    return find


def smoothing_factors(alpha: float) -> FindScales:
    """Those of SmoothQuant, for the layers behind norms."""

    def find(fold: Fold, weights: Mapping[str, Tensor], statistics: InputStatistics) -> Tensor:
        return smoothing_scales(statistics.absmax, list(weights.values()), alpha)

    return find


def _into_norm(block: Block, folded: Folded, fold: Fold, scales: Tensor) -> Tensor:
    """Returns the factors that the norm's dtype can hold."""
    weight_name, bias_name = fold.source + WEIGHT, fold.source + BIAS
    weight, bias = block.tensors[weight_name], block.tensors.get(bias_name)
    scales = kept_scales(weight, scales)
    weight, bias = fold_into_norm(weight, bias, scales)
    folded.tensors[weight_name] = weight
    if bias is not None:
        folded.tensors[bias_name] = bias
    return scales


def _into_linear(block: Block, folded: Folded, fold: Fold, scales: Tensor) -> None:
    rows = slice(fold.first, fold.first + fold.num_channels)
    weight = folded.weights[fold.source].float()
    bias_name = fold.source + BIAS
    bias = folded.tensors.get(bias_name, block.tensors.get(bias_name))
    by_row = torch.ones(len(weight), device=weight.device)
    by_row[rows] = fold.of_channels(scales)
    weight, bias = fold_into_linear(weight, bias, by_row)
    folded.weights[fold.source] = weight
    if bias is not None:
        folded.tensors[bias_name] = bias
