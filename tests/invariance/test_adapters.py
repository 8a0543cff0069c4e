"""The matrix for adapters: each request has its own or none, in one batch with the others."""

from __future__ import annotations

import pytest
from helpers.drafted_columns import EAGER, METHODS
from helpers.matrix import (
    ALL_COLUMNS,
    Column,
    by_name,
    by_tier,
    checked_bits,
    checked_tokens,
    of_bits,
    tokens_of,
)
from helpers.optional_native import needs_native

NAMES = (
    *("batch", "torch", "chunks of 5", "prefix hits, chunks", "preemption, chunks", "disk tier"),
    *("swap, siblings, three steps in flight", "two threads", "moved", "recorded"),
    *("replica", "tenants, preemption"),
)
EVERY = by_name(ALL_COLUMNS, *NAMES)
DRAFTED = [
    Column(f"drafts by {method}", {"spec_method": method, **EAGER, **more})
    for method, more in METHODS.items()
]
ROOM = {"max_adapters": 3, "max_adapter_rank": 7}
LOADED = Column(
    "loaded while it runs, two steps in flight",
    {"max_num_batched_tokens": 33, **ROOM},
    rounds=2,
    in_flight=2,
    loaded=True,
    must="hits",
)
OWN_HEAD = Column(  # it has no adapters
    "drafts by mtp", {"spec_method": "mtp", **EAGER, **ROOM}, loaded=True
)
UNUSED = {
    "states": ("disk tier", "swap, siblings, three steps in flight", "moved"),
    "latent experts": (LOADED.name,),  # there is room only for experts of adapters of the start
}


def of_models(columns: list[object], *names: str) -> list[object]:
    """Return the models, each with the columns that it supports; in the fast tier, each column with
    one of them."""
    fast = [name for name in names if not name.endswith("experts")]
    return [
        pytest.param(
            f"adapted {name}",
            *column.values,
            marks=(*column.marks, *(() if fast[i % len(fast)] == name else (pytest.mark.full,))),
            id=f"{name}-{column.values[0].name}",
        )
        for name in names
        for i, column in enumerate(columns)
        if column.values[0].name not in UNUSED.get(name, ())
    ]


MODELS = "bundled", "windowed", "latent", "states", "latent experts"


@pytest.mark.each(2)  # what a column adds hardly depends on the layers that are adapted
@pytest.mark.parametrize(
    ("name", "column"),
    [
        *of_models(by_tier([*EVERY, LOADED]), *MODELS),
        *of_models(by_tier(DRAFTED), "bundled"),
        *of_models(by_tier([OWN_HEAD]), "latent", "states"),
    ],
)
def test_tokens_do_not_depend_on_the_adapters_of_others(name, model, expected, column):
    checked_tokens(column, model, expected)
    assert expected != tokens_of(name.removeprefix("adapted ").removesuffix(" experts"))


OF_BITS = [pytest.param(c) for c in [*of_bits(EVERY), LOADED]]


@needs_native
@pytest.mark.each(2)
@pytest.mark.parametrize("format", ["bfloat16"])
@pytest.mark.parametrize(("name", "column"), of_models(OF_BITS, *MODELS))
def test_native_logprobs_are_the_same_to_the_bit(
    name, model, format, one_at_a_time, column, caplog
):
    checked_bits(column, model, format, one_at_a_time)
    if not name.endswith("experts"):
        assert not caplog.records  # every step was replayed
