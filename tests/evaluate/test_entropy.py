"""The entropy of attention, compared with transformers' weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.tiny_models import save_tiny, tokens
from transformers import AutoModelForCausalLM

from kvik.config.config import EngineConfig
from kvik.config.model_source import BUNDLED
from kvik.errors import ConfigError
from kvik.evaluate.entropy import entropy_of, measure_entropy
from kvik.evaluate.windows import held_out_texts, longest_window, prompt_prefix
from kvik.launch import load_tokenizer, resolve_config


def quiet(what: str, share: float) -> None:
    assert 0 <= share <= 1


@pytest.mark.full
def test_scores_are_entropies_by_their_definition():
    config = EngineConfig(threads=1, dtype="float32")
    scores, count = measure_entropy(config, held_out_texts(), 300, quiet)
    tokenizer = load_tokenizer(resolve_config(config))
    assert longest_window(config) >= 300
    ids = [*prompt_prefix(tokenizer), *tokenizer.encode(held_out_texts()[0], False)][:300]
    model = AutoModelForCausalLM.from_pretrained(
        BUNDLED, attn_implementation="eager", dtype=torch.float32
    )
    assert count == len(ids) == 300
    assert scores == pytest.approx(scores_of(model, ids, range(len(scores))), abs=1e-5)


def test_layers_that_share_memory_have_scores_of_their_own(tmp_path):
    """Those with windows are in the same blocks as the others, which alone may have budgets."""
    model = save_tiny(tmp_path, "Gemma2", num_hidden_layers=4, sliding_window=5)
    model.set_attn_implementation("eager")
    config = EngineConfig(model=str(tmp_path), threads=1, dtype="float32")
    ids = tokens(40)
    scores = entropy_of(config, [ids], quiet)
    assert scores == pytest.approx(scores_of(model, ids, (1, 3)), abs=1e-5)


def scores_of(model: Any, ids: list[int], layers: Iterable[int]) -> list[float]:
    """Return the scores of layers that see all keys, by definition."""
    with torch.inference_mode():
        found = model(torch.tensor([ids]), output_attentions=True).attentions
    scores = []
    for weights in (found[layer] for layer in layers):
        each = [
            float(-(row[: t + 1] * row[: t + 1].clamp(min=1e-30).log()).sum()) / math.log(t + 1)
            for head in weights[0].double()
            for t, row in enumerate(head)
            if t
        ]
        scores.append(sum(each) / len(each))
    return scores


def test_a_text_without_tokens():
    with pytest.raises(ConfigError) as caught:
        measure_entropy(EngineConfig(threads=1), ["a"], 1, quiet)
    assert caught.value.field == "data"
