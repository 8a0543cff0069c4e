from __future__ import annotations

import inspect
import math
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from helpers.bad_parameters import BAD

from kvik.core.sampling_params import PARAMETERS, SamplingParams
from kvik.errors import ParamError

HUGE = 2**70

ONLY_IN_PYTHON: dict[str, list[Any]] = {
    "n": [1.0, None, HUGE, 10**5000, "x" * 10**6],
    "temperature": [math.nan, math.inf, None, 10**400, 10**5000, [0] * 10**5],
    "top_k": [HUGE, None],
    "top_p": [math.nan],
    "min_p": [math.nan, None],
    "typical_p": [math.inf],
    "presence_penalty": [math.nan],
    "frequency_penalty": [None],
    "repetition_penalty": [math.nan],
    "logit_bias": [
        {1: math.nan},
        {1: 10**400},
        {True: 1.0},
        {-1: 0.0},
        {"-1": 0.0},
        {"9" * 5000: 0.0},
        dict.fromkeys(range(4097), 0.0),
    ],
    "allowed_token_ids": [(), (-1,), {1}, (HUGE,)],
    "bad_words": [((),), ((-1,),)],
    "min_tokens": [None, HUGE],
    "max_tokens": [HUGE],
    "stop": [{"a"}],
    "stop_token_ids": [[True]],
    "seed": [2**63, -(2**63) - 1],
    "logprobs": [1.0, True],
    "ignore_eos": [None, "yes" * 10**5],
    "include_stop_str_in_output": [None],
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_bad_value_is_refused_in_one_line_that_names_its_field(name: str) -> None:
    for value in [*BAD[name], *ONLY_IN_PYTHON.get(name, ())]:
        with pytest.raises(ParamError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.field == name
        assert str(caught.value).startswith(f"{name}: ")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (0, 0.0, 1e-3, 100)),
        ("top_k", (-1, 0, 2**31 - 1)),
        ("top_p", (1, 1e-9)),
        ("min_p", (1,)),
        ("repetition_penalty", (1e-3, 10)),
        ("logit_bias", (MappingProxyType({0: -100, 2**31 - 1: 100}),)),
        ("allowed_token_ids", ((0,),)),
        ("max_tokens", (None,)),
        ("min_tokens", (16,)),
        ("stop", (("x" * 1024,) * 16,)),
        ("seed", (-(2**63), 2**63 - 1, 0)),
        ("logprobs", (0, 100)),
    ],
)
def test_limits_of_a_range_are_allowed(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", None, ()),
        ("stop_token_ids", [1, 2], (1, 2)),
        ("stop_token_ids", None, ()),
        ("allowed_token_ids", [1, 2], (1, 2)),
        ("allowed_token_ids", None, None),
        ("bad_words", [[1, 2], (3,)], ((1, 2), (3,))),
        ("bad_words", None, ()),
    ],
)
def test_equivalent_values_are_stored_alike(name: str, given: Any, stored: Any) -> None:
    assert getattr(SamplingParams(**{name: given}), name) == stored


def test_its_signature_has_the_parameters() -> None:
    shown = inspect.signature(SamplingParams).parameters
    assert list(shown) == list(PARAMETERS)
    assert shown["top_p"].default == 1.0


def test_equal_parameters_have_equal_hashes() -> None:
    first, second = (SamplingParams(logit_bias={5: 1.0}, stop=["a"]) for _ in range(2))
    assert {first: 1}[second] == 1
    assert first != SamplingParams(logit_bias={5: 2.0}, stop=["a"])


def test_numbers_of_other_types_become_those_of_python() -> None:
    """Only those can be sent to the engine's process."""
    integers = {"seed": np.int64(5), "max_tokens": np.int32(7), "n": np.uint8(2)}
    numbers = {"temperature": np.float32(0.5), "top_p": np.float64(0.5), "min_p": Fraction(1, 2)}
    bias = {np.int64(3): np.float16(1), "7": 1.0}  # names in a JSON object are strings
    params = SamplingParams(**integers, **numbers, logit_bias=bias)
    assert [type(getattr(params, name)) for name in integers] == [int] * 3
    assert [type(getattr(params, name)) for name in numbers] == [float] * 3
    pairs = [(type(key), type(value)) for key, value in params.logit_bias.items()]
    assert pairs == [(int, float)] * 2
    with pytest.raises(ParamError, match="seed"):
        SamplingParams(seed=np.bool_(True))


def test_limits_that_contradict_each_other() -> None:
    with pytest.raises(ParamError, match=r"min_tokens: .*max_tokens \(3\)"):
        SamplingParams(max_tokens=3, min_tokens=4)
    assert SamplingParams(max_tokens=None, min_tokens=4).min_tokens == 4


def test_greedy_means_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy


def test_a_changed_copy_is_checked_again() -> None:
    params = SamplingParams(top_k=3)
    assert params.with_changes(top_p=0.5) == SamplingParams(top_k=3, top_p=0.5)
    with pytest.raises(ParamError, match="^top_p: "):
        params.with_changes(top_p=2)
    with pytest.raises(ParamError, match="^topp: .*is not a sampling parameter"):
        params.with_changes(topp=0.5)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias={10: 1.0}), "logit_bias"),
        (SamplingParams(allowed_token_ids=(3, 10)), "allowed_token_ids"),
        (SamplingParams(stop_token_ids=(10,)), "stop_token_ids"),
        (SamplingParams(bad_words=((1, 2), (1, 10))), "bad_words"),
        (SamplingParams(max_tokens=None, min_tokens=21), "min_tokens"),
    ],
)
def test_values_that_the_model_refuses(params: SamplingParams, field: str) -> None:
    with pytest.raises(ParamError, match=f"^{field}: "):
        params.check_against(vocab_size=10, max_model_len=20)
    params.check_against(vocab_size=11, max_model_len=21)


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ({"best_of": 1, "use_beam_search": False, "length_penalty": 1.0}, {}),
        ({"max_new_tokens": 5, "num_return_sequences": 2}, {"max_tokens": 5, "n": 2}),
        ({"n": 2, "best_of": 2}, {"n": 2}),
        ({"num_return_sequences": 2, "best_of": 2}, {"n": 2}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5}),
    ],
)
def test_parameters_have_the_names_of_others(given: dict[str, Any], here: dict[str, Any]) -> None:
    assert SamplingParams(**given) == SamplingParams(**here)
    assert SamplingParams(top_k=3).with_changes(**given) == SamplingParams(top_k=3, **here)


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"temprature": 1.0}, "temprature", "did you mean temperature"),
        ({"use_beam_search": True}, "use_beam_search", "num_beams"),
        ({"best_of": 3}, "best_of", "must equal n"),
        ({"n": 3, "best_of": 1}, "best_of", "must equal n"),
        ({"best_of": True}, "best_of", "must equal n"),
        ({"max_new_tokens": 3, "max_tokens": 4}, "max_new_tokens", "means max_tokens"),
    ],
)
def test_other_names_are_one_error(given: dict[str, Any], field: str, message: str) -> None:
    for make in (SamplingParams, SamplingParams().with_changes):
        with pytest.raises(ParamError, match=f"^{field}: .*{message}"):
            make(**given)
