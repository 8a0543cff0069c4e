"""`kv_tiers`: its syntax and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvik import LLM, AsyncLLM
from kvik.config.config import EngineConfig, TierOptions, check_config, read_tiers
from kvik.errors import CapacityError, ConfigError
from kvik.launch import resolve_config

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("memory:4GiB", TierOptions(4 * GIB)),
        ("memory:512m", TierOptions(GIB // 2)),
        ("memory: 1.5 GiB", TierOptions(3 * GIB // 2)),
        ("disk:/a/b:200GiB", TierOptions(0, 200 * GIB, "/a/b")),
        ("memory:1g,disk:C:d:1TiB", TierOptions(GIB, 1024 * GIB, "C:d")),
        ("disk:d:65536, memory:1k", TierOptions(1024, 65536, "d")),
    ],
)
def test_tiers_are_parsed(text: str, found: TierOptions) -> None:
    assert read_tiers(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *("", "memory", "memory:", "memory:x", "memory:0", "memory:-1", "memory:1e9", "ram:1g"),
        *("memory:9999999TiB", "memory:1g,memory:1g", "disk:1g", "disk::1g", "disk:d:", "disk:d"),
        *("memory:1g,", "disk:a:1g,disk:b:1g", "memory:1GiBs", "MEMORY:1g", "memory:nanGiB"),
    ],
)
def test_invalid_tiers_are_one_error_that_names_the_field(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^kv_tiers: .*\Z"):
        check_config(EngineConfig(kv_tiers=text))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}, ConfigError),
        ({"enable_prefix_caching": False}, ConfigError),
        ({"kv_tiers": "memory:100TiB"}, CapacityError),
        ({"kv_tiers": "memory:1KiB"}, CapacityError),
    ],
)
def test_incompatible_options_are_refused(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match="kv_tiers"):
        resolve_config(EngineConfig(**{"device": "cpu", "kv_tiers": "memory:1GiB", **options}))


def test_the_memory_tier_is_part_of_the_plan() -> None:
    def resolved(tiers: str | None):
        return resolve_config(EngineConfig(device="cpu", num_blocks=64, kv_tiers=tiers))

    plain, tiered = resolved(None), resolved("memory:64MiB")
    assert tiered.memory.total == plain.memory.total + (64 << 20)
    assert tiered.memory.limit == pytest.approx(plain.memory.limit, rel=0.2)
    sizes = tiered.cache.tiers
    assert sizes.memory == (64 << 20) // max(sizes.page_bytes)
    assert resolved(f"memory:{max(sizes.page_bytes)}").cache.tiers.memory == 1


@pytest.mark.parametrize(
    "options",
    [
        {"kv_tiers": "disk:/tmp/pages:1GiB", "role": "prefill"},  # other engines fetch from memory
        {"enable_prefix_caching": False},
    ],
)
def test_roles_that_do_not_fit(options: dict) -> None:
    with pytest.raises(ConfigError, match=r"^(role|kv_tiers): must"):
        resolve_config(EngineConfig(**{"device": "cpu", "role": "decode", "threads": 2, **options}))


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("make", [LLM, AsyncLLM])
def test_only_engines_of_servers_have_a_role(make: Callable[..., object], role: str) -> None:
    with pytest.raises(ConfigError, match="^role: .*kvik serve"):
        make(device="cpu", threads=1, role=role)


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_roles_fit_several_processes(role: str, size: str) -> None:
    options = {"device": "cpu", "role": role, "threads": 2, size: 2}
    tiers = resolve_config(EngineConfig(**options)).cache.tiers
    assert (tiers.lends, tiers.peers) == (role == "prefill", role == "decode")


@pytest.mark.parametrize(("kv_tiers", "has"), [("memory:64MiB", True), (None, False)])
def test_requests_move_with_their_pages_if_these_are_kept(kv_tiers: str | None, has: bool) -> None:
    tiers = resolve_config(EngineConfig(device="cpu", kv_tiers=kv_tiers), moves=True).cache.tiers
    assert (tiers is not None and tiers.lends and tiers.peers) == has
