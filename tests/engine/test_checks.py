"""Requests that are impossible by the configuration alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.served_engine import tiny_config

from kvik.core.config import CacheConfig
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest
from kvik.engine.core import EngineCore, check_request, max_length
from kvik.errors import CapacityError, KvikError
from kvik.spec.visible_keys import Window


def request(prompt=(1, 2, 3), pooling=None, **params: object) -> EngineRequest:
    return EngineRequest("a", list(prompt), SamplingParams(**params), pooling=pooling)


REFUSED = [
    ("prompt", request([])),
    ("prompt", request([1] * 256)),
    ("prompt", request([1, 64])),
    ("prompt", request([1, -1])),
    ("prompt", request([1, True])),
    ("prompt", request([1, 2.0])),
    ("prompt", request(["1"])),
    ("stop_token_ids", request(stop_token_ids=(64,))),
    ("logit_bias", request(logit_bias={99: 1.0})),
    ("allowed_token_ids", request(allowed_token_ids=(64,))),
    ("bad_words", request(bad_words=((1, 64),))),
    ("min_tokens", request(min_tokens=254, max_tokens=None)),
    ("n", request(n=5)),
    ("n", request(n=2, pooling="mean")),
    ("pooling", request(pooling="median")),
]


@pytest.mark.parametrize(("field", "bad"), REFUSED)
def test_impossible_requests_get_the_same_error_on_both_sides(field, bad):
    config = tiny_config(max_queued_requests=4)
    core = EngineCore(config)
    with pytest.raises(KvikError) as here:
        check_request(config, bad)
    with pytest.raises(KvikError) as there:
        core.add(bad, 0.0)
    assert not core.has_requests and "\n" not in str(here.value)
    assert here.value.field == there.value.field == field
    assert str(here.value) == str(there.value)


@pytest.mark.parametrize(
    "good",
    [
        request([0, 63]),
        request([1] * 255, max_tokens=None),
        request([1] * 256, max_tokens=0, prompt_logprobs=1),
        request([1] * 256, pooling="last"),
        request(n=4),
    ],
)
def test_possible_requests_pass_the_check(good):
    check_request(tiny_config(max_queued_requests=4), good)


@pytest.mark.parametrize("window", [None, 9])
def test_the_cache_must_hold_a_single_request(window):
    config = tiny_config(max_num_batched_tokens=16)
    group = config.cache.groups[0]
    if window is not None:
        spec = replace(group.spec, window=Window(window))
        group = replace(group, specs=(spec,))
    cache = CacheConfig(block_size=4, num_blocks=8, groups=(group,))
    config = replace(config, cache=cache)
    blocks = EngineCore(config).scheduler.kv.config.max_blocks(33, 16)
    wanted = request([1] * 8, max_tokens=25)
    if blocks > 8:
        with pytest.raises(CapacityError, match="need 9 KV blocks of 4, but the cache has 8"):
            check_request(config, wanted)
    else:  # a window frees blocks outside it
        check_request(config, wanted)
    assert (blocks > 8) == (window is None)
    check_request(config, request([1] * 8, max_tokens=24))


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("max_tokens", request(max_tokens=40)),
        ("prompt", request([1] * 40, pooling="mean")),
        ("prompt", request([1] * 40, max_tokens=0, prompt_logprobs=0)),
    ],
)
def test_a_request_larger_than_the_cache_names_the_field_that_is_too_large(field, wanted):
    config = tiny_config()
    config = replace(config, cache=replace(config.cache, num_blocks=8))
    with pytest.raises(CapacityError, match="KV blocks") as caught:
        check_request(config, wanted)
    assert caught.value.field == field


def test_the_longest_possible_request():
    config = tiny_config()
    assert max_length(config, request(max_tokens=7)) == 10
    assert max_length(config, request(max_tokens=None)) == 256
    assert max_length(config, request(max_tokens=10**6)) == 256
    assert max_length(config, request(pooling="mean")) == 3


def test_an_error_names_the_token():
    with pytest.raises(KvikError, match=r"^prompt: token id 99 is outside 0\.\.63"):
        check_request(tiny_config(), request([1, 99, 2]))
    with pytest.raises(KvikError, match=r"^prompt: token ids must be of type int, not 2\.0"):
        check_request(tiny_config(), request([1, 2.0]))
