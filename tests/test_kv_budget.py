"""Layers with KV budgets, through the offline API."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.planned import decision
from helpers.tiny_models import tokens
from torch import Tensor

from kvik import LLM, SamplingParams
from kvik.config.config import EngineConfig
from kvik.config.kv_budget import KVBudgets, fingerprint_of, save_budgets
from kvik.config.model_source import BUNDLED
from kvik.errors import ConfigError
from kvik.launch import resolve_config
from kvik.model_files import model_files
from kvik.worker import graphs

SPEC = model_files(Path(BUNDLED)).spec()
DRAFT = str(BUNDLED.parent / "stories-draft")
LAYERS = SPEC.num_layers
LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("budgets") / "b.json"
    facts = SPEC.architecture, fingerprint_of(SPEC), "uniform", 0.1, 1024, "", 0
    budgets = KVBudgets(*facts, scores=(1.0,) * LAYERS, budgets=(48,) * LAYERS)
    save_budgets(budgets, path)
    return str(path)


@pytest.fixture(scope="module")
def llm(file: str) -> Iterator[LLM]:
    with LLM(kv_budget=file, device="cpu", threads=1, max_model_len=512) as made:
        yield made


def test_budgets_are_off_by_default_and_reported_as_lossy(llm, file, caplog):
    plain = resolve_config(EngineConfig(device="cpu"))
    assert not any(group.budgeted for group in plain.cache.groups)
    assert "kv_budget" not in {decision.name for decision in plain.decisions}
    assert "lossy" in decision(llm.resolved, "kv_budget")[1]
    with caplog.at_level(logging.WARNING), LLM(kv_budget=file, device="cpu", threads=1):
        assert any("lossy" in record.getMessage() for record in caplog.records)


def test_a_long_prompt_keeps_few_blocks_and_its_prefix_hits(llm):
    prompt = tokens(400, seed=1, vocab=2000)
    usage: list[float] = []
    for _ in llm.stream(prompt, LONG):
        usage.append(llm.stats().kv_usage)
    blocks = llm.resolved.cache.num_blocks
    groups = len(llm.resolved.cache.groups)
    assert max(usage[2:-1]) * blocks <= groups * (-(-(48 + 30) // 16) + 1) + 0.5
    again = llm.generate(prompt, LONG)[0]
    assert again.num_cached_tokens == (400 - 32) // 16 * 16
    assert llm.stats().kv_usage == 0


def test_a_fault_in_choosing_tokens_ends_one_request(llm, monkeypatch):
    kept, calls = graphs.kept_keys, 0

    def failing(weights: Tensor, budget: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == LAYERS + 2:  # in the second request
            raise ValueError("no choice")
        return kept(weights, budget)

    prompts = [tokens(count, seed=count, vocab=2000) for count in (100, 120, 140)]
    right = [output.outputs[0].token_ids for output in llm.generate(prompts, LONG)]
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "kept_keys", failing)
        outputs = [output.outputs[0] for output in llm.generate(prompts, LONG)]
    assert calls > LAYERS + 2
    failed = [i for i, output in enumerate(outputs) if output.error]
    assert len(failed) == 1 and "no choice" in str(outputs[failed[0]].error)
    for i, output in enumerate(outputs):
        assert i in failed or output.token_ids == right[i]
    assert llm.stats().kv_usage == 0
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, LONG)] == right


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"window": 64, "attention_sinks": 4}, "window"),
        ({"window": 64}, "window"),
        ({"spec_method": "draft_model", "spec_model": DRAFT}, "spec_method"),
    ],
    ids=str,
)
def test_incompatible_options(file, options, field):
    with pytest.raises(ConfigError) as caught:
        resolve_config(EngineConfig(kv_budget=file, device="cpu", **options))
    assert caught.value.field == field and "kv_budget" in caught.value.message
