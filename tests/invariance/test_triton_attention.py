"""An engine on Triton's kernels generates the reference's greedy tokens, for prompts that are cut
into chunks and prompts with a cached prefix. Under Triton's interpreter, so with few and small
cases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import small
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

from helpers.interpreted_engine import interpret_engines

from kvik import LLM, SamplingParams
from kvik.config import resolve
from kvik.config.kv_budget import KVBudgets, fingerprint_of, save_budgets
from kvik.model_files import model_files
from kvik.spec.visible_keys import Budget

pytestmark = INTERPRETED_ONLY

BUDGETS = (36, 40)  # of each layer
LONG = [5 + i * 7 % 50 for i in range(44)]
CONFIG = small(num_hidden_layers=2, num_key_value_heads=1)
ALIBI = {
    **{"architectures": ["BloomForCausalLM"], "vocab_size": 100, "hidden_size": 48, "n_layer": 2},
    **{"n_head": 3},
}
SHARED = list(range(20, 37))
PROMPTS = [[7], [*SHARED, 5, 6], [*SHARED, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def tokens(
    model: Path, rounds: int = 1, prompts: Sequence[list[int]] = PROMPTS, **options: Any
) -> list[list[int]]:
    """Return the tokens of the last round."""
    common = {"device": "cpu", "dtype": "float32", "threads": 1, "load_format": "random"}
    with LLM(str(model), kernels="torch", block_size=8, **common, **options) as llm:
        for _ in range(rounds):
            outputs = llm.generate(list(prompts), GREEDY)
        assert rounds == 1 or any(output.num_cached_tokens for output in outputs)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.full
@pytest.mark.parametrize("seen", [{}, {"window": 7, "attention_sinks": 2}], ids=str)
@pytest.mark.parametrize("config", [CONFIG, ALIBI], ids=["rotary", "alibi"])
def test_chunks_and_prefix_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], seen: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    alone = {"max_num_seqs": 1, "enable_prefix_caching": False, **seen}
    expected = tokens(tmp_path, attention_backend="reference", **alone)
    interpret_engines(monkeypatch)
    shared = {"max_num_batched_tokens": 9, "max_num_seqs": 3, **seen}
    assert tokens(tmp_path, rounds=2, **shared) == expected


@pytest.mark.full
def test_layers_with_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep the same tokens in chunks, in batches and after a prefix hit."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec, file = model_files(tmp_path).spec(), tmp_path / "b.json"
    facts = spec.architecture, fingerprint_of(spec), "entropy", 0.25, 64, "", 0
    save_budgets(KVBudgets(*facts, scores=(1.0, 1.0), budgets=BUDGETS), file)
    monkeypatch.setattr(resolve, "Budget", partial(Budget, every=2))
    prompts = [[*LONG, 7, 8], [*LONG, 3], LONG[:38]]
    alone = {"max_num_seqs": 1, "enable_prefix_caching": False, "prompts": prompts}
    expected = tokens(tmp_path, attention_backend="reference", kv_budget=str(file), **alone)
    all_keys = tokens(tmp_path, attention_backend="reference", **alone)
    interpret_engines(monkeypatch)
    shared = {"max_num_batched_tokens": 33, "max_num_seqs": 3, "prompts": prompts}
    assert tokens(tmp_path, rounds=2, kv_budget=str(file), **shared) == expected != all_keys
