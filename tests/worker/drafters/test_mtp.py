"""The drafts of a model's own head are those of its definition, whatever the engine does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.drafters import (
    HEAD_WAYS,
    check_drafts_of_head,
    head_prompts,
    head_ways,
    note_drafts,
)
from helpers.optional_native import needs_native
from helpers.predicting import NAMES, WEIGHTS, Head, save_predicting
from safetensors.torch import load_file, save_file

from kvik import LLM, SamplingParams
from kvik.build import build_engine
from kvik.config.config import EngineConfig
from kvik.errors import KvikError

pytestmark = pytest.mark.usefixtures("forked", "loads_always")
DRAFTED = 3
FAST = ("qwen3.5", "deepseek3", "mimo")
STATEFUL = (
    "torch",
    "chunks",
    "preemption",
    "swap",
    "two processes",
    "two processes, swap",
    "two stages",
)
MTP = {
    "device": "cpu",
    "threads": 1,
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 8,
    "speculative_config": {
        "method": "mtp",
        "num_speculative_tokens": DRAFTED,
        "adaptive": False,
    },
}


@pytest.fixture
def noted(monkeypatch) -> dict[tuple[int, ...], list[int]]:
    return note_drafts(monkeypatch, "mtp")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that returns the folder of a case and its head."""
    made: dict[str, tuple[Path, Head]] = {}

    def of(case: str) -> tuple[Path, Head]:
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            made[case] = folder, save_predicting(folder, case)
        return made[case]

    return of


@pytest.mark.parametrize("way", head_ways("native"))
def test_drafts_are_those_of_the_definition_in_each_way(way, saved, noted):
    folder, head = saved("deepseek3")
    check_drafts_of_head(head, noted, {"model": str(folder), **MTP, **HEAD_WAYS[way]}, way)


@pytest.mark.full
@pytest.mark.parametrize("way", [way for way in head_ways("native") if way.values[0] in STATEFUL])
def test_drafts_of_a_model_with_states(way, saved, noted):
    folder, head = saved("qwen3.5")
    check_drafts_of_head(head, noted, {"model": str(folder), **MTP, **HEAD_WAYS[way]}, way)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FAST else pytest.mark.full) for c in NAMES]
)
def test_drafts_are_those_of_the_definition(case, saved, noted):
    folder, head = saved(case)
    check_drafts_of_head(head, noted, {"model": str(folder), **MTP}, "native")


@pytest.mark.parametrize("outside", [False, True])
def test_a_head_in_floats_beside_quantised_layers(outside, saved, noted, tmp_path):
    """config.json does not say that it is: so is `eh_proj` of DeepSeek-V3, and the whole head of
    models that `kvik quantize` wrote."""
    folder, head = saved("deepseek3")
    config = json.loads((folder / "config.json").read_text())
    floats = [f"model.layers.{i}" for i in range(3)] if outside else []
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stored |= {"modules_to_not_convert": floats}
    tensors = load_file(folder / WEIGHTS)
    if not outside:
        for name in sorted(tensors):
            if "_proj" in name and "eh_proj" not in name:
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    options = {"model": str(tmp_path), **MTP}
    with LLM(**options) as llm, LLM(**{**options, "spec_method": "off"}) as plain:
        weights = llm.resolved.memory.weights - plain.resolved.memory.weights
    item = 4 if outside else 1
    join = 4 * head.join.numel()
    assert item * weights_of(head) + join <= weights < (item + 1) * weights_of(head) + join
    if outside:
        check_drafts_of_head(head, noted, options, "native")


def weights_of(head: Head) -> int:
    """Return the number of weights in the linear layers of a head's layer."""
    layer = head.layer.model.layers[0]
    return sum(p.numel() for name, p in layer.named_parameters() if "_proj" in name)


def test_a_head_that_is_right(tmp_path, saved):
    """The matrix drops the hidden state, and the layer adds nothing, so the head's token depends on
    the last one alone; the model's layers add nothing, either."""
    folder, _ = saved("mimo")
    tensors = load_file(folder / WEIGHTS)
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values.zero_()
    width = tensors["model.norm.weight"].shape[0]
    join = tensors["model.mtp_layers.0.input_proj.weight"].zero_()
    join[:, width:].fill_diagonal_(1.0)
    tensors["model.mtp_layers.0.token_layernorm.weight"].fill_(1.0)
    tensors["model.mtp_layers.0.final_layernorm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, temperature=t, seed=seed)
        for t, seed in ((0.0, None), (0.8, 7), (0.8, None))
    ]
    with LLM(str(tmp_path), **MTP) as llm:
        for sampling in params:
            outputs = llm.generate(head_prompts(), sampling)
            drafted = sum(out.num_drafted_tokens for out in outputs)
            accepted = sum(out.num_accepted_tokens for out in outputs)
            assert accepted >= 0.99 * drafted > 0


def test_requests_without_drafts_leave_no_gaps(saved, noted):
    folder, head = saved("deepseek3")
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    with LLM(str(folder), **MTP) as llm:
        silent = llm.generate(head_prompts(), greedy.with_changes(speculation=False))
        assert not noted
        texts = [out.prompt_token_ids + out.outputs[0].token_ids for out in silent]
        outputs = llm.generate(texts, greedy)
    assert any(out.num_cached_tokens for out in outputs) and noted
    assert all(found == head.drafts(text, len(found)) for text, found in noted.items())


def test_checkpoints_and_options_it_refuses(saved, tmp_path):
    folder, _ = saved("qwen3.5")
    tensors = load_file(folder / WEIGHTS)
    save_file({k: v for k, v in tensors.items() if "mtp" not in k}, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(KvikError, match=r"^spec_method: .*mtp\.\*"):
        LLM(str(tmp_path), **MTP)
    with pytest.raises(KvikError, match="^spec_method: "):
        LLM("", **MTP)  # whose architecture has no such head


def test_an_engine_cache_serves_both(saved, tmp_path, noted):
    folder, head = saved("deepseek3")
    for options in (MTP, {**MTP, "speculative_config": None}) * 2:
        with LLM(str(folder), **options, engine_cache=str(tmp_path)) as llm:
            llm.generate(head_prompts(), SamplingParams(temperature=0.0, max_tokens=6))
    assert noted and all(found == head.drafts(text, len(found)) for text, found in noted.items())


@pytest.mark.parametrize(
    "way",
    ["native", *(pytest.param(w, marks=needs_native) for w in ("two processes", "two stages"))],
)
def test_an_engine_folder_serves_both(way, saved, tmp_path, noted):
    folder, head = saved("deepseek3")
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", threads=1)
    for name, method in (("plain", None), ("drafting", "mtp")):
        build_engine(replace(config, spec_method=method), tmp_path / name, lambda done, total: None)
    options = {**MTP, **HEAD_WAYS[way]}
    with pytest.raises(KvikError, match="^spec_method: .*--spec-method mtp"):
        LLM(str(tmp_path / "plain"), **options)
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    answers = []
    for drafting in (options["speculative_config"], None):
        more = {**options, "speculative_config": drafting}
        with LLM(str(tmp_path / "drafting"), **more) as llm:
            outputs = llm.generate(head_prompts(), greedy)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert noted and all(found == head.drafts(text, len(found)) for text, found in noted.items())


def test_the_plan_counts_it(saved):
    folder, _ = saved("deepseek3")
    with LLM(str(folder), **MTP) as llm, LLM(str(folder), **{**MTP, "spec_method": "off"}) as plain:
        ours, theirs = llm.resolved, plain.resolved
    sizes = {
        name: values.nbytes
        for name, values in load_file(folder / WEIGHTS).items()
        if name.startswith("model.layers.3.")
    }
    read = sum(
        size
        for name, size in sizes.items()
        if not name.endswith(("embed_tokens.weight", "head.weight"))
    )
    assert ours.memory.weights - theirs.memory.weights == read
    each = [sum(g.bytes_per_token for g in r.cache.groups) for r in (ours, theirs)]
    assert each[0] * 3 == each[1] * 4
    assert ours.memory.activations > theirs.memory.activations
