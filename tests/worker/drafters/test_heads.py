"""Draft heads from all kinds of folders: Medusa's own checkpoints, broken and hostile ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import save_tiny
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from kvik import LLM, SamplingParams
from kvik.config.config import EngineConfig
from kvik.config.draft_heads import EAGLE, MEDUSA, HeadsSpec
from kvik.errors import KvikError, ModelError
from kvik.launch import resolve_config
from kvik.worker.draft_tree import MAX_NODES
from kvik.worker.drafters.base import DraftRows
from kvik.worker.drafters.heads import MedusaDrafter, load_medusa, tree_of
from kvik.worker.platforms import TorchPlatform

HIDDEN, VOCAB, HEADS = 32, 96, 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "Llama")
    return folder


def options(folder: Path) -> dict[str, Any]:
    return {"model": str(folder), "dtype": "float32", "device": "cpu", "threads": 1}


def medusa(folder: Path, layers: int = 1, **config: object) -> dict[str, Tensor]:
    """Write heads as Medusa's own training saves them."""
    g = torch.Generator().manual_seed(layers)
    tensors = {}
    for head in range(HEADS):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=g)
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=g)
        tensors[f"{head}.{layers}.weight"] = torch.randn(VOCAB, HIDDEN, generator=g)
    folder.mkdir(exist_ok=True)
    facts = {"medusa_num_heads": HEADS, "medusa_num_layers": layers, **config}
    (folder / "config.json").write_text(json.dumps(facts))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return tensors


@pytest.mark.parametrize("layers", [1, 2])
def test_each_head_has_its_own_output_matrix(layers: int, model: Path, tmp_path: Path) -> None:
    tensors = medusa(tmp_path / "heads", layers, base_model_name_or_path="some/model")
    parts = TorchPlatform(resolve_config(EngineConfig(**options(model), kernels="torch"))).parts
    target: Any = None  # its head is not used
    heads = load_medusa(tmp_path / "heads", target, (HIDDEN, VOCAB), parts)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))
    found = heads(hidden)
    assert found.shape == (5, HEADS, VOCAB)
    for head in range(HEADS):
        x = hidden
        for layer in range(layers):
            name = f"{head}.{layer}.linear"
            x = x + silu(x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
        expected = x @ tensors[f"{head}.{layers}.weight"].T
        torch.testing.assert_close(found[:, head], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overflow", [False, True])
def test_an_engine_drafts_with_a_public_checkpoint(
    overflow: bool, model: Path, tmp_path: Path
) -> None:
    """Also with heads that only draft nonsense, as every draft is checked."""
    tensors = medusa(tmp_path / "heads")
    if overflow:
        broken = {name: torch.full_like(tensor, 3e38) for name, tensor in tensors.items()}
        save_file(broken, tmp_path / "heads" / "medusa_lm_head.safetensors")
    with LLM(**options(model)) as llm:
        expected = llm.generate([[5, 9, 11]], GREEDY)
    wish = {"method": "medusa", "model": str(tmp_path / "heads"), "adaptive": False}
    with LLM(**options(model), speculative_config=wish) as llm:
        assert llm.resolved.speculation is not None
        found = llm.generate([[5, 9, 11]], GREEDY)
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert found[0].num_drafted_tokens > 10


def start(model: Path, heads: Path, method: str = MEDUSA) -> None:
    with LLM(**options(model), spec_method=method, spec_model=str(heads)):
        pass


def test_hostile_folders_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    for config, named in (
        ({"medusa_num_heads": 10**9}, "medusa_num_heads"),
        ({"medusa_num_layers": 10**9}, "medusa_num_layers"),
        ({"hidden_size": 64}, "the model has 32 and 96"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"accuracies": [[0.0]] * HEADS}, "never right"),
        ({"accuracies": [[float("nan")]] * HEADS}, "accuracies"),
        ({"model_type": "eagle"}, "model_type"),
    ):
        medusa(heads, **config)
        with pytest.raises(KvikError, match=named):
            start(model, heads)
    tensors = medusa(heads)
    with pytest.raises(KvikError, match="model_type"):
        start(model, heads, EAGLE)
    tensors["1.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN + 1)
    save_file(tensors, heads / "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match=r"1\.0\.linear\.weight"):
        start(model, heads)
    del tensors["1.0.linear.weight"]
    save_file(tensors, heads / "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match=r"^spec_model: .*1\.0\.linear\.weight"):
        start(model, heads)
    (heads / "medusa_lm_head.safetensors").rename(heads / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="pickle"):
        start(model, heads)


def test_a_tree_is_limited_by_the_vocabulary_and_the_bits_of_a_word() -> None:
    ones = tuple((1.0,) * 64 for _ in range(16))
    spec = HeadsSpec(MEDUSA, 4, 5, depth=16, accuracies=ones)
    tree = tree_of(spec, 64)
    assert len(tree.parents) == MAX_NODES and max(tree.ranks) < 5
    assert int(tree.words.max()) < 2**63 and int(tree.words.min()) > 0
    few = HeadsSpec(MEDUSA, 4, 2, depth=2)
    tree = tree_of(few, 64)
    assert tree.drafts == 6  # two, and two after each
    logits = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(1))
    rows = DraftRows(np.arange(3), np.full(3, 6), lambda: torch.zeros(3, 4))
    drafts = MedusaDrafter(lambda hidden: logits, tree, torch.device("cpu")).propose(rows).by_row()
    assert [len(row) for row in drafts] == [6, 6, 6]
