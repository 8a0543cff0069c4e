"""The plan bounds what a process really takes: planned before loading, measured after."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvik.attention.decode_batches import MAX_KEYS
from kvik.config.memory import (
    GATHERED_KEYS,
    LOADING_BYTES,
    PROMPT_LOGPROB_ROWS,
    QUANTIZED_SCRATCH_BYTES,
    SAMPLED_LOGITS,
)
from kvik.kernels.rounding import PIECE
from kvik.nn.checkpoint import RUN_BYTES
from kvik.nn.loader import RANDOM_DRAWS
from kvik.nn.parts import RUN_WEIGHTS
from kvik.worker.model_runner import LOGPROB_ROWS
from kvik.worker.model_runner import SAMPLED_LOGITS as RUNNER_SAMPLED_LOGITS

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 60_000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}

# Each kind of step that has a peak of its own: sampling with every rule on, a long prompt in chunks
# that look back at a long context, and the logprobs of a prompt.
SCRIPT = """
import json, sys
from kvik import LLM, SamplingParams

def status(field):
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines[field].split()[0]) * 1024

with LLM(sys.argv[1], quantization=sys.argv[2], load_format="random", device="cpu", threads=2,
         max_num_seqs=48, max_num_batched_tokens=1024, max_model_len=4096, num_blocks=600) as llm:
    every_rule = SamplingParams(temperature=0.9, top_p=0.9, typical_p=0.9, min_p=0.01,
                                repetition_penalty=1.1, logit_bias={5: 1.0}, max_tokens=2)
    llm.generate([[3 + i, 4, 5] for i in range(48)], every_rule)
    llm.generate([[7] * 2500], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))
    memory = llm.resolved.memory
    print(json.dumps({"peak": status("VmHWM"), "planned": memory.total,
                      "overhead": memory.overhead, "activations": memory.activations}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_peak_stays_below_the_plan(quantization: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), quantization]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["peak"] <= found["planned"]
    # The bound is not idle: runtime and tables alone would not have been enough.
    assert found["peak"] > found["overhead"]


def test_the_plan_knows_the_limits_it_relies_on() -> None:
    assert 2 * RUN_BYTES + max(RUN_WEIGHTS, RANDOM_DRAWS) * 4 <= LOADING_BYTES
    assert PROMPT_LOGPROB_ROWS >= LOGPROB_ROWS
    assert SAMPLED_LOGITS >= RUNNER_SAMPLED_LOGITS
    assert GATHERED_KEYS >= MAX_KEYS
    assert QUANTIZED_SCRATCH_BYTES >= 6 * 4 * PIECE  # copies in fp32
