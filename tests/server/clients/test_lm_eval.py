"""lm-eval gets the same scores through the server as from transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.story_site import Site

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="pip install kvik[clients]"),
]

DOCS = [
    {
        "context": "Once upon a time, there was a little",
        "choices": ["girl", "spoon", "girl named Lily"],
        "answer": 0,
    },
    {
        "context": "The dog was happy because it had a",
        "choices": ["ball", "Tuesday", "big bone to eat with its friends"],
        "answer": 0,
    },
    {"context": "Tom went to the", "choices": ["park", "caf\u00e9 \U0001f415"], "answer": 0},
]
CHOICE = """
task: story_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {docs}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.mark.parametrize("tokenizer_backend", ["huggingface", "remote"])
def test_scores_are_those_of_transformers(
    site: Site, tmp_path: Path, offline: Mapping[str, str], tokenizer_backend: str
) -> None:
    folder = site.engine.client.config.runner.model_path
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (tmp_path / "choice.yaml").write_text(CHOICE.format(docs=docs))
    arguments = {
        "model": "stories",
        "base_url": f"{site.url}/v1/completions",
        "tokenizer_backend": tokenizer_backend,
        "tokenizer": folder,
        "max_length": 512,
        "num_concurrent": 2,
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{k}={v}" for k, v in arguments.items())]
    command += ["--tasks", "story_choice", "--include_path", str(tmp_path), "--batch_size", "3"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    done = subprocess.run(
        command, check=False, env=offline, cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = (tmp_path / "out").rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in found.read_text().splitlines()]
    assert len(samples) == len(DOCS)
    for sample in samples:
        doc: Any = sample["doc"]
        for choice, ((logprob, greedy),) in zip(doc["choices"], sample["resps"], strict=True):
            expected, is_greedy = score(folder, doc["context"], f" {choice}")
            assert float(logprob) == pytest.approx(expected, abs=2e-3)
            assert greedy == str(is_greedy)


def score(folder: str, context: str, continuation: str) -> tuple[float, bool]:
    """Return the log probability of a continuation by transformers, and whether it is the
    likeliest."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = len(tokenizer.encode(context))
    ids = tokenizer.encode(context + continuation)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)  # [tokens, vocab]
    places = range(start - 1, len(ids) - 1)
    total = sum(float(logprobs[place, ids[place + 1]]) for place in places)
    return total, all(int(logprobs[place].argmax()) == ids[place + 1] for place in places)
