"""The whole engine compared with transformers on the bundled models: batched, cached, scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.optional_native import needs_native
from helpers.tiny_models import LATENT, reference_greedy, save_tiny, tokens
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


# One model per wiring, with heads that the native attention supports.
WIRINGS: dict[str, dict[str, Any]] = {
    "Phi3": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "Glm4": {"head_dim": 16, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "Cohere2": {"num_hidden_layers": 4, "sliding_window": 9},
    "Glm4Moe": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "use_qk_norm": True,
    },
    "DeepseekV3": {**LATENT, "q_lora_rank": 32, "moe_intermediate_size": 32, "n_group": 2},
    "Exaone4": {"num_hidden_layers": 4, "sliding_window": 9, "head_dim": 16},
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": 9,
        "attn_logit_softcapping": 0.2,
        "final_logit_softcapping": 0.3,
    },
    "Gemma3": {
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Gemma4": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 6,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "sliding_window": 9,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 96,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "StableLm": {"use_parallel_residual": True},
    "Ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "Qwen3_5": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "Granite": {"residual_multiplier": 0.4, "embedding_multiplier": 2.0, "logits_scaling": 3.0},
}


@pytest.mark.parametrize("family", WIRINGS)
def test_every_wiring_runs_in_the_engine(family: str, tmp_path: Path) -> None:
    """With a batch of different lengths, with prefix hits, and quantised to eight bits."""
    reference = save_tiny(tmp_path, family, hidden_size=64, **WIRINGS[family])
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
