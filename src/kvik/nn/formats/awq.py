"""AutoAWQ's GEMM layout (awq/modules/linear/gemm.py of AutoAWQ 0.2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.kernels.weights import Weight
from kvik.nn.formats.base import LinearShape, Shard, StoredTensor
from kvik.nn.formats.bits import AWQ_BITS, AWQ_ORDER, pack_awq, unpack_awq
from kvik.nn.formats.integers import Codes, because, check_group, finite, weight_of
from kvik.spec.stored_weights import StoredScheme

EACH = len(AWQ_ORDER)  # outputs of a word


class Awq:
    """qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs]."""

    unread = ()

    def __init__(
        self, scheme: StoredScheme, shape: LinearShape, stored: Mapping[str, tuple[int, ...]]
    ) -> None:
        """
        Raises:
            ValueError: the layer cannot be stored like this.
        """
        if shape.outputs % EACH:
            raise ValueError(f"its {shape.outputs} outputs do not fill words of {EACH}")
        self.scheme, self.shape = scheme, shape
        self.groups = check_group(scheme, shape)

    def tensors(self, shard: Shard, dtype: torch.dtype) -> dict[str, StoredTensor]:
        inputs, outputs, why = self.shape.inputs, self.shape.outputs, because(self.scheme)
        axis = {"column": 1, "row": 0, None: None}[shard]

        def stored(rows: int, columns: int, kind: torch.dtype) -> StoredTensor:
            return StoredTensor((rows, columns), kind, axis, because=why)

        return {
            "qweight": stored(inputs, outputs // EACH, torch.int32),
            "qzeros": stored(self.groups, outputs // EACH, torch.int32),
            "scales": stored(self.groups, outputs, torch.float16),
        }

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        return weight_of(self.codes(tensors, rows), self.scheme)

    def codes(self, tensors: Mapping[str, Tensor], rows: slice) -> Codes:
        """Of some outputs."""
        first = rows.start // EACH
        words = slice(first, -(-rows.stop // EACH))
        own = slice(rows.start - first * EACH, rows.stop - first * EACH)
        q = unpack_awq(tensors["qweight"][:, words])[own]
        zeros = unpack_awq(tensors["qzeros"][:, words])[own]
        scales = finite("scales", tensors["scales"][:, rows]).t()
        return Codes(q, scales, zeros, AWQ_BITS)

    def save(self, codes: Codes) -> dict[str, Tensor]:
        """The tensors of a whole layer, which has zero points."""
        assert codes.zeros is not None
        return {
            "qweight": pack_awq(codes.q),
            "qzeros": pack_awq(codes.zeros),
            "scales": codes.scales.t().to(torch.float16).contiguous(),
        }
