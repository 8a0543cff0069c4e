"""What layouts of integers share: codes with scales and zero points, and the weight they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.kernels.weights import (
    SYMMETRIC_ZERO,
    FloatWeight,
    Int4Weight,
    Int8Weight,
    OrderedWeight,
    PlainWeight,
    Weight,
)
from kvik.nn.formats.base import LinearShape, TensorError
from kvik.nn.formats.bits import pack_nibbles
from kvik.spec.stored_weights import StoredScheme
from kvik.spec.weights import LayerScheme, loaded_scheme

SIGN = 0x80  # what eight bits without sign differ from those with one


@dataclass(frozen=True, slots=True)
class Codes:
    """w[o, i] = (q[o, i] - zeros[o, g]) * scales[o, g], where g is the group of input i.

    Attributes:
        q: [outputs, inputs] uint8.
        scales: [outputs, groups], any float dtype.
        zeros: [outputs, groups] uint8; None: 2^(bits-1) everywhere.
        bits: of a code.
        groups: [inputs] integers, the group of each input; None: i // group size.
    """

    q: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    groups: Tensor | None = None


def weight_of(codes: Codes, scheme: StoredScheme) -> Weight:
    """The codes of some outputs -> what the engine multiplies: `loaded_scheme` tells what."""
    inputs = codes.q.shape[1]
    loaded = loaded_scheme(scheme, inputs)
    order = None if codes.groups is None else codes.groups.argsort(stable=True)
    q = codes.q if order is None else codes.q[:, order]
    if loaded is None:
        values = _multiplied_out(q, codes)
        if order is not None:
            values = torch.empty_like(values).index_copy_(1, order, values)
        return FloatWeight(values)
    plain = _plain(q, codes, loaded)
    if not loaded.ordered:
        return plain
    if order is None:
        order = torch.arange(inputs, device=q.device)
    return OrderedWeight(plain, order.to(torch.int32))


def _plain(q: Tensor, codes: Codes, loaded: LayerScheme) -> PlainWeight:
    scales = codes.scales.float()
    if loaded.bits == 8:
        values = (q ^ SIGN).view(torch.int8)
        scales = scales if loaded.group else scales[:, 0]
        return Int8Weight(values, scales, loaded.quantize_activations, loaded.group)
    parts = q.shape[1] // loaded.group // scales.shape[1]  # of a group
    scales = scales.repeat_interleave(parts, dim=1)
    if codes.zeros is None:
        shifted = q + (SYMMETRIC_ZERO - 2 ** (codes.bits - 1))
        return Int4Weight(pack_nibbles(shifted), scales, None, loaded.group)
    zeros = codes.zeros.repeat_interleave(parts, dim=1)
    return Int4Weight(pack_nibbles(q), scales, zeros, loaded.group)


def _multiplied_out(q: Tensor, codes: Codes) -> Tensor:
    """q, whose groups are neighbours -> [outputs, inputs] fp32."""
    wide = q.float().view(len(q), codes.scales.shape[1], -1)
    wide -= 2 ** (codes.bits - 1) if codes.zeros is None else codes.zeros[:, :, None].float()
    return wide.mul_(codes.scales.float()[:, :, None]).view(q.shape)


def check_group(scheme: StoredScheme, shape: LinearShape) -> int:
    """How many groups the inputs of a layer have.

    Raises:
        ValueError: groups do not divide them.
    """
    group = scheme.group or shape.inputs
    if shape.inputs % group:
        raise ValueError(f"groups of {group} do not divide its {shape.inputs} inputs")
    return shape.inputs // group


def because(scheme: StoredScheme) -> str:
    """The fields of quantization_config that shapes follow from."""
    return f"{scheme.bits} bits" + (f" in groups of {scheme.group}" if scheme.group else "")


def finite(name: str, scales: Tensor) -> Tensor:
    """The scales, some of the named tensor.

    A scale may be negative: tools that use the whole range of codes write such ones.

    Raises:
        TensorError: one is NaN or infinite.
    """
    if not bool(scales.isfinite().all()):
        raise TensorError(name, "holds NaN or infinity")
    return scales


def group_index(name: str, index: Tensor, groups: int) -> Tensor:
    """The group of each input.

    Raises:
        TensorError: a group that is not there, or one with more inputs than others.
    """
    if bool(((index < 0) | (index >= groups)).any()):
        raise TensorError(name, f"must hold groups from 0 to {groups - 1}")
    if bool((index.bincount(minlength=groups) != len(index) // groups).any()):
        raise TensorError(name, f"must give each of {groups} groups as many inputs")
    return index
