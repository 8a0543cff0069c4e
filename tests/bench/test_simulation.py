"""Replicas under a virtual clock: what routing by prefixes brings, and that nothing is lost."""

from __future__ import annotations

import json

import pytest

from kvik.cli import main
from kvik.errors import KvikError
from kvik_bench.simulation import SimulatedEngine, Traffic, simulate

BUSY = Traffic(requests=5000, rate=150.0, seed=3)
ROOMY = SimulatedEngine(blocks=16_384)


@pytest.mark.full
def test_eight_replicas_find_most_of_what_one_cache_would_have():
    routed = simulate(BUSY, ROOMY, 8)
    in_turn = simulate(BUSY, ROOMY, 8, "round-robin")
    assert routed.requests == in_turn.requests == BUSY.requests
    assert routed.prompt_tokens == in_turn.prompt_tokens
    assert routed.hit_tokens >= 2 * in_turn.hit_tokens
    assert routed.hit_tokens >= 0.9 * routed.ideal_tokens
    assert routed.imbalance <= 1.3


@pytest.mark.full
def test_a_lost_replica_takes_its_own_hits_with_it():
    whole = simulate(BUSY, ROOMY, 8)
    lost = simulate(BUSY, ROOMY, 8, lose=(15.0, 3))
    assert lost.requests == BUSY.requests and lost.retried > 0
    assert lost.hit_tokens >= 0.8 * whole.hit_tokens


@pytest.mark.parametrize("policy", ["prefix", "round-robin"])
def test_the_same_seed_gives_the_same_run(policy: str):
    traffic = Traffic(requests=60, rate=50.0)
    runs = [simulate(traffic, SimulatedEngine(blocks=1024), 3, policy) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].requests == 60
    assert runs[0].hit_tokens <= runs[0].ideal_tokens <= runs[0].prompt_tokens


def test_one_replica_finds_what_one_cache_would_have():
    outcome = simulate(Traffic(requests=40, rate=0.5), SimulatedEngine(blocks=4096), 1)
    assert 0.99 * outcome.ideal_tokens <= outcome.hit_tokens <= outcome.ideal_tokens


def test_the_verb_compares_policies(capsys: pytest.CaptureFixture[str]):
    words = ["simulate", "--hardware", "h100", "--replicas", "2", "--requests", "30", "--json"]
    assert main.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in found] == ["prefix", "round-robin"]
    assert all(one["requests"] == 30 and len(one["busy"]) == 2 for one in found)
    assert main.main(words[:-1]) == 0
    assert "round-robin" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "value", "field"), [("--replicas", "0", "replicas"), ("--rate", "0", "rate")]
)
def test_bad_numbers_name_their_field(flag: str, value: str, field: str):
    from kvik_bench.cli import simulate as verb

    with pytest.raises(KvikError) as raised:
        verb.run(verb.build_parser().parse_args(["--hardware", "h100", flag, value]))
    assert raised.value.field == field
