"""The drafts of an EAGLE-3 head are those of its definition, whatever the engine does."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from helpers.drafters import (
    HEAD_WAYS,
    KNOWN_OF_OTHERS,
    check_drafts_of_forks,
    check_drafts_of_head,
    check_refused_heads,
    head_options,
    head_prompts,
    head_ways,
    note_drafts,
)
from helpers.eagle3 import DRAFTED, LAYERS, Eagle3, save_eagle3
from helpers.optional_native import needs_native
from helpers.tiny_models import GEMMA3N, tiny_config
from safetensors.torch import save_file

from kvik import LLM, SamplingParams
from kvik.config.draft_heads import eagle3_facts
from kvik.errors import KvikError
from kvik.models.model_spec import ModelSpec

pytestmark = pytest.mark.usefixtures("forked", "loads_always")


options = partial(head_options, method="eagle3")


@pytest.fixture(scope="module", params=["residual", "norm before residual"])
def saved(request, tmp_path_factory) -> tuple[Path, Eagle3]:
    root = tmp_path_factory.mktemp("eagle3")
    return root, save_eagle3(root, normed=request.param != "residual")


@pytest.mark.each(1)
@pytest.mark.parametrize("way", head_ways(*KNOWN_OF_OTHERS))
def test_drafts_are_those_of_the_definition(way, saved, monkeypatch):
    (root, head), noted = saved, note_drafts(monkeypatch, "eagle3")
    check_drafts_of_head(head, noted, options(root, **HEAD_WAYS[way]), way)


@pytest.mark.parametrize(
    "way",
    ["native", *(pytest.param(w, marks=needs_native) for w in ("two processes", "two stages"))],
)
def test_forks_copy_its_keys(way, saved, monkeypatch):
    (root, head), noted = saved, note_drafts(monkeypatch, "eagle3")
    check_drafts_of_forks(head, noted, options(root, max_num_seqs=24, **HEAD_WAYS[way]))


def test_another_form_of_the_same_files(saved, tmp_path, monkeypatch):
    """Of the speculators project."""
    (root, head), noted = saved, note_drafts(monkeypatch, "eagle3")
    stored = json.loads((root / "head" / "config.json").read_text())
    top = {"architectures": ["Eagle3Speculator"], "draft_vocab_size": DRAFTED}
    top |= {"norm_before_residual": head.normed, "transformer_layer_config": stored}
    top |= {"eagle_aux_hidden_state_layer_ids": [2, LAYERS // 2, LAYERS - 3]}
    (tmp_path / "config.json").write_text(json.dumps(top))
    tensors = {name.replace("midlayer.", "layers.0."): v for name, v in head.tensors.items()}
    embedding = head.target.get_input_embeddings().weight.detach().clone()
    save_file({**tensors, "embed_tokens.weight": embedding}, tmp_path / "model.safetensors")
    with LLM(**options(root, spec_model=str(tmp_path))) as llm:
        llm.generate(head_prompts(), SamplingParams(temperature=0.0, max_tokens=6))
    assert noted and all(found == head.drafts(text, len(found)) for text, found in noted.items())


def test_heads_that_it_refuses(saved, tmp_path):
    root, _ = saved
    check_refused_heads(
        root,
        tmp_path,
        "eagle3",
        {"architectures": ["LlamaForCausalLM"]},
        {"hidden_size": 64},
        {"num_hidden_layers": 2},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        {"draft_vocab_size": 71},
    )
    streams = ModelSpec.from_config(tiny_config("Gemma3n", **GEMMA3N).to_dict())
    with pytest.raises(KvikError, match="several residual streams"):
        eagle3_facts(root / "head", streams)


def test_pages_belong_to_a_head(saved, tmp_path):
    root, head = saved
    shutil.copytree(root / "head", tmp_path / "head")
    changed = {name: values.clone() for name, values in head.tensors.items()}
    changed["fc.weight"][0, 0] += 1
    save_file(changed, tmp_path / "head" / "model.safetensors")
    drafting = options(root)["speculative_config"]
    another = {**drafting, "model": str(tmp_path / "head")}
    found = []
    for one in (drafting, another, drafting):
        tiers = {"kv_tiers": f"disk:{tmp_path / 'kv'}:1GiB", "speculative_config": one}
        with LLM(**options(root, **tiers)) as llm:
            llm.generate(head_prompts(), SamplingParams(temperature=0.0, max_tokens=2))
            found.append(llm.stats().moves.totals.loaded_tokens > 0)
    assert found == [False, False, True]


def test_the_plan_counts_it(saved):
    root, head = saved
    with (
        LLM(**options(root)) as llm,
        LLM(**options(root, spec_method="off", spec_model=None)) as plain,
    ):
        ours, theirs = llm.resolved.memory, plain.resolved.memory
    ids = ("d2t", "t2d")
    read = sum(values.nbytes for name, values in head.tensors.items() if name not in ids)
    assert ours.weights - theirs.weights == read
    assert ours.activations > theirs.activations and ours.kv_cache > theirs.kv_cache
