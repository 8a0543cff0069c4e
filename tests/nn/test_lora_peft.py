"""Adapters written by PEFT, compared with the models that it merges: `pip install peft` first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_families import ALL
from helpers.tiny_models import GREEDY, greedy_and_scores, save_tiny, tokens
from transformers import AutoModelForCausalLM

from kvik import LLM
from kvik.model_files import model_files
from kvik.nn.checkpoint import Selection, open_checkpoint
from kvik.nn.lora import merged

pytestmark = [
    pytest.mark.nightly,
    # PEFT uses names of transformers that will change, and says what it saves.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:The following .* keys did not match"),  # of parameters
]
peft = pytest.importorskip("peft")

PATTERNS = {
    "alpha_pattern": {"down_proj": 3, "layers.1.self_attn.q_proj": 99},
    "rank_pattern": {"o_proj": 2},
}
SOME = ["q_proj", "v_proj", "down_proj", "qkv_proj"]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {"target_modules": "all-linear"}) for family in ("Llama", "Qwen3", "Phi3")),
    *((family, {"target_modules": SOME, "use_rslora": True}) for family in ("Qwen2", "Mixtral")),
    *((family, {"target_modules": "all-linear", **PATTERNS}) for family in ("Qwen2", "Gemma2")),
    ("Llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    ("Llama", {"target_modules": ["lm_head", "down_proj"]}),
    ("Qwen2", {"target_modules": ["q_proj", "embed_tokens"]}),
    ("Qwen2", {"target_modules": ["q_proj", "v_proj"], "bias": "all"}),
]
MERGED_ONLY = {"lm_head", "embed_tokens"}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MOE_PATTERNS = {
    "alpha_pattern": {"gate_up_proj": 3, "down_proj": 9, "gate.weight": 20},
    "rank_pattern": {"gate_up_proj": 2, "layers.1.mlp.experts.down_proj": 6},
}
# Parameters of stacked experts and routers, which transformers stores under other names.
STACKED: list[tuple[str, dict[str, Any]]] = [
    ("Mixtral", {"target_modules": ["q_proj"], "target_parameters": [*BOTH, "mlp.gate.weight"]}),
    ("Mixtral", {"target_parameters": [*BOTH, "mlp.gate.weight"], **MOE_PATTERNS}),
    ("Qwen3Moe", {"target_parameters": BOTH, "use_rslora": True}),
    ("Qwen3Moe", {"target_parameters": BOTH[1:], **MOE_PATTERNS}),
    ("GptOss", {"target_parameters": [*BOTH, "mlp.router.weight"], **MOE_PATTERNS}),
    ("GptOss", {"target_parameters": BOTH[:1]}),
    ("Llama4", {"target_parameters": [name.replace("mlp", "feed_forward") for name in BOTH]}),
]
SIZES = {"Llama4": {"intermediate_size": 48}}  # a square stack would be ambiguous


def adapt(folder: Path, model: Any, config: dict[str, Any]) -> Path:
    """Write an adapter of a model, and the merged model, and return the adapter's folder."""
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=7, init_lora_weights="gaussian", **config)
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    adapted.save_pretrained(folder / "adapter")
    adapted.merge_and_unload().save_pretrained(folder / "merged")
    return folder / "adapter"


@pytest.mark.parametrize(("family", "config"), STACKED)
def test_the_weights_and_answers_are_those_that_peft_makes(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    save_tiny(tmp_path / "model", family, **{**ALL[family], **SIZES.get(family, {})})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    adapter = adapt(tmp_path, model, {"target_modules": [], **config})
    spec = model_files(tmp_path / "model").spec()
    plain, right = (open_checkpoint(tmp_path / name) for name in ("model", "merged"))
    runs = {name: Selection(False) for name in plain.entries}
    before = {run.name: run.values.clone() for run in plain.runs(runs)}
    expected = {run.name: run.values.clone() for run in right.runs(runs)}
    changed = {name for name, values in expected.items() if not torch.equal(values, before[name])}
    assert any("expert" in name for name in changed)
    made = merged(plain, adapter, spec)
    assert made.changes.keys() == changed
    for run in made.runs(runs):
        torch.testing.assert_close(run.values, expected[run.name], rtol=1e-5, atol=1e-6)
    if not any(name.endswith(".weight") for name in config["target_parameters"]):
        _, right_scores = greedy_and_scores(tmp_path / "merged", dtype="float32")
        options = {"dtype": "float32", "device": "cpu", "adapters": {"adapter": adapter}}
        chosen = GREEDY.with_changes(adapter="adapter", prompt_logprobs=0, max_tokens=1)
        with LLM(str(tmp_path / "model"), **options) as llm:
            (scored,) = llm.generate([tokens(24)], chosen)
        assert scored.prompt_logprobs is not None
        made_scores = [entry.logprob for entry in scored.prompt_logprobs[1:] if entry]
        assert torch.allclose(torch.tensor(made_scores), right_scores, atol=1e-4)


@pytest.mark.parametrize(("family", "config"), CASES)
def test_the_answers_are_those_of_the_model_that_peft_merges(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    save_tiny(tmp_path / "model", family)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    adapt(tmp_path, model, config)
    expected, scores = greedy_and_scores(tmp_path / "merged", dtype="float32")
    plain, _ = greedy_and_scores(tmp_path / "model", dtype="float32")
    found, found_scores = greedy_and_scores(
        tmp_path / "model", dtype="float32", lora=str(tmp_path / "adapter")
    )
    assert found == expected != plain
    assert torch.allclose(found_scores, scores, atol=1e-4)
    named = {*config["target_modules"], *config.get("modules_to_save", ())}
    if named.isdisjoint(MERGED_ONLY) and "bias" not in config:
        adapters = {"adapter": tmp_path / "adapter"}
        chosen = GREEDY.with_changes(adapter="adapter")
        with LLM(str(tmp_path / "model"), dtype="float32", device="cpu", adapters=adapters) as llm:
            (output,) = llm.generate([tokens(9)], chosen)
        assert output.outputs[0].token_ids == expected
