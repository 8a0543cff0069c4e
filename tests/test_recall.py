"""The model answers from what the cache keeps, and not from what it dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.optional_native import needs_native
from helpers.recall import CONTEXT, MODEL, questions, recall, recall_behind

from kvik import LLM
from kvik.config.config import EngineConfig
from kvik.config.kv_budget import KVBudgets, fingerprint_of, save_budgets
from kvik.core.scheduler import Scheduler
from kvik.launch import load_worker, resolve_config
from kvik.model_files import model_files

COUNT = 64
WINDOW = 128


@contextmanager
def model(**options: Any) -> Iterator[LLM]:
    facts = {"device": "cpu", "dtype": "float32", "threads": 1, "max_num_seqs": 16, **options}
    with LLM(str(MODEL), **facts) as llm:
        yield llm


KERNELS = [
    pytest.param("torch", marks=pytest.mark.full),
    pytest.param("native", marks=needs_native),
]


@pytest.mark.parametrize("kernels", KERNELS)
def test_all_keys_answer_everything(kernels: str) -> None:
    with model(kernels=kernels) as llm:
        for length in (64, 256, CONTEXT - 1):
            assert recall(llm, questions(COUNT, length, pairs=min(16, length // 8))) == 1.0


@pytest.mark.full
@needs_native
def test_a_window_answers_only_from_its_tokens() -> None:
    """Sinks make texts fluent beyond a window, but remember nothing (docs/long-texts.md)."""
    inside = questions(COUNT, 512, distance=range(4, WINDOW - 8))
    outside = questions(COUNT, 512, distance=range(WINDOW + 8, 500))
    with model() as llm:
        assert recall(llm, inside) == recall(llm, outside) == 1.0
    with model(attention_sinks=4, window=WINDOW) as llm:
        assert recall(llm, inside) == 1.0
        assert recall(llm, outside) <= 0.1  # chance, with 32 values


@needs_native
@pytest.mark.parametrize(
    "kv_cache_dtype",
    [
        "int8",
        pytest.param("bf16", marks=pytest.mark.full),
        pytest.param("fp8", marks=pytest.mark.full),
    ],
)
def test_a_cache_in_few_bits_forgets_nothing(kv_cache_dtype: str) -> None:
    with model(kv_cache_dtype=kv_cache_dtype) as llm:
        assert recall(llm, questions(COUNT, 512)) == 1.0


@needs_native
@pytest.mark.full
def test_budgets_keep_the_requested_pair_and_few_others(tmp_path: Path) -> None:
    """Layers drop tokens after the prompt. The pair that its last queries attend to stays, and
    others as far as the budget goes (docs/long-texts.md has the shares for more budgets)."""
    spec = model_files(MODEL).spec()
    asked, found = questions(COUNT, 512), {}
    for tokens in (None, 48, 256):
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
        if tokens is not None:
            file = tmp_path / f"{tokens}.json"
            facts = spec.architecture, fingerprint_of(spec), "uniform", 0.25, 512, "", 0
            scores, budgets = (1.0,) * spec.num_layers, (tokens,) * spec.num_layers
            save_budgets(KVBudgets(*facts, scores=scores, budgets=budgets), file)
            options["kv_budget"] = str(file)
        resolved = resolve_config(EngineConfig(str(MODEL), **options))
        worker = load_worker(resolved)
        scheduler = Scheduler(resolved.scheduler, resolved.cache)
        for twice in (True, False):
            found[tokens, twice] = recall_behind(scheduler, worker, asked, twice=twice)
        worker.stop()
    assert found[None, True] == found[None, False] == 1.0
    assert found[48, True] > 0.9 and found[256, True] == 1.0
    assert found[48, False] < 0.4
    assert found[256, False] > 0.7
