"""Layers with KV budgets, compared with a cache of lists that follows the definition.

Token by token, with keys and values of each layer in a list. After the prompt and every 256 tokens,
the list is cut to the first 4, the last 32, and those of the others with the most attention of the
last 32 queries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.optional_native import NATIVE
from helpers.tiny_models import save_tiny, tokens
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvik import LLM, SamplingParams
from kvik.config.kv_budget import KVBudgets, fingerprint_of, save_budgets
from kvik.model_files import model_files

HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LENGTH = 512
BUDGETS = (48, 80, 48)
OUTPUT = 300  # tokens are dropped twice
PROMPTS = (170, 70, 40)  # longer than all budgets, than some, and than none
WAYS = ("reference", "sdpa", *(("cpu",) if NATIVE else ()))


def save_file(folder: Path, file: Path, budgets: tuple[int, ...]) -> str:
    spec = model_files(folder).spec()
    facts = spec.architecture, fingerprint_of(spec), "entropy", 0.1, LENGTH, "", 0
    save_budgets(KVBudgets(*facts, scores=(1.0,) * len(budgets), budgets=budgets), file)
    return str(file)


def chosen(queries: list[Tensor], keys: list[Tensor], budget: int, scale: float) -> list[int]:
    """Return which places stay, from queries [heads, dim] of the last keys and keys [kv_heads,
    dim]."""
    count, first, last = len(keys), 4, 32
    total = [0.0] * count
    for i, q in enumerate(queries):
        seen = count - last + i + 1
        for head in range(len(q)):
            of = head * len(keys[0]) // len(q)
            scores = torch.stack([k[of] for k in keys[:seen]]) @ q[head] * scale
            for place, weight in enumerate(scores.softmax(0).tolist()):
                total[place] += weight
    others = total[first : count - last]
    padded = [0.0, 0.0, *others, 0.0, 0.0]
    means = [sum(padded[i : i + 5]) / 5 for i in range(len(others))]
    best = sorted(range(len(others)), key=lambda i: -means[i])[: budget - first - last]
    return [*range(first), *(first + i for i in sorted(best)), *range(count - last, count)]


def listed_logits(model: Any, ids: list[int], prompt: int, budgets: tuple[int, ...]) -> Tensor:
    """Return the logits after each token, [tokens, vocab] in fp64."""
    decoder, dim = model.model, model.config.head_dim
    caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in decoder.layers]
    recent: list[list[Tensor]] = [[] for _ in decoder.layers]
    rows = []
    for position, token in enumerate(ids):
        x = decoder.embed_tokens(torch.tensor([[token]]))
        angles = position * decoder.rotary_emb.inv_freq.double().repeat(2)[None, None]
        cos, sin = angles.cos(), angles.sin()
        for number, (layer, budget) in enumerate(zip(decoder.layers, budgets, strict=True)):
            attention, residual, kept = layer.self_attn, x, caches[number]
            first = prompt if prompt > budget else budget + 256
            if position >= first and (position - first) % 256 == 0:
                places = chosen(recent[number], [k for k, _ in kept], budget, attention.scaling)
                kept[:] = [kept[i] for i in places]
            x = layer.input_layernorm(x)
            q, k, v = (
                project(x).view(1, -1, dim)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q.transpose(0, 1), k.transpose(0, 1), cos, sin)
            q, k = q.reshape(-1, dim), k.reshape(-1, dim)
            kept.append((k, v[0]))
            recent[number] = [*recent[number][-31:], q]
            keys, values = (
                torch.stack(each).transpose(0, 1).repeat_interleave(len(q) // len(k), 0)
                for each in zip(*kept, strict=True)
            )
            weights = (keys @ q[:, :, None] * attention.scaling).softmax(1)  # [heads, keys, 1]
            x = residual + attention.o_proj((weights * values).sum(1).view(1, 1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        rows.append(model.lm_head(decoder.norm(x))[0, 0])
    return torch.stack(rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    options = {"max_position_embeddings": LENGTH, "num_hidden_layers": len(BUDGETS), **HEADS}
    return folder, save_tiny(folder, "Llama", **options).double().eval()


@pytest.fixture(scope="module")
def listed() -> dict[tuple[int, ...], Tensor]:
    """Return logits of lists by text, since each way should generate the same text."""
    return {}


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_logits_are_those_of_lists(model, listed, tmp_path, way):
    folder, network = model
    file = save_file(folder, tmp_path / "b.json", BUDGETS)
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "dtype": "float32"}
    prompts = [tokens(count, seed=count) for count in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, logprobs=8, ignore_eos=True)
    with LLM(str(folder), kv_budget=file, attention_backend=way, **options) as llm:
        assert llm.resolved.runner.attention_backend == way
        assert (
            len(llm.resolved.cache.groups) == len(set(BUDGETS)) + 1
        )  # one per layer, as two are alike
        outputs = llm.generate(prompts, params)
    for ids, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert len(completion.token_ids) == OUTPUT
        with torch.inference_mode():
            text = [*ids, *completion.token_ids]
            if tuple(text) not in listed:
                listed[tuple(text)] = listed_logits(network, text[:-1], len(ids), BUDGETS)
            right = listed[tuple(text)].log_softmax(-1)
            all_keys = network(torch.tensor([text[:-1]])).logits[0].log_softmax(-1)
        for place, found in enumerate(completion.logprobs, len(ids) - 1):
            for token, logprob in ((found.token_id, found.logprob), *found.top):
                assert logprob == pytest.approx(float(right[place, token]), abs=1e-4), place
        assert (right - all_keys)[-1].abs().max() > 1e-2  # dropped tokens matter
        assert (right - all_keys)[: len(ids)].abs().max() < 1e-3  # a prompt is computed whole
