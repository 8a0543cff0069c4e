"""The whole engine compared with transformers on the bundled models: batched, cached, scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.calibrated import FAMILIES as CALIBRATED
from helpers.optional_native import needs_native
from helpers.tiny_families import ALL
from helpers.tiny_models import (
    BAILING,
    COMPRESSED,
    GEMMA3N,
    KIMI,
    LONGCAT,
    ZAMBA2,
    reference_greedy,
    save_tiny,
    tokens,
)
from transformers import AutoModelForCausalLM

import kvik
from kvik import LLM, SamplingParams

BUNDLED = Path(kvik.__file__).parent / "bundled"
PROMPTS = [
    "Once upon a time",
    "One day, the fox said to the lion,",
    "The old king had three daughters. The youngest",
    "A",
    "In the forest there lived a bear and a bird. They were friends. Every day the bird sang, and",
]
NUM_TOKENS = 40


@pytest.mark.parametrize("name", ["stories", "stories-draft"])
@pytest.mark.parametrize(
    ("kernels", "block_size"), [("torch", 8), pytest.param("native", 16, marks=needs_native)]
)
def test_greedy_tokens_and_log_probabilities_are_equal(
    name: str, kernels: str, block_size: int
) -> None:
    folder = BUNDLED / name
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    common = {"dtype": "float32", "device": "cpu", "threads": 1}
    with LLM(str(folder), kernels=kernels, block_size=block_size, **common) as llm:
        assert llm.resolved.runner.attention_backend == ("cpu" if kernels == "native" else "sdpa")
        outputs = llm.generate(PROMPTS, params)
        scores = llm.score([[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs])
    for output, score in zip(outputs, scores, strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        with torch.inference_mode():
            logits = reference(torch.tensor([ids])).logits[0]  # [tokens, vocab]
        first = len(output.prompt_token_ids) - 1
        assert logits[first:-1].argmax(-1).tolist() == output.outputs[0].token_ids
        logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found = torch.tensor([p.logprob for p in score.prompt_logprobs[1:]])
        torch.testing.assert_close(found, logprobs, atol=1e-4, rtol=0)


WIRINGS = (
    *("Phi3", "Glm4", "Cohere2", "Glm4Moe", "DeepseekV3", "Exaone4", "Gemma2", "Gemma3"),
    *("Gemma4-token-inputs", "Gemma4-key-is-value", "Falcon-two-norms", "StableLm", "Ministral3"),
    *("Qwen3_5", "Lfm2", "Granite", "GraniteMoeHybrid-dense", "NemotronH", "FalconH1", "Apertus"),
    *("KimiLinear", "BailingHybrid", "Step3p7", "Laguna", "MiMoV2Flash", "Gemma3n", "HYV4"),
    *("MiniMax", "MiniMaxM3VL", "DeepseekV4", "LongcatFlash", "Zamba2"),
)
# In deep models of random numbers and in sharp attention, eight bits change the answers.
DULLER: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "query_pre_attn_scalar": 256,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Qwen3_5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "BailingHybrid": {**BAILING, "num_hidden_layers": 2, "layer_group_size": 2},
    "KimiLinear": {
        **KIMI,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "Gemma3n": {**GEMMA3N, "hidden_size": 64},
    "HYV4": CALIBRATED["HYV4"],
    "DeepseekV4": COMPRESSED,
    "LongcatFlash": LONGCAT,
    "MiniMax": CALIBRATED["MiniMax"],
    "MiniMaxM3VL": CALIBRATED["MiniMaxM3VL"],
    "Step3p7": CALIBRATED["Step3p7"],
    "Laguna": {**CALIBRATED["Laguna"], "sliding_window": 9},
    "Zamba2": {
        **ZAMBA2,
        "num_hidden_layers": 3,
        "layers_block_type": ["hybrid", "mamba", "hybrid"],
        **{"num_mem_blocks": 1, "rms_norm_eps": 0.1},
    },
    "MiMoV2Flash": {**CALIBRATED["MiMoV2Flash"], "sliding_window": 9},
}


@pytest.mark.parametrize("family", WIRINGS)
def test_every_wiring_runs_in_the_engine(family: str, tmp_path: Path) -> None:
    """With a batch of different lengths, with prefix hits, and quantised to eight bits."""
    options = ALL.get(family, {}) | DULLER.get(family, {})
    reference = save_tiny(tmp_path, family.partition("-")[0], **options)
    prompts = [tokens(length, seed) for seed, length in enumerate((3, 40, 17))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = [reference_greedy(reference, prompt, 12) for prompt in prompts]
    common: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 2, "num_blocks": 64}
    logprobs = []
    for quantization in ("none", "int8"):
        with LLM(str(tmp_path), quantization=quantization, **common) as llm:
            for _ in range(2 if quantization == "none" else 0):  # the second time with prefix hits
                outputs = llm.generate(prompts, params)
                assert [output.outputs[0].token_ids for output in outputs] == expected
            (scored,) = llm.score([prompts[1]])
        logprobs.append(torch.tensor([p.logprob for p in scored.prompt_logprobs[1:] if p]))
    assert (logprobs[0] - logprobs[1]).abs().mean() < 0.2
