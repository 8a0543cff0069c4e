"""Embeddings of prompts equal those of transformers, whatever else the engine computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.optional_native import needs_native
from helpers.tiny_models import save_tiny, tokens
from transformers import AutoModelForCausalLM

import kvik
from kvik import LLM, ParamError, SamplingParams
from kvik.engine.output import normalise

HEADS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # 16 wide
FAMILIES = {
    "Llama": {**HEADS, "attention_bias": True},
    "Mistral": {**HEADS, "sliding_window": 5},
    "Qwen2": HEADS,
    "Qwen3": {**HEADS, "head_dim": 16},
    "GPT2": {"n_head": 2},
}
KERNELS = ["torch", pytest.param("native", marks=needs_native)]
COMMON: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1}
PROMPTS = [tokens(length, seed=length) for length in (1, 2, 7, 33, 64, 90)]


def expected(model: Any, ids: list[int], pooling: str) -> torch.Tensor:
    with torch.inference_mode():
        hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0]  # [tokens, hidden]
    return hidden.mean(0) if pooling == "mean" else hidden[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("llama")
    save_tiny(path, "Llama", **HEADS)
    return str(path)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_matches_transformers(tmp_path, family, kernels):
    model = save_tiny(tmp_path, family, **FAMILIES[family])
    with LLM(str(tmp_path), kernels=kernels, max_num_batched_tokens=48, **COMMON) as llm:
        assert llm.resolved.runner.attention_backend == ("cpu" if kernels == "native" else "sdpa")
        for pooling in ("mean", "last"):
            outputs = llm.embed(PROMPTS, pooling, normalize=False)
            for ids, output in zip(PROMPTS, outputs, strict=True):
                assert output.prompt_token_ids == ids
                found, wanted = torch.tensor(output.embedding), expected(model, ids, pooling)
                torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_bundled_model_and_texts(kernels):
    folder = Path(kvik.__file__).parent / "bundled" / "stories"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = ["Once upon a time there was a fox.", "The fox and the bear were friends."]
    with LLM(kernels=kernels, dtype="float32", device="cpu", threads=1) as llm:
        for pooling in ("mean", "last"):
            for text, output in zip(texts, llm.embed(texts, pooling), strict=True):
                assert output.prompt == text
                assert math.sqrt(sum(x * x for x in output.embedding)) == pytest.approx(1.0)
                wanted = expected(model, llm.tokenizer.encode(text), pooling)
                wanted = torch.nn.functional.normalize(wanted, dim=0)
                found = torch.tensor(output.embedding)
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@needs_native
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_native_embeddings_have_the_same_bits_in_any_batch_and_chunks(folder, pooling):
    found = []
    for budget in (7, 16, 512):
        with LLM(folder, kernels="native", max_num_batched_tokens=budget, **COMMON) as llm:
            alone = [llm.embed([ids], pooling)[0].embedding for ids in PROMPTS]
            with llm.stream(tokens(20), SamplingParams(max_tokens=40, ignore_eos=True)) as stream:
                next(stream)
                together = [o.embedding for o in llm.embed(PROMPTS, pooling)]
            found += [alone, together]
    assert all(vectors == found[0] for vectors in found)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_prefix_cache_serves_last_token_pooling_only(folder, kernels):
    ids = tokens(50)
    with LLM(folder, kernels=kernels, **COMMON) as llm:
        means = [llm.embed(ids, "mean")[0] for _ in range(2)]
        lasts = [llm.embed(ids, "last")[0] for _ in range(2)]
        (completed,) = llm.generate(ids, SamplingParams(max_tokens=2))
        assert [o.num_cached_tokens for o in means] == [0, 0]
        assert [o.num_cached_tokens for o in lasts] == [48, 48]
        assert completed.num_cached_tokens == 48  # prompts of embeddings fill the cache too
        assert means[0].embedding == means[1].embedding
        assert lasts[0].embedding == lasts[1].embedding
    with LLM(folder, kernels=kernels, enable_prefix_caching=False, **COMMON) as llm:
        torch.testing.assert_close(
            torch.tensor(llm.embed(ids, "last")[0].embedding), torch.tensor(lasts[0].embedding)
        )


@needs_native
def test_a_prompt_preempted_half_way_restarts_its_sum(folder):
    """Decoding requests take the blocks of prompts that are still being computed."""
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    writing = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    ids = tokens(96, seed=9)
    with LLM(folder, kernels="native", **sizes, **COMMON) as llm:
        (wanted,) = llm.embed(ids)
    with LLM(folder, kernels="native", num_blocks=14, **sizes, **COMMON) as llm:
        for _ in range(10):  # on a busy machine all decoding requests may end first
            streams = [llm.stream(tokens(2, seed=i), writing) for i in range(7)]
            for _ in range(5):
                next(streams[0])
            (found,) = llm.embed(ids)
            for stream in streams:
                stream.close()
            if found.num_preemptions:
                break
    assert found.num_preemptions > 0
    assert found.embedding == wanted.embedding


def test_invalid_poolings_are_refused(folder):
    with LLM(folder, kernels="torch", **COMMON) as llm:
        with pytest.raises(ParamError, match="pooling: must be .* cls, max, not 'median'"):
            llm.embed([1, 2], "median")
        with pytest.raises(ParamError, match=r"prompt\[1\]: "):
            llm.embed([list(range(3)), tokens(129)])
        longest = llm.embed(tokens(128))  # as long as the context, since nothing is generated
        assert len(longest[0].embedding) == 32
        assert llm.embed([]) == []
        assert llm.stats().kv_usage == 0.0


def test_a_vector_of_zeros_has_no_direction():
    assert normalise([0.0, 0.0]) == [0.0, 0.0]
    assert normalise([3.0, 4.0]) == [0.6, 0.8]
