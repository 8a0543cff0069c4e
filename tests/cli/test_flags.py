"""Flags made from options: every field has one, and errors name it."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from helpers.commands import Command

from kvik.cli.flags import (
    NOT_ENGINE_FLAGS,
    Parser,
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    given_sampling_options,
)
from kvik.cli.main import VERBS
from kvik.cli.plugins import added_verbs
from kvik.config.config import EngineConfig
from kvik.config.server_config import ServerConfig
from kvik.core.sampling_params import SamplingParams
from kvik.core.structured import Constraint
from kvik.errors import KvikError
from kvik.options import options_of

SAMPLING: dict[str, tuple[list[str], object]] = {
    "n": (["3"], 3),
    "num_beams": (["4"], 4),
    "length_penalty": (["0.5"], 0.5),
    "early_stopping": ([], True),
    "temperature": (["0.5"], 0.5),
    "top_k": (["-1"], -1),
    "top_p": (["0.9"], 0.9),
    "min_p": (["0.1"], 0.1),
    "typical_p": (["0.95"], 0.95),
    "dry_multiplier": (["0.8"], 0.8),
    "dry_base": (["2"], 2.0),
    "dry_allowed_length": (["3"], 3),
    "dry_penalty_last_n": (["64"], 64),
    "dry_sequence_breakers": ([".", "!"], (".", "!")),
    "presence_penalty": (["-0.5"], -0.5),
    "frequency_penalty": (["1"], 1.0),
    "repetition_penalty": (["1.1"], 1.1),
    "logit_bias": (["5:-1.5,7:2"], {5: -1.5, 7: 2.0}),
    "allowed_token_ids": (["1,2,3"], (1, 2, 3)),
    "bad_words": (["fox", "big bear"], ("fox", "big bear")),
    "min_tokens": (["2"], 2),
    "max_tokens": (["none"], None),
    "stop": (["a b", "\n"], ("a b", "\n")),
    "stop_token_ids": (["9"], (9,)),
    "ignore_eos": ([], True),
    "seed": (["-7"], -7),
    "logprobs": (["0"], 0),
    "prompt_logprobs": (["2"], 2),
    "prompt_logprobs_start": (["4"], 4),
    "skip_special_tokens": ([], True),
    "include_stop_str_in_output": ([], True),
    "structured": (['{"regex": "a"}'], Constraint("regex", "a")),
    "speculation": ([], True),
    "adapter": (["sql"], "sql"),
}


def parser() -> Parser:
    made = Parser("test", "", "nothing")
    add_sampling_flags(made)
    add_engine_flags(made)
    return made


def test_the_table_is_complete() -> None:
    assert set(SAMPLING) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", SAMPLING)
def test_each_sampling_option_has_a_flag(name: str) -> None:
    values, expected = SAMPLING[name]
    flag = "--" + name.replace("_", "-")
    words = [word for value in values for word in (flag, value)] or [flag]
    given = given_sampling_options(parser().parse_args(words))
    assert list(given) == [name]
    required = {"prompt_logprobs": 0} if name == "prompt_logprobs_start" else {}
    made = SamplingParams(**required).with_changes(**given)
    assert getattr(made, name) == expected


OPTIONS = {
    one.name for kind in (EngineConfig, ServerConfig, SamplingParams) for one in options_of(kind)
}


@pytest.mark.parametrize("verb", [*VERBS, *added_verbs()])
def test_help_names_flags_and_not_python(verb: str, command: Command) -> None:
    text = command(verb, "--help").out
    assert f"usage: kvik {verb} [options]" in text
    assert not re.search(r"\b(None|True|False)\b|`|\bKwargs\b|[a-z](Config|Params)\b", text)
    named = {word for word in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text) if word in OPTIONS}
    assert not named


@pytest.mark.parametrize("verb", ["generate", "chat", "bench latency"])
@pytest.mark.parametrize("flag", ["--role", "--data-parallel-size", "--kv-listen"])
def test_options_of_servers_are_not_offered_without_one(
    verb: str, flag: str, command: Command
) -> None:
    assert flag not in command(*verb.split(), "--help").out
    assert command.refusal(*verb.split(), flag, "1").startswith("arguments: ")


def test_switches_can_be_turned_off() -> None:
    words = ["--no-skip-special-tokens", "--no-enable-prefix-caching"]
    arguments = parser().parse_args(words)
    assert given_sampling_options(arguments) == {"skip_special_tokens": False}
    assert engine_options(arguments, "") == {"enable_prefix_caching": False}


def test_each_engine_option_has_a_flag() -> None:
    text = parser().format_help()
    for field in fields(EngineConfig):
        if field.name not in NOT_ENGINE_FLAGS:
            assert f"--{field.name.replace('_', '-')}" in text
    words = ["--kv-cache-memory", "2g", "--policy", "priority", "--max-wait", "0.5"]
    assert engine_options(parser().parse_args(words), "") == {
        "kv_cache_memory": 2 << 30,
        "policy": "priority",
        "max_wait": 0.5,
    }
    words = ["--kv-cache-dtype", "int8", "--kv-cache-dtype-skip-layers", "0,5"]
    assert engine_options(parser().parse_args(words), "") == {
        "kv_cache_dtype": "int8",
        "kv_cache_dtype_skip_layers": (0, 5),
    }


def test_options_that_are_not_given_are_absent() -> None:
    arguments = parser().parse_args([])
    assert given_sampling_options(arguments) == engine_options(arguments, "") == {}


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--top-k", "many"], "top_k"),
        (["--temperature", "hot"], "temperature"),
        (["--logit-bias", "5"], "logit_bias"),
        (["--allowed-token-ids", "1,x"], "allowed_token_ids"),
        (["--seed", "0.5"], "seed"),
        (["--stop"], "stop"),
        (["--ignore-eos=3"], "ignore_eos"),
        (["--temprature", "1"], "arguments"),
        (["--temp", "1"], "arguments"),
        (["--xyz", "1"], "arguments"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], field: str) -> None:
    with pytest.raises(KvikError, match=f"^{field}: "):
        parser().parse_args(words)


def test_flags_beat_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIK_MODEL", "owner/one")
    monkeypatch.setenv("KVIK_BLOCK_SIZE", "8")
    monkeypatch.setenv("KVIK_POLICY", "static")
    arguments = parser().parse_args(["--block-size", "32"])
    rest = {"block_size": 32, "policy": "static"}
    assert engine_options(arguments, "") == {"model": "owner/one", **rest}
    assert engine_options(arguments, "./two") == {"model": "./two", **rest}
