"""The matrix at random: features that its columns do not combine. Log probabilities are the same to
the bit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from helpers.drafted_columns import EAGER, METHODS
from helpers.matrix import (
    DISK_TIER,
    FORMATS,
    MEMORY_TIER,
    SQUEEZED,
    Column,
    checked_bits,
    make_model,
    outputs_of,
)
from helpers.optional_native import needs_native
from helpers.tiers import runs, seed

from kvik.errors import KvikError

NAMES = (
    *("windowed", "chunked", "states", "beside", "indexed", "blocks", "narrow"),
    "adapted windowed experts",
    *(
        pytest.param(name, marks=pytest.mark.nightly)  # with draws of their own
        for name in (
            *("bundled", "capped", "latent", "spaces", "rows", "alibi", "streams"),
            "adapted capped",
        )
    ),
)
PLAIN: dict[str, object] = {}
# Of each row one is taken. What an engine refuses is not run.
AXES = (
    (
        *(PLAIN, SQUEEZED, {"num_blocks": 15}, {"block_size": 64}),
        *({"block_size": 32}, {"num_blocks": 7, "block_size": 32}),
    ),
    (
        *(PLAIN, {"max_num_seqs": 4}, {"max_num_seqs": 4, "max_num_batched_tokens": 8}),
        *({"max_num_batched_tokens": 18}, {"max_num_batched_tokens": 33}),
    ),
    (
        *(PLAIN, PLAIN, {"enable_prefix_caching": False}, MEMORY_TIER, DISK_TIER),
        {"kv_tiers": "memory:1MiB,disk:{folder}:1GiB"},
    ),
    (
        *(PLAIN, {"policy": "priority"}, {"policy": "shortest-prefill-first"}),
        *({"policy": "longest-prefix-match"}, {"policy": "static", "batch_size": 3}),
        {"policy": "dynamic", "batch_size": 3, "max_wait": 0.01},
    ),
    (
        *(PLAIN, {"threads": 2}, {"threads": 2, "tensor_parallel_size": 2}),
        {"threads": 2, "tensor_parallel_size": 2, "expert_parallel": True},
        *({"threads": n, "pipeline_parallel_size": n} for n in (2, 3)),
        {"threads": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ),
    (
        *(PLAIN, {"spec_method": "suffix", **EAGER}, {"spec_method": "forced", **EAGER}),
        *({"spec_method": method, **EAGER, **more} for method, more in METHODS.items()),
    ),
)


def draw(rng: random.Random, model: dict[str, object]) -> Column:
    config = dict[str, object]()
    for options in AXES:
        config |= rng.choice(options)
    if config.get("spec_method") == "draft_model" and model["model"]:
        config["spec_model"] = model["model"]
    column = Column(
        "random",
        config,
        rounds=rng.choice((1, 2)),
        order=rng.choice(("given", "reversed", "shuffled")),
        siblings=rng.choice((1, 1, 2, 3)),
    )
    if "threads" not in config:
        column = replace(column, in_flight=rng.choice((1, 2, 3)))
    if "adapters" in model and "kv_tiers" not in config:
        column = replace(column, loaded=rng.choice((True, False)))
    return column


@needs_native
@pytest.mark.full
@pytest.mark.parametrize("number", range(runs(1)))
@pytest.mark.parametrize("name", NAMES)
def test_features_together(name, number, tmp_path) -> None:
    rng, model = random.Random(f"{seed()} {name} {number}"), make_model(name, tmp_path)
    refusals = list[str]()
    while len(refusals) < 40:
        column, format = draw(rng, model), rng.choice([*FORMATS])
        try:
            checked_bits(column, model, format, outputs_of(name, format))
            return
        except KvikError as error:
            refusals.append(str(error))
    pytest.fail(str(refusals))
