"""The host only waits for a GPU where it must while steps run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import small
from helpers.drafters import METHOD, TREE_METHOD, ScriptedTree, install
from helpers.fake_gpu import CUDA, FakeGpu, fake_gpu, on_gpu
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON
from helpers.untrained_heads import eagle, medusa
from torch import Tensor

from kvik import LLM, SamplingParams
from kvik.attention.layout import StepLayout
from kvik.attention.sdpa import SdpaAttention, SdpaMetadata
from kvik.kernels.upload import upload
from kvik.worker.rejection import coupled

pytestmark = INTERPRETED_ONLY

MODEL = small(num_hidden_layers=1)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "kernels": "torch"}
OPTIONS |= {"load_format": "random", "max_model_len": 32, "max_num_seqs": 4}
OPTIONS |= {"max_num_batched_tokens": 24, "kv_cache_memory": 1 << 20, "seed": 0}
PROMPTS = [[5, 17, 40], [9, 8, 7, 6, 5, 4, 9, 8, 7], [1, 2, 1, 2, 1, 2]]
DRAFTS = {"spec_tokens": 3, "speculative_config": {"adaptive": False}}
COMMON: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
REQUESTS = {
    "usual": [
        SamplingParams(temperature=0.0, **COMMON),
        SamplingParams(temperature=0.9, top_p=0.9, seed=3, **COMMON),
        # which is given other numbers of drafts
        SamplingParams(top_k=20, min_p=0.01, typical_p=0.95, **(COMMON | {"max_tokens": 6})),
    ],
    "with rules": [
        SamplingParams(temperature=0.0, frequency_penalty=0.5, logprobs=2, **COMMON),
        SamplingParams(temperature=0.5, logit_bias={3: 1.0}, min_tokens=2, seed=1, **COMMON),
        SamplingParams(bad_words=((1, 2), (3,)), allowed_token_ids=list(range(50)), **COMMON),
    ],
    "about prompts": [SamplingParams(temperature=0.0, prompt_logprobs=2, **COMMON)] * 3,
}

# Necessary waits: for the sampled tokens, and for the copy of the previous step's inputs to read
# its memory.
ALWAYS = {"step_inputs.wait", "step_inputs.put"}
DRAFTED = {
    **dict.fromkeys(("draft_model", "eagle3", "assistant"), "draft_model.to_host"),
    **dict.fromkeys(("medusa", "eagle"), "heads.propose"),
}
# Only with torch's kernels: the number of tokens to sort.
TORCHS = {"draw._top"}


def answers(model: Path, **options: Any) -> dict[str, list[list[int]]]:
    with LLM(str(model), **OPTIONS, **options) as llm:
        return {kind: asked(llm, kind) for kind in REQUESTS}


def asked(llm: LLM, kind: str) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, REQUESTS[kind], progress=False)
    assert [output.outputs[0].error for output in outputs] == [None] * len(PROMPTS)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


@pytest.fixture
def wishes(model: Path, tmp_path_factory, monkeypatch) -> Callable[[str], dict[str, Any]]:
    """Return a function that returns options for a method of speculation."""

    def of(method: str) -> dict[str, Any]:
        if method == "plain":
            return {}
        if method == "ngram":
            return {"spec_method": METHOD, **DRAFTS}
        if method == "draft_model":
            small = MODEL | {"hidden_size": 16, "num_attention_heads": 2}
            folder = tmp_path_factory.mktemp("drafts")
            (folder / "config.json").write_text(json.dumps(small))
            return {"spec_method": method, "spec_model": str(folder), **DRAFTS}
        makers = {"medusa": medusa, "eagle": eagle}
        if method == "right":
            expected = answers(model)["usual"]
            texts = [[*p, *answer] for p, answer in zip(PROMPTS, expected, strict=True)]
            makers[method] = lambda parts: ScriptedTree(parts, texts)
        install(monkeypatch, makers[method])
        return {"spec_method": TREE_METHOD, "spec_model": str(model), **DRAFTS, "spec_tokens": 10}

    return of


MORE_METHODS = [
    pytest.param(m, marks=pytest.mark.full) for m in ("eagle", "medusa", "ngram", "right")
]


@pytest.mark.parametrize("method", ["plain", "draft_model", *MORE_METHODS])
def test_steps_wait_only_where_they_must_with_the_same_output(method, model, wishes) -> None:
    options = wishes(method)
    expected = answers(model, **options)
    with fake_gpu() as gpu, on_gpu("torch", "sdpa"), LLM(str(model), **OPTIONS, **options) as llm:
        for kind in REQUESTS:
            gpu.waits.clear()
            assert asked(llm, kind) == expected[kind]
            check(gpu, method, kind, TORCHS)


@pytest.mark.full
@pytest.mark.parametrize("method", ["eagle3", "assistant"])
def test_networks_that_read_the_model_need_no_further_waits(method, tmp_path: Path) -> None:
    from helpers.assistants import save_assistant  # these import transformers
    from helpers.eagle3 import save_eagle3

    {"eagle3": save_eagle3, "assistant": save_assistant}[method](tmp_path)
    options = {**OPTIONS, **DRAFTS, "load_format": "auto", "spec_model": str(tmp_path / "head")}
    model = str(tmp_path / "model")
    with (
        fake_gpu() as gpu,
        on_gpu("torch", "sdpa"),
        LLM(model, **options, spec_method=method) as llm,
    ):
        for kind in REQUESTS:
            gpu.waits.clear()
            asked(llm, kind)
            check(gpu, method, kind, TORCHS)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched Triton kernels do nothing: all their results are 1."""
    pytest.importorskip("triton", reason=NO_TRITON)
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *args, **options: None)
    monkeypatch.setattr(torch, "empty", torch.ones)
    monkeypatch.setattr(torch, "empty_like", torch.ones_like)


@pytest.mark.full
@pytest.mark.parametrize("method", ["plain", "draft_model", "eagle"])
def test_a_step_of_tritons_kernels_has_no_further_waits(method, model, wishes, silent) -> None:
    options = wishes(method)
    with (
        fake_gpu() as gpu,
        on_gpu("triton", "triton"),
        LLM(str(model), **OPTIONS, **options) as llm,
    ):
        for kind in REQUESTS:
            gpu.waits.clear()
            asked(llm, kind)
            check(gpu, method, kind, set())
        assert gpu.waits["step_inputs.put"]


@pytest.mark.full
def test_attention_planned_on_the_host_gets_the_exact_numbers_of_keys(
    model, wishes, silent, monkeypatch
) -> None:
    """Also of each draft, although the layout of the first ones serves the others."""
    options, plan = wishes("draft_model"), SdpaAttention.plan
    seen: list[tuple[int, ...]] = []
    there: list[tuple[int, ...]] = []

    def watched(self: SdpaAttention, layout: StepLayout, window: int | None) -> SdpaMetadata:
        seen.append(layout.contexts)
        there.append(tuple(layout.seq_lens.tolist()))
        return plan(self, layout, window)

    monkeypatch.setattr(SdpaAttention, "plan", watched)
    with fake_gpu(), on_gpu("triton", "sdpa"), LLM(str(model), **OPTIONS, **options) as llm:
        asked(llm, "usual")
    assert seen and seen == there


@pytest.fixture(autouse=True)
def drafters_do_not_fail(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Requests would continue without drafts."""
    yield
    assert not caplog.get_records("call")


def check(gpu: FakeGpu, method: str, kind: str, more: set[str]) -> None:
    drafted = {DRAFTED[method]} if method in DRAFTED else set()
    assert set(gpu.waits) <= ALWAYS | drafted | more, f"{kind}: {dict(gpu.waits)}"
    assert gpu.waits["step_inputs.wait"]
    if drafted and kind != "with rules":  # the host reads them between two drafts
        assert 1 <= sum(gpu.waits[name] for name in drafted) <= gpu.waits["step_inputs.wait"]


def test_sampled_drafts_are_checked_without_reading_them() -> None:
    """As on a CPU, where only rejected drafts are sampled again."""
    numbers = torch.Generator().manual_seed(0)
    p, q = (torch.rand(64, 30, generator=numbers).softmax(-1) for _ in range(2))
    p[::7] = q[::7]  # an empty residual
    p[1] = torch.eye(30)[4]
    drafts = torch.randint(30, (64,), generator=numbers)
    accept, uniforms = torch.rand(2, 64, dtype=torch.float64, generator=numbers).unbind()
    accept[::14] = 1 - 2.0**-53
    expected = coupled(p, q, drafts, accept, uniforms)
    assert (expected != drafts).any()
    with fake_gpu() as gpu, torch.inference_mode():
        there = (upload(x.numpy(), CUDA) for x in (p, q, drafts, accept, uniforms))
        found = coupled(*there)
        assert not gpu.waits
        assert found.tolist() == expected.tolist() and gpu.waits


WAITS: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda x: x[0].item(),
    "a list": lambda x: x.tolist(),
    "a condition": lambda x: bool((x > 1).any()),
    "where": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 1],
    "into a mask": lambda x: x.__setitem__(x > 1, x[:3] * 2),
    "a number at places": lambda x: x.__setitem__(torch.zeros_like(x).long(), -1.0),
    "places of the host": lambda x: x[torch.tensor([0, 1])],
    "a copy up": lambda x: torch.arange(3).to(CUDA),
    "a list up": lambda x: torch.tensor([1, 2], device=CUDA),
    "not from pinned memory": lambda x: torch.arange(3).to(CUDA, non_blocking=True),
    "a copy down": lambda x: x.cpu(),
    "a copy down into memory": lambda x: torch.empty(5).copy_(x, non_blocking=True),
    "equal": lambda x: torch.equal(x, x),
}
RUNS: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: torch.where(x > 1, x * 2, 0.0).sum(),
    "a number into a mask": lambda x: x.__setitem__(x > 1, 1.0),
    "a number into a part": lambda x: x.__setitem__(slice(1, 3), 1.0),
    "places there": lambda x: x[torch.zeros_like(x).long()],
    "a copy up": lambda x: torch.arange(3).pin_memory().to(CUDA, non_blocking=True),
    "a copy down": lambda x: torch.empty(5, pin_memory=True).copy_(x, non_blocking=True),
    "made there": lambda x: torch.zeros(3, device=CUDA),
}


@pytest.mark.parametrize("name", [*WAITS, *RUNS])
def test_waits_that_the_fake_gpu_detects(name: str) -> None:
    with fake_gpu() as gpu, torch.inference_mode():
        x = torch.arange(5.0).pin_memory().to(CUDA, non_blocking=True)
        assert not gpu.waits
        for calls, waits in ((WAITS, 1), (RUNS, 0)):
            if name in calls:
                gpu.waits.clear()
                calls[name](x)
                assert gpu.waits.total() == waits
    with fake_gpu(), pytest.raises(RuntimeError, match="operands are on the host and on the GPU"):
        torch.zeros(3, device=CUDA) + torch.ones(3)
