"""Tables of rotary positions, and frequencies that comparisons with transformers do not reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvik.kernels.reference.ops import REFERENCE
from kvik.nn.rope import Rope, attention_factor, frequencies
from kvik.spec.rope import RopeSpec

DIM = 64
CPU = torch.device("cpu")


def plain() -> torch.Tensor:
    return torch.tensor([1e4 ** (-2 * i / DIM) for i in range(DIM // 2)], dtype=torch.float64)


def test_dynamic_is_unscaled_up_to_its_original_context() -> None:
    spec = RopeSpec("dynamic", factor=2.0, original_max_position=2048)
    for length in (1, 100, 2048):
        torch.testing.assert_close(frequencies(spec, DIM, length), plain())


def test_dynamic_keeps_a_single_pair() -> None:
    spec = RopeSpec("dynamic", factor=2.0, original_max_position=2048)
    assert frequencies(spec, 2, 8192).tolist() == [1.0]


def test_longrope_has_factors_of_its_own_beyond_the_original_context() -> None:
    factors = {"short_factors": (2.0,) * (DIM // 2), "long_factors": (8.0,) * (DIM // 2)}
    spec = RopeSpec("longrope", factor=4.0, original_max_position=2048, **factors)
    torch.testing.assert_close(frequencies(spec, DIM, 2048), plain() / 2)
    torch.testing.assert_close(frequencies(spec, DIM, 2049), plain() / 8)


YARN = RopeSpec("yarn", 1e4, 32.0, 4096)
LLAMA3 = RopeSpec("llama3", 5e5, 8.0, 8192)
LONGROPE = RopeSpec(
    "longrope",
    1e4,
    32.0,
    4096,
    short_factors=(1.0,) * 48,
    long_factors=tuple(1.0 + i / 0.75 for i in range(48)),
)
QUERIES = RopeSpec("yarn", 1e6, 16.0, 16_384, mscale=1.0, mscale_all_dim=1.0, query_beta=0.1)


@pytest.mark.parametrize(
    ("spec", "dim", "positions", "of_queries"),
    [
        (RopeSpec(), DIM, 1000, False),  # fewer than a table of remainders may have
        (RopeSpec(theta=5e6), 128, 1 << 20, False),
        (RopeSpec(theta=1e4), 128, 4_000_000, False),
        (LLAMA3, 128, 4_000_000, False),
        (YARN, 128, 131_072, False),
        (YARN, 128, 4_000_000, False),
        (LONGROPE, 96, 131_072, False),
        (LONGROPE, 96, 1 << 20, False),
        (QUERIES, 128, 4_000_000, True),
        (replace(QUERIES, original_max_position=48), 8, 5000, True),  # tables of 16 remainders
        (RopeSpec(theta=1e4), 4, 1 << 30, False),
    ],
)
def test_cosines_and_sines_are_right_at_every_position(
    spec: RopeSpec, dim: int, positions: int, of_queries: bool
) -> None:
    """To a relative error of 1e-6, although no table has a row per position."""
    rope = Rope(REFERENCE, spec, dim, positions, CPU, of_queries=of_queries)
    assert len(rope.high) + len(rope.low) <= positions / 100 or positions <= 5000
    drawn = torch.randint(positions, (2000,), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 1, 15, 16, 47, 48, positions // 2, positions - 1])
    at = torch.cat((drawn, ends, positions - 1 - torch.arange(min(positions, 1024))))
    angles = at[:, None].double() * frequencies(spec, dim, positions)
    factor = torch.full_like(at, attention_factor(spec), dtype=torch.float64)
    if of_queries:
        factor *= 1 + spec.query_beta * torch.log1p((at // spec.original_max_position).double())
    expected = torch.cat((angles.cos(), angles.sin()), 1)
    found = rope.at(at).double() / factor[:, None]
    assert (found - expected).abs().max() < 1e-6


def test_a_rotation_has_the_same_bits_in_any_batch() -> None:
    rope, at = Rope(REFERENCE, RopeSpec(), DIM, 4096, CPU), torch.arange(7, 4096, 61)
    together = rope.at(at)
    assert all(torch.equal(rope.at(at[i : i + 1])[0], together[i]) for i in range(len(at)))
    longer = Rope(REFERENCE, RopeSpec(), DIM, 9999, CPU)
    assert torch.equal(longer.at(at), together)


@pytest.mark.parametrize(
    ("spec", "positions", "rows"),
    [
        (RopeSpec(), 512, 1 + 512),
        (RopeSpec(), 131_072, 128 + 1024),
        (RopeSpec(), 1_048_576, 1024 + 1024),
        (RopeSpec(), 1025, 2 + 1024),
        (QUERIES, 131_072, 2 * (128 + 1024)),
        (replace(QUERIES, original_max_position=96), 1000, 1 + 1000 + 32 + 32),
    ],
)
def test_tables_have_the_rows_that_the_memory_plan_counts(
    spec: RopeSpec, positions: int, rows: int
) -> None:
    ropes = [Rope(REFERENCE, spec, 8, positions, CPU)]
    if spec.query_beta:
        ropes.append(Rope(REFERENCE, spec, 8, positions, CPU, of_queries=True))
    assert sum(len(rope.high) + len(rope.low) for rope in ropes) == rows
    assert spec.table_rows(positions) == rows
