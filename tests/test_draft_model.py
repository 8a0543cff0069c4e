"""Speculation with a draft model through the offline API."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import config as model_config
from helpers.optional_native import needs_native
from helpers.sampling_oracle import distribution
from helpers.tiny_models import reference_logits, save_tiny
from safetensors.torch import load_file, save_file

from kvik import LLM, KvikError, RequestOutput, SamplingParams
from kvik.config.model_source import BUNDLED
from kvik.nn.checkpoint import SINGLE

DRAFT = BUNDLED.parent / "stories-draft"
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 256,
    "max_num_seqs": 8,
}
PROMPTS = ["Once upon a time", "The fox", "A little bird", "In the village there was a tree"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = GREEDY.with_changes(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=3)
UNSEEDED = SEEDED.with_changes(seed=None)


def drafting(folder: Path, **wish: object) -> dict[str, Any]:
    """Return options that make an engine draft at any cost."""
    common = {"method": "draft_model", "model": str(folder), "adaptive": False}
    return {"speculative_config": {**common, "num_speculative_tokens": 4, **wish}}


def answers(params: SamplingParams = GREEDY, **options: Any) -> list[RequestOutput]:
    with LLM("", **{**ENGINE, **options}) as llm:
        return llm.generate(PROMPTS, params)


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def accepted(outputs: list[RequestOutput]) -> float:
    """Return the share of accepted drafts."""
    drafted = sum(output.num_drafted_tokens for output in outputs)
    assert drafted > 0
    return sum(output.num_accepted_tokens for output in outputs) / drafted


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return texts(answers())


@pytest.fixture(scope="module")
def usual() -> list[RequestOutput]:
    """Return answers with the model's own draft model."""
    return answers(**drafting(DRAFT))


@pytest.mark.full
def test_answers_are_the_same(expected, usual) -> None:
    assert texts(usual) == expected
    assert 0.1 < accepted(usual) < 0.9
    assert texts(answers(SEEDED)) == texts(answers(SEEDED, **drafting(DRAFT)))


@needs_native
@pytest.mark.parametrize("params", [GREEDY, SEEDED, UNSEEDED], ids=["greedy", "seeded", "unseeded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_agrees_with_itself(params, dtype) -> None:
    """Every draft is right, to the bit, also where rules depend on earlier drafts."""
    outputs = answers(params, **drafting(BUNDLED), dtype=dtype)
    assert accepted(outputs) == 1
    if params is not UNSEEDED:
        assert texts(outputs) == texts(answers(params, dtype=dtype))
    # The first token comes from the prompt; each step yields four drafts and one more.
    assert all(output.num_drafted_tokens == 31 for output in outputs)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_draft_model_may_be_quantised(expected, usual, quantization) -> None:
    """It says nearly the same as before."""
    outputs = answers(**drafting(DRAFT, quantization=quantization))
    assert texts(outputs) == expected
    assert accepted(outputs) > 0.6 * accepted(usual)


def with_tokens(folder: Path, ids: dict[int, int]) -> Path:
    """Return the draft model with other token ids.

    Args:
        ids: new id by token; other tokens are dropped.
    """
    shutil.copytree(DRAFT, folder)
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text())
    model = tokenizer["model"]
    vocab = {text: ids[token] for text, token in model["vocab"].items() if token in ids}
    merges = [m for m in model["merges"] if all(part in vocab for part in (*m, "".join(m)))]
    model |= {"vocab": vocab, "merges": merges}
    for added in tokenizer["added_tokens"]:
        added["id"] = ids[added["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((DRAFT / "config.json").read_text())
    config |= {"vocab_size": len(ids), "bos_token_id": ids[0], "eos_token_id": ids[0]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(DRAFT / SINGLE)
    rows = torch.tensor([old for old, _ in sorted(ids.items(), key=lambda item: item[1])])
    name = "model.embed_tokens.weight"
    weights[name] = weights[name][rows].contiguous()
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})
    return folder


def test_tokens_with_other_ids_are_the_same_tokens(tmp_path, expected, usual) -> None:
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(0)).tolist()
    folder = with_tokens(tmp_path / "draft", dict(enumerate(order)))
    outputs = answers(**drafting(folder))
    assert texts(outputs) == expected
    found, wanted = ([output.num_accepted_tokens for output in o] for o in (outputs, usual))
    assert found == wanted
    drawn = answers(UNSEEDED, **drafting(folder))
    assert accepted(drawn) > 0.1


def test_a_draft_model_may_know_fewer_tokens(tmp_path, expected, usual) -> None:
    outputs = answers(**drafting(with_tokens(tmp_path / "draft", {i: i for i in range(1900)})))
    assert texts(outputs) == expected
    assert 0.5 * accepted(usual) < accepted(outputs)


def test_too_few_tokens_in_common(tmp_path) -> None:
    folder = with_tokens(tmp_path / "draft", {i: i for i in range(1700)})
    refused(folder, "spec_model", "knows 83% of the model's tokens; at least 90% must be spelt")


SIZES = {"vocab": 96, "hidden": 32, "inner": 64, "layers": 2, "heads": 2, "kv_heads": 1}
TINY = model_config("Qwen2ForCausalLM", **SIZES, positions=256)
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}


def described(folder: Path, **changes: Any) -> Path:
    """Write a model without weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


def refused(draft: Path, option: str, message: str, model: Path | str = "", **more: Any) -> None:
    """Check that the error has one line, which does not mention the target."""
    options = {**ENGINE, **drafting(draft), **more}
    with pytest.raises(KvikError, match=message) as caught:
        LLM(str(model), **options).close()
    assert str(caught.value).startswith(f"{option}: ")
    assert "\n" not in str(caught.value)


def test_models_that_cannot_draft_are_refused(tmp_path) -> None:
    tiny = described(tmp_path / "tiny")
    random = {"model": tiny, "load_format": "random"}
    refused(tmp_path / "missing", "spec_model", "there is no folder")
    unknown = described(tmp_path / "unknown", architectures=["Qwen9ForCausalLM"])
    refused(unknown, "spec_model", "Qwen9ForCausalLM", **random)
    larger = described(tmp_path / "larger", vocab_size=97)
    refused(larger, "spec_model", "must have 96 tokens as the model has, not 97", **random)
    odd = described(tmp_path / "odd", head_dim=20)
    refused(odd, "spec_model", "heads of 20 need attention_backend sdpa", **random)
    without_weights = described(tmp_path / "bare", vocab_size=2048)
    refused(without_weights, "spec_model", "must hold model.safetensors")
    (without_weights / "model.safetensors").write_bytes(bytes(100))
    refused(without_weights, "spec_model", "model.safetensors: ")
    windows = described(tmp_path / "windows", **WINDOWS)
    random["model"] = windows
    refused(tiny, "spec_method", "there are no layers that see every key", **random)
    random = {"model": tiny, "load_format": "random", "window": 24}
    refused(tiny, "spec_method", "there are no layers that see every key", **random)


def test_a_draft_model_with_windows_and_a_short_context(tmp_path) -> None:
    """Two KV groups in the blocks of the target's one, and answers longer than its context."""
    common = {**ENGINE, "load_format": "random", "block_size": 16}
    target = described(tmp_path / "target", num_hidden_layers=4)
    draft = described(
        tmp_path / "draft",
        **{**WINDOWS, "sliding_window": 9, "max_window_layers": 1, "max_position_embeddings": 64},
    )
    prompts = [list(range(3, 3 + n)) for n in (1, 40, 62, 63, 64, 65, 90)]
    with LLM(str(target), **common) as llm:
        expected = texts(llm.generate(prompts, GREEDY))
    with LLM(str(target), **common, **drafting(draft)) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert texts(outputs) == expected
    drafted = [output.num_drafted_tokens for output in outputs]
    assert drafted[0] > drafted[1] > drafted[2] > drafted[-1] == 0


RULES = [
    {"temperature": 0.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
]


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_drawn_drafts_do_not_change_the_distribution(tmp_path, rule) -> None:
    """The joint distribution of the first three tokens, against exact arithmetic (chi-square)."""
    vocab, prompt, count = 8, [3, 4, 5], 2000
    target, draft = tmp_path / "target", tmp_path / "draft"
    model = save_tiny(target, "Llama", seed=1, vocab_size=vocab)
    save_tiny(draft, "Llama", seed=2, vocab_size=vocab, num_hidden_layers=1)
    params = SamplingParams(**rule, max_tokens=4, ignore_eos=True)
    options = {**ENGINE, "max_num_seqs": 32, "max_model_len": 64, "seed": 5, **drafting(draft)}
    with LLM(str(target), **options) as llm:
        outputs = llm.generate([prompt] * count, params)
    share = accepted(outputs)
    assert 0.1 < share < 0.9
    found = Counter(tuple(tokens[:3]) for tokens in texts(outputs))

    def following(*before: int) -> dict[int, float]:
        logits = reference_logits(model, [*prompt, *before])[-1]
        return distribution(logits.tolist(), params, prompt, before)

    first = following()
    second = {a: following(a) for a in first}
    third = {(a, b): following(a, b) for a in first for b in second[a]}
    likely = {
        (a, b, c): first.get(a, 0) * second.get(a, {}).get(b, 0) * third.get((a, b), {}).get(c, 0)
        for a, b, c in product(range(vocab), repeat=3)
    }
    assert all(likely[text] > 0 for text in found)
    often = {text: count * p for text, p in likely.items() if count * p >= 5}
    rest = count - sum(often.values())
    square = sum((found[text] - n) ** 2 / n for text, n in often.items())
    cells = len(often) - 1
    if rest >= 5:
        rare = count - sum(found[text] for text in often)
        square += (rare - rest) ** 2 / rest
        cells += 1
    assert cells > 10
    assert square < cells + 4 * (2 * cells) ** 0.5


@pytest.mark.parametrize("context", [48, 67])
def test_texts_that_end_at_the_context_limit_in_a_batch(
    context: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that get fewer drafts than their neighbours have no places for more."""
    options = {**ENGINE, "max_model_len": context}
    prompts = [list(range(5, 5 + length)) for length in range(3, context - 2, 4)]
    with LLM("", **options) as llm:
        plain = texts(llm.generate(prompts, GREEDY))
    with LLM("", **options, **drafting(DRAFT, num_speculative_tokens=7)) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert texts(outputs) == plain
    assert accepted(outputs) > 0
    assert not [record for record in caplog.records if "drafter failed" in record.getMessage()]
