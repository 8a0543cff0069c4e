"""GPTQ's layout, as AutoGPTQ and GPTQModel write it (their `QuantLinear.pack`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.kernels.weights import Weight
from kvik.nn.formats.base import LinearShape, Shard, StoredTensor, TensorError
from kvik.nn.formats.bits import (
    WORD,
    lessen,
    pack_gptq,
    pack_gptq_zeros,
    restore,
    unpack_gptq,
    unpack_gptq_zeros,
)
from kvik.nn.formats.integers import (
    Codes,
    because,
    check_group,
    finite,
    group_index,
    weight_of,
)
from kvik.spec.stored_weights import StoredScheme

INDEX = "g_idx"


class Gptq:
    """qweight [inputs * bits / 32, outputs], qzeros [groups, outputs * bits / 32], scales
    [groups, outputs], g_idx [inputs], which may be left out where groups are neighbours."""

    unread = ()

    def __init__(
        self, scheme: StoredScheme, shape: LinearShape, stored: Mapping[str, tuple[int, ...]]
    ) -> None:
        """
        Raises:
            ValueError: the layer cannot be stored like this.
        """
        for name, count in (("inputs", shape.inputs), ("outputs", shape.outputs)):
            if count * scheme.bits % WORD:
                raise ValueError(
                    f"its {count} {name} of {scheme.bits} bits do not fill words of {WORD}"
                )
        self.scheme, self.shape = scheme, shape
        self.groups = check_group(scheme, shape)
        self.has_index = scheme.ordered or INDEX in stored

    def tensors(self, shard: Shard, dtype: torch.dtype) -> dict[str, StoredTensor]:
        inputs, outputs, bits = self.shape.inputs, self.shape.outputs, self.scheme.bits
        axis = {"column": 1, "row": 0, None: None}[shard]

        def stored(rows: int, columns: int, kind: torch.dtype) -> StoredTensor:
            return StoredTensor((rows, columns), kind, axis, because=because(self.scheme))

        found = {
            "qweight": stored(inputs * bits // WORD, outputs, torch.int32),
            "qzeros": stored(self.groups, outputs * bits // WORD, torch.int32),
            "scales": stored(self.groups, outputs, torch.float16),
        }
        if self.has_index:
            found[INDEX] = StoredTensor((inputs,), torch.int64, 0 if shard == "row" else None)
        return found

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        return weight_of(self.codes(tensors, rows), self.scheme)

    def codes(self, tensors: Mapping[str, Tensor], rows: slice) -> Codes:
        """Of some outputs."""
        bits = self.scheme.bits
        q = unpack_gptq(tensors["qweight"][:, rows], bits)
        scales = finite("scales", tensors["scales"][:, rows]).t()
        zeros: Tensor | None = self._zeros(tensors["qzeros"], rows)
        if self.scheme.symmetric:
            if bool((zeros != 2 ** (bits - 1)).any()):
                message = f"must be {2 ** (bits - 1)} everywhere, because sym is true"
                raise TensorError("qzeros", message)
            zeros = None
        return Codes(q, scales, zeros, bits, self._index(tensors))

    def _zeros(self, words: Tensor, rows: slice) -> Tensor:
        """[rows, groups]."""
        first = rows.start // WORD  # so many outputs fill words with codes of any bits
        bits = self.scheme.bits
        own = words[:, first * bits : -(-rows.stop // WORD) * bits]
        zeros = unpack_gptq_zeros(restore(own, bits) if self.scheme.lessened else own, bits)
        return zeros[rows.start - first * WORD : rows.stop - first * WORD]

    def _index(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The group of each input; None: neighbours."""
        if not self.has_index:
            return None
        index = group_index(INDEX, tensors[INDEX], self.groups)
        if self.scheme.ordered:
            return index
        if not torch.equal(index, natural_index(len(index), self.groups, index.device)):
            raise TensorError(INDEX, "must count up, because desc_act is false")
        return None

    def save(self, codes: Codes) -> dict[str, Tensor]:
        """The tensors of a whole layer."""
        bits = codes.bits
        zeros = codes.zeros
        if zeros is None:
            zeros = torch.full(codes.scales.shape, 2 ** (bits - 1), dtype=torch.uint8)
        words = pack_gptq_zeros(zeros, bits)
        index = codes.groups
        if index is None:
            index = natural_index(self.shape.inputs, self.groups, codes.q.device)
        return {
            "qweight": pack_gptq(codes.q, bits),
            "qzeros": lessen(words, bits) if self.scheme.lessened else words,
            "scales": codes.scales.t().to(torch.float16).contiguous(),
            INDEX: index.to(torch.int32),
        }


def natural_index(inputs: int, groups: int, device: torch.device) -> Tensor:
    """The group of each input where groups are neighbours."""
    return torch.arange(inputs, device=device) // (inputs // groups)
