"""Options of speculation: an object or short flags, checks of each field, and the decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvik.config.config import EngineConfig, Notes, requested_speculation
from kvik.config.fit import choose_speculation, with_draft_rows
from kvik.config.speculative import METHODS, MODEL_METHODS, DraftSource, SpeculativeConfig
from kvik.config.step_memory import StepSize
from kvik.errors import ConfigError

NO_SOURCE = DraftSource()
SIZE = StepSize(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)


def requested(**options: object) -> SpeculativeConfig | None:
    return requested_speculation(EngineConfig(**options))


def test_speculation_is_off_by_default() -> None:
    assert requested() is None
    assert requested(spec_method="off") is None
    assert requested(speculative_config={"method": "off"}, spec_tokens=3) is None


def test_flags_win_over_the_object() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "ngram_max": 2, "adaptive": False}
    expected = SpeculativeConfig("ngram", "", 3, adaptive=False, ngram_max=2)
    assert requested(speculative_config=config) == expected
    assert requested(speculative_config=config, spec_method="off") is None
    del config["ngram_max"]
    changed = requested(speculative_config=config, spec_method="suffix", spec_tokens=7)
    assert changed == SpeculativeConfig("suffix", "", 7, adaptive=False)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"spec_tokens": 4}, "spec_method"),
        ({"speculative_config": {"ngram_max": 3, "model": "x"}, "spec_model": "y"}, "spec_method"),
        ({"spec_method": "draft_model"}, "spec_model"),
        ({"spec_method": "eagle3"}, "spec_model"),
        ({"spec_method": "assistant"}, "spec_model"),
        ({"spec_method": "ngram", "spec_model": "x"}, "spec_model"),
    ],
)
def test_options_that_contradict_the_method_are_named(options, field) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        requested(**options)


@pytest.mark.parametrize(
    ("key", "value", "methods"),
    [
        ("quantization", "int8", ("draft_model", "assistant")),
        ("ngram_min", 2, ("ngram",)),
        ("ngram_max", 3, ("ngram",)),
        ("shared", True, ("suffix",)),
        ("adaptive", False, set(METHODS[:-1])),
        ("typical_acceptance", True, set(METHODS[:-1])),
    ],
)
def test_options_without_effect_are_refused(key, value, methods) -> None:
    for method in METHODS[:-1]:
        model = {"model": "x"} if method in MODEL_METHODS else {}
        config = {"method": method, key: value, **model}
        if method in methods:
            found = requested(speculative_config=config)
            assert found is not None and getattr(found, key) == value
        else:
            names = f"{key} is for the method {', '.join(methods)}, not {method}"
            with pytest.raises(ConfigError, match=f"^speculative_config: {names}$"):
                requested(speculative_config=config)
            default = getattr(SpeculativeConfig(), key)  # stating the default is allowed
            assert requested(speculative_config={**config, key: default}) is not None
        assert requested(speculative_config={**config, "method": "off"}) is None


@pytest.mark.parametrize("key", ["typical_epsilon", "typical_delta"])
def test_bounds_do_not_turn_typical_acceptance_on(key) -> None:
    config = {"method": "ngram", key: 0.2}
    with pytest.raises(ConfigError, match=f"{key} needs typical_acceptance"):
        requested(speculative_config=config)
    for on in (True, False):
        found = requested(speculative_config={**config, "typical_acceptance": on})
        assert found.typical_acceptance is on


@given(
    st.sampled_from(METHODS[:-1]),
    st.integers(1, 64),
    st.integers(1, 300),
    st.integers(1, 4096),
    st.sampled_from(["cpu", "cuda"]),
)
def test_drafts_leave_tokens_of_a_step_for_prompts(
    method: str, each: int, seqs: int, tokens: int, device: str
) -> None:
    asked = SpeculativeConfig(method, num_speculative_tokens=each)
    size = replace(SIZE, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    drafts = with_draft_rows(asked, size, device).max_draft_rows
    assert 0 <= drafts <= seqs * each
    if drafts:
        assert seqs + 2 * drafts <= tokens
    assert (drafts == 0) == (tokens < seqs + 2)


def test_a_step_too_small_for_drafts_is_refused() -> None:
    notes = Notes()
    asked = SpeculativeConfig("ngram", num_speculative_tokens=8)
    assert choose_speculation(None, SIZE, (), NO_SOURCE, notes) is None
    with pytest.raises(ConfigError, match="must be at least 6 for 4 requests"):
        choose_speculation(asked, replace(SIZE, max_num_batched_tokens=5), (), NO_SOURCE, notes)
    found = choose_speculation(asked, replace(SIZE, max_draft_rows=5), (), NO_SOURCE, notes)
    assert (found.num_draft_tokens, found.max_draft_rows) == (5, 5)
    assert [one.name for one in notes.decisions] == ["speculation", "speculation", "max_draft_rows"]
