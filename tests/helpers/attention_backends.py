"""Every attention backend of this build, and steps to test them with."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import pytest
import torch
from helpers.optional_native import NATIVE
from helpers.optional_triton import NO_TRITON, TRITON, device

from kvik.attention.base import AttentionBackend
from kvik.attention.indexed import places_seen
from kvik.attention.layout import StepLayout
from kvik.attention.reference import ReferenceAttention
from kvik.attention.sdpa import SdpaAttention
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.torch_ops import TORCH

NAMES = ("reference", "sdpa", *(["cpu"] if NATIVE else []))
KV_FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}


WITH_TRITON = (*NAMES, "triton")


def make_backend(name: str, threads: int = 1, isa: str | None = None) -> AttentionBackend:
    """Return a backend. threads, isa: of the native kernels."""
    if name == "triton":
        if not TRITON:
            pytest.skip(NO_TRITON)
        from kvik.attention.triton import TritonAttention
        from kvik.kernels.triton.ops import triton_ops

        return TritonAttention(triton_ops(device()))
    if name == "cpu":
        from kvik.attention.cpu import CpuAttention
        from kvik.kernels.cpu.native import Native
        from kvik.kernels.cpu.ops import native_ops

        native = Native(threads, isa)
        return CpuAttention(native, native_ops(native))
    return ReferenceAttention(REFERENCE) if name == "reference" else SdpaAttention(TORCH)


def one_sequence(
    block_table: torch.Tensor, slots: torch.Tensor, context: int, block_size: int = 16
) -> StepLayout:
    """The layout of a step of one sequence, which stores its newest tokens at `slots`."""
    return StepLayout(
        query_start_loc=torch.tensor([0, len(slots)], dtype=torch.int32),
        seq_lens=torch.tensor([context], dtype=torch.int32),
        block_table=block_table,
        slot_mapping=slots,
        num_scheduled=(len(slots),),
        contexts=(context,),
        block_size=block_size,
    )


Of = TypeVar("Of")


def placed(of: Of, backend: AttentionBackend) -> Of:
    """Return the same with all tensors where a backend computes."""
    if isinstance(of, torch.Tensor):
        return of.to(device()) if backend.caps.name == "triton" else of  # type: ignore[return-value]
    if isinstance(of, tuple):
        return tuple(placed(each, backend) for each in of)  # type: ignore[return-value]
    if not is_dataclass(of):
        return of
    names = [field.name for field in fields(of)]
    return replace(of, **{name: placed(getattr(of, name), backend) for name in names})  # type: ignore[type-var]


def seen_by_token(layout: StepLayout) -> list[torch.Tensor]:
    """Return the places in its sequence of the keys that each token sees."""
    starts = enumerate(layout.query_start_loc[:-1].tolist())
    return [places for seq, start in starts for places in places_seen(layout, seq, start)]


def from_bits(choice: torch.Tensor, layout: StepLayout) -> list[torch.Tensor]:
    """Return the places of the keys that each token reads, from a choice of the native kernels for
    all heads or one of them."""
    bits = (choice[:, :, None] >> torch.arange(64) & 1).flatten(1).bool()
    pairs = zip(seen_by_token(layout), bits, strict=True)
    return [seen[of_token[: len(seen)]] for seen, of_token in pairs]


def as_bits(choice: list[torch.Tensor], layout: StepLayout) -> torch.Tensor:
    """Return the reverse of `from_bits`."""
    bits = torch.zeros(len(choice), -(-max(layout.contexts) // 64) * 64, dtype=torch.int64)
    for row, seen, places in zip(bits, seen_by_token(layout), choice, strict=True):
        row[: len(seen)] = torch.isin(seen, places)
    return (bits.view(len(choice), -1, 64) << torch.arange(64)).sum(2)


def chosen_by(
    backend: AttentionBackend, choice: list[torch.Tensor], layout: StepLayout
) -> list[Any]:
    """Return as a choice of a backend for all heads the places that each token reads."""
    if backend.caps.name == "cpu":
        return [as_bits(choice, layout)]
    if backend.caps.name != "triton":
        return [[places] for places in choice]
    places = torch.nn.utils.rnn.pad_sequence(choice, batch_first=True, padding_value=1 << 30)
    return [*placed((places.int(), torch.tensor([*map(len, choice)], dtype=torch.int32)), backend)]


def places_chosen(choice: Any, layout: StepLayout, backend: AttentionBackend) -> list[torch.Tensor]:
    """Return the reverse of `chosen_by`."""
    if backend.caps.name == "cpu":
        return from_bits(choice[0], layout)
    if backend.caps.name != "triton":
        return [places for (places,) in choice]
    return [row[:count].long().cpu() for row, count in zip(*choice, strict=True)]


# (cached, new) tokens of each sequence of a step
STEPS = {
    "one token": [(0, 1)],
    "decode": [(40, 1)],
    "decode batch": [(5, 1), (64, 1), (17, 1), (0, 1)],
    "decode, very different lengths": [(2, 1)] * 9 + [(700, 1), (300, 1), (650, 1)],
    "prefill": [(0, 37)],
    "prefill batch": [(0, 3), (0, 70), (0, 16)],
    "chunk behind a prefix": [(30, 20)],
    "mixed": [(12, 1), (0, 9), (33, 1), (16, 16), (50, 2)],
}

# Parents of the nodes of a tree; the paths to the last nodes lie scattered.
PARENTS = (-1, 0, 0, 1, 1, 3, 2, 0, 6, 5, 9, 4)


def tree_words(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Each node's word holds itself and its ancestors."""
    found: list[int] = []
    for node, parent in enumerate(parents):
        found.append(1 << node | (found[parent] if node else 0))
    return tuple(found)


# Of an `AttentionSpec` for four heads and scores of about 1: capped at both ends and near 0, and
# sinks above and below all of them; slopes for which far keys count little, or as much as others.
OPTIONS: dict[str, dict[str, Any]] = {
    "capped": {"softcap": 0.7},
    "sinks": {"sinks": torch.tensor([-3.0, 0.5, 90.0, -200.0])},
    "alibi": {"slopes": torch.tensor([0.5, 2**-6, 0.0, 0.1])},
    "all": {
        "softcap": 2.0,
        "sinks": torch.tensor([0.0, 1.0, 5.0, -1.0]),
        "slopes": torch.tensor([2**-8, 0.25, 0.02, 2**-4]),
    },
    "both": {"softcap": 2.0, "sinks": torch.tensor([0.0, 1.0, 5.0, -1.0])},
}
