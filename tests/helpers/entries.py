"""Texts for attention over a window and over entries."""

from __future__ import annotations

from dataclasses import replace

import torch
from helpers.attention_backends import placed
from helpers.indexed import layout_of
from torch import Tensor

from kvik.attention.base import AttentionBackend
from kvik.attention.compressed import AttendCompressed, EntryMaker
from kvik.kernels.weights import Matrix, MatrixSpec, float_kind
from kvik.spec.kv import ENTRY_TOKENS, CompressedSpec, IndexSpec

HEADS, DIM, ROPE, WINDOW = 6, 48, 8, 24  # a group of heads is not full, and a part of the columns
PLAIN = CompressedSpec(1, ROPE, 1, 1)
FLOAT = torch.float32
UNUSED = Matrix(
    MatrixSpec(float_kind(FLOAT), 1, 1, False, None, FLOAT, torch.device("cpu")), None, None
)
INDEX = IndexSpec(5, 40, 9, interleaved=True)
SPECS = {
    "window": PLAIN,
    "all entries": replace(PLAIN, every=20),
    "overlapping": replace(PLAIN, every=6, overlap=True),
    "chosen": replace(PLAIN, every=4, overlap=True, index=INDEX),
    "chosen, unaligned": replace(PLAIN, every=7, index=INDEX),
}
# (cached, new) tokens of each sequence, and tokens of a block
STEPS = {
    "mixed": ([(0, 3), (79, 1), (100, 30), (23, 2)], 16),
    "decode": ([(400, 1), (3, 1)], 4),
    "prefill": ([(0, 150)], 64),
}


class Texts:
    """What attention gets of the tokens of some sequences, and their caches, full of NaN."""

    def __init__(
        self, spec: CompressedSpec, contexts: list[int], block_size: int, dtype: torch.dtype
    ) -> None:
        self.spec, self.block_size, self.dtype = spec, block_size, dtype
        g = torch.Generator().manual_seed(len(contexts))
        dims, index = spec.dims(DIM), spec.index or INDEX
        widths = (
            HEADS * DIM,
            DIM,
            spec.inputs(DIM),
            index.heads * index.dim,
            index.heads,
            ROPE // 2,
        )
        self.parts = [[torch.randn(n, width, generator=g) for width in widths] for n in contexts]
        counts = [-(-n // block_size) for n in contexts]
        self.tables = [
            torch.randperm(sum(counts), generator=g).int().split(counts) for _ in range(3)
        ]
        # Behind those of the heads are numbers that no kernel may read: they overflow.
        behind = torch.full((64,), 3e38)
        self.sinks = torch.cat((torch.randn(HEADS, generator=g), behind))[:HEADS]
        self.makers = tuple(
            EntryMaker(
                torch.randn(spec.every, (1 + spec.overlap) * dim, generator=g),
                torch.rand(dim, generator=g).to(dtype),
                1e-5,
                *(_turns(16 * torch.arange(32)), _turns(torch.arange(16))),
                last=400,
            )
            for dim in dims
        )
        narrow = [dim // ENTRY_TOKENS for dim in dims]
        self.caches = tuple(
            torch.full((sum(counts), block_size, 1, width), torch.nan, dtype=dtype)
            for width in (DIM + spec.inputs(DIM), *narrow)
        )

    def step(self, backend: AttentionBackend, spans: list[tuple[int, int]]) -> Tensor:
        """Run (cached, new) tokens of each sequence. Returns [tokens, heads, dim]."""
        parts = [
            torch.cat(
                [
                    part[cached : cached + new]
                    for part, (cached, new) in zip(each, spans, strict=True)
                ]
            )
            for each in zip(*self.parts, strict=True)
        ]
        q, k, inputs, index_q, weights = (part.to(self.dtype) for part in parts[:5])
        spec, angles = self.spec, parts[5]
        self.caches = placed(self.caches, backend)
        of = AttendCompressed(
            q=q.view(-1, HEADS, DIM).clone(),
            k=k.clone(),
            inputs=inputs if spec.every else None,
            indexed=(index_q.clone(), weights) if spec.index else None,
            rotation=torch.cat((angles.cos(), angles.sin()), 1),
            spec=spec,
            makers=self.makers,
            caches=self.caches,
            layouts=tuple(
                layout_of(tables, spans, self.block_size)
                for tables in self.tables[: len(self.caches)]
            ),
            window=WINDOW,
            scale=0.2,
            sinks=self.sinks,
            down=UNUSED,
            local_heads=False,
        )
        return backend.over_entries(placed(of, backend)).cpu()


def _turns(positions: Tensor) -> Tensor:
    angles = positions[:, None] * torch.arange(1, ROPE // 2 + 1) / 10
    return torch.cat((angles.cos(), angles.sin()), 1)


def run(
    backend: AttentionBackend,
    spec: str,
    step: str,
    dtype: torch.dtype,
    before: AttentionBackend | None = None,
) -> Tensor:
    """Return what the new tokens of a step get, after their sequences' earlier ones, which `before`
    computes, if it is not None."""
    spans, block_size = STEPS[step]
    texts = Texts(SPECS[spec], [*map(sum, spans)], block_size, dtype)
    texts.step(before or backend, [(0, cached) for cached, _ in spans])
    return texts.step(backend, spans)
