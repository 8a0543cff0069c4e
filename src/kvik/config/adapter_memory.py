"""Bytes of the adapters from which requests choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvik.models.model_spec import ModelSpec
from kvik.spec.adapters import in_block, is_stack
from kvik.spec.declared import DeclaredLinear, Role
from kvik.spec.model import DTYPE_BYTES
from kvik.spec.shares import TILE

AdapterSizes = Mapping[str, tuple[int, int, int]]  # see `Adapter.sizes`
NO_SIZE = (0, 0, 0)


def _padded(rank: int, linear: DeclaredLinear) -> int:
    """Return the numbers of A and B of a layer. Kernels pad both sides of a matrix."""
    return -(-rank // TILE) * TILE * (linear.inputs + sum(linear.outputs))


def _rank_of_experts(adapter: AdapterSizes, linears: Sequence[DeclaredLinear]) -> int:
    """Return the largest rank of what an adapter adds to a matrix of each expert of a layer.

    Args:
        linears: the layers that form this matrix, of each expert.
    """
    apart = (
        sum(adapter.get(in_block(name), NO_SIZE)[0] for name in linear.names) for linear in linears
    )
    sizes = {linears[0].inputs, sum(linears[0].outputs)}
    stacked = (
        ranks // len(linears)
        for name, (ranks, *both) in adapter.items()
        if {*both} == sizes and is_stack(name, linears[0].names[0])
    )
    return max(*apart, max(stacked, default=0))


@dataclass(frozen=True, slots=True)
class AdaptersFootprint:
    """Sizes of the adapters from which requests choose."""

    weights: int  # bytes of all slots and of loading one adapter, in each process
    # Width of the widest layer that one changes. Its outputs exist before and after the change, and
    # the activation is not fused.
    outputs: int
    rank: int  # the largest rank of a matrix
    slots: int  # number of adapters
    # Of each layer, by its name from its block on; of the first expert's, the largest of all
    # experts.
    ranks: dict[str, int]
    experts: int  # the largest number of experts of a layer that one changes; 0: none does

    @staticmethod
    def of(
        spec: ModelSpec, slots: int, files: Sequence[AdapterSizes], min_rank: int, dtype: str
    ) -> AdaptersFootprint:
        """Return the sizes of adapters of a model.

        Args:
            files: see `Adapter.sizes`.
            min_rank: rank for which each layer has room, except those of experts.
        """
        weights = outputs = largest_rank = largest = experts = 0
        ranks: dict[str, int] = {}
        if spec.predictor is not None:
            spec = replace(spec, predictor=None)  # drafts come from the plain model
        routed: dict[tuple[int | None, Role], list[DeclaredLinear]] = {}
        squares = set[int]()
        for linear in spec.declaration.linears:
            if linear.router is not None:
                routed.setdefault((linear.layer, linear.role), []).append(linear)
            if not linear.adaptable:
                continue
            names = [in_block(name) for name in linear.names]
            each = [max((min_rank, *(of.get(name, NO_SIZE)[0] for of in files))) for name in names]
            if rank := sum(each):
                ranks |= zip(names, each, strict=True)
                numbers = _padded(rank, linear)
                weights += slots * numbers * DTYPE_BYTES[dtype]
                largest = max(largest, numbers)
                width = sum(linear.outputs)
                outputs, largest_rank = max(outputs, width), max(largest_rank, rank)
        for linears in routed.values():
            first, count = linears[0], len(linears)
            if rank := max((_rank_of_experts(of, linears) for of in files), default=0):
                ranks[in_block(first.names[0])] = rank
                assert first.router is not None
                width, active = sum(first.outputs), first.router.active
                numbers = _padded(rank, first)
                weights += slots * count * numbers * DTYPE_BYTES[dtype]
                largest, largest_rank = max(largest, numbers), max(largest_rank, rank * active)
                # Rows of pairs of tokens and experts: inputs, outputs, and their sums in fp32.
                outputs = max(outputs, active * 4 * (first.inputs + width))
                experts = max(experts, count)
                squares |= {width, first.inputs}
        # `nn.layers.AdaptedExperts` has identities of these sizes, or fewer.
        weights += sum(size * size for size in squares) * DTYPE_BYTES[dtype]
        # Loading one makes the matrices of a layer in fp32, from others in fp32 at most.
        weights += 8 * largest
        return AdaptersFootprint(weights, outputs, largest_rank, slots, ranks, experts)

    def step(self, tokens: int, item: int) -> int:
        """Bytes of a step in addition to those of the model without adapters, without the lists
        that sort its rows."""
        return tokens * (2 * self.outputs + self.rank) * item
