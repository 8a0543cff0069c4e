"""Triton's `Ops` compared with the reference: every operation, every kind of weight.

The interpreter converts fp32 to bfloat16 by truncation, where a GPU rounds: this is within the
tolerances, but not exact.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.compared import check_case
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON, device

pytest.importorskip("triton", reason=NO_TRITON)

from helpers.kernel_cases import CASES, Case, arguments, as_integers, outputs
from triton.runtime.interpreter import InterpretedFunction

from kvik.kernels.ops import Draws, Ops, Sequences, Truncation
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.triton import draw, states
from kvik.kernels.triton.ops import triton_ops

# Products have their own files; draws of many rows take seconds to interpret.
LARGE = (("draw", "40x1003"), ("probabilities", "9x70"), ("probabilities", "40x1003"))
CHOSEN = [c for c in CASES if c.op != "linear" and (c.op, c.name) not in LARGE]
SEVERAL_DTYPES = (
    *("rms_norm", "rotary", "activate", "xielu", "scaled"),
    *("gated", "causal_conv", "recurrence"),
    *("gather_rows", "store_kv", "largest"),
)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return triton_ops(device())


LAST = {case.op: case for case in CHOSEN}
RECURRENCES = [case for case in CHOSEN if case.op == "recurrence"]


@pytest.mark.parametrize(
    "case",
    [c if LAST[c.op] is c else pytest.param(c, marks=pytest.mark.full) for c in CHOSEN],
    ids=lambda c: f"{c.op}-{c.name}",
)
def test_matches_the_reference(ops: Ops, case: Case) -> None:
    check_case(ops, case, device=device(), rounded=as_integers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", SEVERAL_DTYPES)
def test_narrow_numbers(ops: Ops, op: str, dtype: torch.dtype) -> None:
    check_case(ops, LAST[op], dtype, device())


@pytest.mark.parametrize(
    ("case", "long"),
    [
        *((case, states.LONG) for case in RECURRENCES if case.name.endswith("long")),
        *(pytest.param(case, 1, marks=pytest.mark.full) for case in RECURRENCES),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_recurrences_in_chunks(
    ops: Ops, case: Case, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are rounded, states are not."""
    monkeypatch.setattr(states, "LONG", long)
    _, state, _ = check_case(ops, case, torch.bfloat16, device())
    expected = outputs(REFERENCE, case, arguments(case, torch.bfloat16, device()))
    rtol, atol = case.tolerance(torch.float32)
    torch.testing.assert_close(state, expected[1], rtol=rtol, atol=atol)


def test_a_prompt_in_pieces(ops: Ops) -> None:
    """In chunks, then token by token, then in chunks again."""
    (case,) = (case for case in RECURRENCES if case.name == "1/1 of 128x40 long reversing")
    x, gates, heads, state, log, _ = arguments(case, torch.bfloat16, device())

    def run(*ends: int) -> tuple[torch.Tensor, torch.Tensor]:
        kept, results = state.clone(), []
        for start, end in pairwise((0, *ends)):
            places = ([0, end - start], [end], [0])
            tensors = (torch.tensor(n, dtype=torch.int32, device=device()) for n in places)
            sequences, part = Sequences(*tensors, end - start), slice(start, end)
            results.append(ops.recurrence(x[part], gates[part], heads, kept, log, sequences))
        return torch.cat(results), kept[0]

    (whole, expected), (pieces, found) = run(292), run(101, 140, 292)
    rtol, atol = case.tolerance(torch.bfloat16)
    torch.testing.assert_close(pieces, whole, rtol=rtol, atol=atol)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_left_to_the_reference(ops: Ops) -> None:
    shared = {
        field.name
        for field in fields(Ops)
        if getattr(ops, field.name) is getattr(REFERENCE, field.name)
    }
    assert shared == {"add", "clipped", "joined", "owned"}  # one launch of torch, or none


@pytest.mark.parametrize("activation", ["relu", "relu_squared", "clamped_swiglu", "tanh", "top"])
def test_activations_keep_nan(ops: Ops, activation: Any) -> None:
    x = torch.ones(2, 8, device=device())
    x[1, 2] = torch.nan
    if activation == "top":  # of the row's mean
        y = ops.activate_top(x, "gelu_tanh_and_mul", 0.5)
        assert y[1].isnan().all()
    else:
        y = ops.activate(x, activation)
        assert y[1, 2].isnan()
    assert not y[0].isnan().any()


def test_nan_is_the_largest(ops: Ops) -> None:
    logits = torch.zeros(4, 5000, device=device())  # two chunks
    logits[0, 0] = logits[1, 4999] = torch.nan
    logits[1, 7] = torch.inf
    logits[2, 4097] = logits[2, 4098] = torch.inf
    top, ids = ops.largest(logits)
    assert top.isnan().tolist() == [True, True, False, False]
    assert top[2] == torch.inf and ids[2:].tolist() == [4097, 0]


def test_tokens_without_a_slot_are_not_stored(ops: Ops) -> None:
    k = torch.randn(3, 2, 8, device=device())
    caches = torch.zeros(2, 4, 4, 2, 8, device=device())
    ops.store_kv(k, k + 1, *caches, torch.tensor([5, -1, 0], device=device()))
    written = caches.flatten(1, 2).abs().sum((2, 3)) > 0
    assert [row.nonzero()[:, 0].tolist() for row in written] == [[0, 5]] * 2
    assert torch.equal(caches[0].flatten(0, 1)[5], k[0])


def test_rows_are_gathered_and_stored_with_any_stride(ops: Ops) -> None:
    """As integers of the width read and written."""
    wide = torch.randn(5, 35, device=device()).half()
    ids = torch.tensor([4, 0, 4], device=device())
    for table in (wide[:, 3:], wide[:, 1:33], wide[:, :32]):
        assert torch.equal(ops.gather_rows(table, ids), table[ids])
    heads = wide[:3, 2:34].view(3, 4, 8)  # tokens 35 apart
    caches = torch.zeros(2, 2, 2, 4, 8, device=device(), dtype=torch.float16)
    ops.store_kv(heads, heads, *caches, torch.tensor([3, 1, 0], device=device()))
    assert torch.equal(caches[1].flatten(0, 1)[[3, 1, 0]], heads)


@pytest.mark.full
@pytest.mark.parametrize("rule", ["top_k and top_p", "min_p", "typical_p", "none"])
def test_draws_over_several_chunks(ops: Ops, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties everywhere, which are dropped from the highest id on."""
    monkeypatch.setattr(draw, "CHUNK", 64)
    monkeypatch.setattr(draw, "TILE", 16)
    rows, vocab, there = 3, 100, device()
    g = torch.Generator().manual_seed(1)
    logits = (torch.randint(-40, 41, (rows, vocab), generator=g) / 8.0).to(there)
    logits[:, ::7] = -torch.inf

    def each(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=there)

    rules = Truncation(
        top_k=each(1, 30, vocab, dtype=torch.int64) if "top_k" in rule else None,
        top_p=each(0.3, 0.9, 1.0).double() if "top_p" in rule else None,
        min_p=each(0.0, 0.1, 0.5) if rule == "min_p" else None,
        typical_p=each(0.2, 0.9, 1.0).double() if rule == "typical_p" else None,
    )
    uniforms = torch.rand(rows, dtype=torch.float64, generator=g).to(there)
    draws = Draws(each(0.5, 1.0, 2.0), uniforms, rules)
    expected = REFERENCE.probabilities(logits, draws.temperature, rules)
    found = ops.probabilities(logits, draws.temperature, rules)
    assert torch.equal(found > 0, expected > 0)  # the same tokens are kept
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    assert torch.equal(ops.draw(logits, draws), REFERENCE.draw(logits, draws))


@INTERPRETED_ONLY
def test_distances_from_the_entropy_are_rounded_in_one_way(
    ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that fuses their operations in some kernels only drops the last token that is
    kept (seen on a GPU). The sums of `coarse` need not be exact."""
    fused: dict[str, bool] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if "centre" in self.arg_names:
            fused[self.fn.__name__] = options.get("enable_fp_fusion", True)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    logits = torch.zeros(2, 9)
    rules = Truncation(typical_p=torch.full((2,), 0.5, dtype=torch.float64))
    ops.draw(logits, Draws(torch.ones(2), torch.zeros(2, dtype=torch.float64), rules))
    ops.probabilities(logits, torch.ones(2), rules)
    assert {name for name, may in fused.items() if may} == {"coarse_kernel", "centre_kernel"}
    assert {"list_kernel", "settle_kernel", "pick_kernel", "shares_kernel"} <= fused.keys()


def test_the_ends_of_the_uniform_numbers(ops: Ops) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 1.0, -torch.inf]] * 2, device=device())
    uniforms = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64, device=device())
    drawn = ops.draw(logits, Draws(torch.ones(2, device=device()), uniforms))
    assert drawn.tolist() == [1, 2]
