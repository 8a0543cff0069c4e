"""A prompt beyond the trained context through the whole engine, in chunks and constant memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.optional_native import needs_native
from helpers.tiny_models import save_tiny

pytestmark = [needs_native, pytest.mark.full]

# Computes texts in a separate process, and prints for each the peak of resident memory without keys
# and values, and tokens with their log probabilities.
READ = """
import json, random, sys
from pathlib import Path
from kvik import LLM, SamplingParams

def peak():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])

folder, budget, lengths = sys.argv[1], int(sys.argv[2]), [int(n) for n in sys.argv[3:]]
dice = random.Random(0)
text = [dice.randrange(3, 96) for _ in range(max(lengths))]
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
options = {"dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 1}
found = []
with LLM(folder, max_num_batched_tokens=budget, enable_prefix_caching=False, **options) as llm:
    assert llm.resolved.scheduler.max_model_len == 131_072
    each = sum(group.bytes_per_token for group in llm.resolved.cache.groups)
    for length in lengths:
        prompt = text if length == len(text) else text[:length]
        (output,) = llm.generate([prompt], params, progress=False)
        (one,) = output.outputs
        scores = [entry.logprob.hex() for entry in one.logprobs]
        found.append((peak() - each * (length + 8), one.token_ids, scores))
    planned = llm.resolved.memory.total - llm.resolved.memory.kv_cache
print(json.dumps((planned, found)))
"""


def read(folder: Path, budget: int, *lengths: int) -> tuple[int, list[tuple[int, list[int], list]]]:
    run = [sys.executable, "-c", READ, str(folder), str(budget), *map(str, lengths)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    planned, found = json.loads(done.stdout.splitlines()[-1])
    return planned, found


@pytest.mark.parametrize("length", [20_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_a_long_prompt_takes_its_keys_and_no_more(length: int, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16_384}
    save_tiny(
        tmp_path,
        "Llama",
        max_position_embeddings=131_072,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rope_parameters={"rope_theta": 10_000.0, **rope},
    )
    planned, ((short, *_), (long, *wanted)) = read(tmp_path, 2048, 8192, length)
    # Memory of the tokens: in the caller's list and the tables of the request and the worker.
    assert long <= short + 48 * (length - 8192), (short, long)
    assert long <= planned
    _, ((_, *found),) = read(tmp_path, 8192, length)
    assert found == wanted  # larger chunks give the same bits
