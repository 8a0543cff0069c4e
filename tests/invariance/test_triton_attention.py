"""Greedy tokens of an engine on Triton's kernels are the reference's, of prompts that are cut into
chunks and of prompts whose beginning is cached. Under Triton's interpreter, so few and small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import small
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

from helpers.interpreted_engine import interpret_engines

from kvik import LLM, SamplingParams

pytestmark = INTERPRETED_ONLY

CONFIG = small(num_hidden_layers=2, num_key_value_heads=1)
SHARED = list(range(20, 37))
PROMPTS = [[7], [*SHARED, 5, 6], [*SHARED, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def tokens(model: Path, rounds: int = 1, **options: Any) -> list[list[int]]:
    """Of the last round."""
    common = {"device": "cpu", "dtype": "float32", "threads": 1, "load_format": "random"}
    with LLM(str(model), kernels="torch", block_size=8, **common, **options) as llm:
        for _ in range(rounds):
            outputs = llm.generate(PROMPTS, GREEDY)
        assert rounds == 1 or any(output.num_cached_tokens for output in outputs)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.full
def test_chunks_and_prefix_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    alone = {"max_num_seqs": 1, "enable_prefix_caching": False}
    expected = tokens(tmp_path, attention_backend="reference", **alone)
    interpret_engines(monkeypatch)
    assert tokens(tmp_path, rounds=2, max_num_batched_tokens=9, max_num_seqs=3) == expected
