"""The drafts of an assistant are those of its definition, whatever the engine does."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from helpers.assistants import Assistant, save_assistant
from helpers.drafters import (
    HEAD_WAYS,
    KNOWN_OF_OTHERS,
    check_drafts_of_forks,
    check_drafts_of_head,
    check_refused_heads,
    head_options,
    head_prompts,
    head_ways,
    note_drafts,
)

from kvik import LLM, SamplingParams
from kvik.config.model_source import BUNDLED
from kvik.errors import KvikError

pytestmark = pytest.mark.usefixtures("forked", "loads_always")


options = partial(head_options, method="assistant")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Assistant]:
    root = tmp_path_factory.mktemp("assistant")
    return root, save_assistant(root)


@pytest.mark.parametrize("way", head_ways("three stages", *KNOWN_OF_OTHERS))
def test_drafts_are_those_of_the_definition(way, saved, monkeypatch):
    (root, assistant), noted = saved, note_drafts(monkeypatch, "assistant")
    check_drafts_of_head(assistant, noted, options(root, **HEAD_WAYS[way]), way)


def test_forks_share_its_keys(saved, monkeypatch):
    (root, assistant), noted = saved, note_drafts(monkeypatch, "assistant")
    check_drafts_of_forks(assistant, noted, options(root, max_num_seqs=24))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_and_by_the_name_of_other_engines(saved, quantization):
    root, _ = saved
    drafting = {"method": "mtp", "model": str(root / "head"), "quantization": quantization}
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    with LLM(**options(root, speculative_config=drafting)) as llm:
        assert llm.resolved.speculation.method == "assistant"
        llm.generate(head_prompts(), greedy)
        assert llm.stats().speculation.drafts.accepted


def test_assistants_that_it_refuses(saved, tmp_path):
    root, _ = saved
    text = json.loads((root / "head" / "config.json").read_text())["text_config"]
    check_refused_heads(
        root,
        tmp_path,
        "assistant",
        {"architectures": ["Gemma4ForCausalLM"]},
        {"backbone_hidden_size": 64},
        {"text_config": {**text, "vocab_size": 97}},
        {"text_config": {**text, "head_dim": 8}},
        {"text_config": {**text, "hidden_size_per_layer_input": 8}},
    )
    with pytest.raises(KvikError, match="^spec_model: .*must be a Gemma 4"):
        LLM(**options(root, model=str(BUNDLED)))
    with pytest.raises(KvikError, match="^pipeline_parallel_size: .* into 2 at most"):
        LLM(**options(root, threads=3, pipeline_parallel_size=3))  # whose last layers are joined


def test_the_plan_counts_it(saved):
    root, assistant = saved
    with (
        LLM(**options(root)) as llm,
        LLM(**options(root, spec_method="off", spec_model=None)) as plain,
    ):
        ours, theirs = llm.resolved.memory, plain.resolved.memory
    tensors = assistant.model.state_dict().items()
    clusters = "masked_embedding"  # not read
    read = sum(4 * values.numel() for name, values in tensors if clusters not in name)
    read -= assistant.model.lm_head.weight.nbytes  # is the embedding
    assert ours.weights - theirs.weights == read
    assert ours.activations > theirs.activations
    assert ours.kv_cache == theirs.kv_cache  # it reads the model's
