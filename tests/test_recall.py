"""What a cache keeps can be asked for, and what it dropped cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.optional_native import needs_native
from helpers.recall import CONTEXT, MODEL, questions, recall

from kvik import LLM

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


@needs_native
def test_a_window_answers_what_it_holds_and_nothing_else() -> None:
    """Sinks make texts fluent beyond a window, and remember nothing of it (docs/long-texts.md)."""
    inside = questions(COUNT, 512, distance=range(4, WINDOW - 8))
    outside = questions(COUNT, 512, distance=range(WINDOW + 8, 500))
    with model() as llm:
        assert recall(llm, inside) == recall(llm, outside) == 1.0
    with model(attention_sinks=4, window=WINDOW) as llm:
        assert recall(llm, inside) == 1.0
        assert recall(llm, outside) <= 0.1  # of 32 values, by chance


@needs_native
@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int8", "fp8"])
def test_a_cache_in_few_bits_forgets_nothing(kv_cache_dtype: str) -> None:
    with model(kv_cache_dtype=kv_cache_dtype) as llm:
        assert recall(llm, questions(COUNT, 512)) == 1.0
