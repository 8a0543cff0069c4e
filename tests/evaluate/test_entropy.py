"""The entropy of attention, compared with transformers' weights."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvik.config.config import EngineConfig
from kvik.config.model_source import BUNDLED
from kvik.errors import ConfigError
from kvik.evaluate.entropy import measure_entropy
from kvik.evaluate.windows import held_out_texts, longest_window, prompt_prefix
from kvik.launch import load_tokenizer, resolve_config


def quiet(what: str, share: float) -> None:
    assert 0 <= share <= 1


@pytest.mark.full
def test_scores_are_entropies_by_their_definition():
    config = EngineConfig(threads=1, dtype="float32")
    scores, tokens = measure_entropy(config, held_out_texts(), 300, quiet)
    tokenizer = load_tokenizer(resolve_config(config))
    assert longest_window(config) >= 300
    ids = [*prompt_prefix(tokenizer), *tokenizer.encode(held_out_texts()[0], False)][:300]
    model = AutoModelForCausalLM.from_pretrained(
        BUNDLED, attn_implementation="eager", dtype=torch.float32
    )
    with torch.inference_mode():
        found = model(torch.tensor([ids]), output_attentions=True).attentions
    assert tokens == len(ids) == 300 and len(scores) == len(found)
    for score, weights in zip(scores, found, strict=True):
        each = [
            float(-(row[: t + 1] * row[: t + 1].clamp(min=1e-30).log()).sum()) / math.log(t + 1)
            for head in weights[0].double()
            for t, row in enumerate(head)
            if t
        ]
        assert score == pytest.approx(sum(each) / len(each), abs=1e-5)


def test_a_text_without_tokens():
    with pytest.raises(ConfigError) as caught:
        measure_entropy(EngineConfig(threads=1), ["a"], 1, quiet)
    assert caught.value.field == "data"
