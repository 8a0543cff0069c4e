"""Models unknown to kvik run through transformers under the same scheduler."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import draw_pairs, write_adapter
from helpers.tiny_models import GREEDY, reference_greedy, reference_logits, save_tiny, tokens
from safetensors.torch import load_file, save_file

import kvik.fallback
from kvik import LLM, AsyncLLM, KvikError, ModelError, ParamError, SamplingParams
from kvik.config.config import EngineConfig
from kvik.config.model_source import BUNDLED
from kvik.core.structured import Regex
from kvik.evaluate.windows import loaded_reader, resolve_reader
from kvik.fallback import read_spec
from kvik.launch import resolve_config
from kvik.worker import transformers_model
from kvik.worker.transformers_model import RequestCaches, TransformersModel, model_facts

pytestmark = pytest.mark.usefixtures("forked")

# Architectures that only transformers has: computed positions; a window in most layers; states, and
# attention beside them in some.
FAMILIES: dict[str, dict[str, Any]] = {
    "XGLM": {"ffn_dim": 56, "num_key_value_heads": 4},
    "Beam": {
        **{"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 9, "num_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1},
    },
    "Zamba": {
        **{"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
        **{"num_key_value_heads": 4, "mamba_d_state": 8},
    },
}
COMMON: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "fallback": "transformers",
}
FACTS = functools.cache(model_facts)
PROMPTS = [tokens(n, seed=n) for n in (9, 40, 3, 24, 1)]


@pytest.fixture(autouse=True)
def asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query transformers in this process, where it is already imported, once for each folder."""
    monkeypatch.setattr(kvik.fallback, "ask", FACTS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, Any]] = {}

    def save(family: str) -> tuple[Path, Any]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = folder, save_tiny(folder, family, **FAMILIES[family])
        return made[family]

    return save


def caches_of(llm: LLM) -> RequestCaches:
    return llm._engine.engine.loop.executor._caches


@pytest.mark.parametrize(
    "family",
    [
        "XGLM",
        "Zamba",
        pytest.param("Beam", marks=pytest.mark.full),
    ],
)
def test_greedy_tokens_are_those_of_transformers(saved, family):
    """Alone and with others, in chunks, with memory for two of the five, and of siblings."""
    folder, model = saved(family)
    wanted = [reference_greedy(model, ids, 12) for ids in PROMPTS]
    with LLM(str(folder), **COMMON, max_num_batched_tokens=16, max_num_seqs=8, num_blocks=5) as llm:
        alone = llm.generate(PROMPTS[:1], GREEDY)[0].outputs[0].token_ids
        assert alone == wanted[0]
        found = llm.generate(PROMPTS, GREEDY)
        assert [one.outputs[0].token_ids for one in found] == wanted
        assert llm.stats().preemptions > 0
        (several,) = llm.generate(PROMPTS[2:3], GREEDY.with_changes(n=3))
        assert [one.token_ids for one in several.outputs] == 3 * [wanted[2]]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_transformers(saved, family):
    folder, model = saved(family)
    ids = tokens(30)
    wanted = reference_logits(model, ids).log_softmax(-1)
    with LLM(str(folder), **COMMON, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        (scored,) = llm.score([ids])
        found = torch.tensor([one.logprob for one in scored.prompt_logprobs[1:]])
        expected = wanted[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        (output,) = llm.generate([ids], GREEDY.with_changes(max_tokens=1, logprobs=5))
        (entry,) = output.outputs[0].logprobs
        best = wanted[-1].topk(5)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        values = torch.tensor([value for _, value in entry.top])
        torch.testing.assert_close(values, best.values, atol=1e-4, rtol=0)


def test_sampling_is_the_engines_own(saved):
    """A seed draws the same tokens alone and with others; penalties, bans and stop tokens apply."""
    folder, _ = saved("XGLM")
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=10, ignore_eos=True)
    with LLM(str(folder), **COMMON, max_num_batched_tokens=32, max_num_seqs=8) as llm:
        (alone,) = llm.generate(PROMPTS[:1], drawn)
        together = llm.generate(PROMPTS, drawn)
        assert together[0].outputs[0].token_ids == alone.outputs[0].token_ids
        (plain,) = llm.generate(PROMPTS[:1], GREEDY)
        first, second, *_ = plain.outputs[0].token_ids
        (biased,) = llm.generate(PROMPTS[:1], GREEDY.with_changes(logit_bias={first: -100.0}))
        assert biased.outputs[0].token_ids[0] != first
        (stopped,) = llm.generate(PROMPTS[:1], GREEDY.with_changes(stop_token_ids=(second,)))
        assert len(stopped.outputs[0].token_ids) <= 2
        assert stopped.outputs[0].finish_reason == "stop"
        with pytest.raises(ParamError, match="model"):
            llm.embed([PROMPTS[0]])


def test_texts_are_held_to_grammars_and_end_at_strings(tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((BUNDLED / file).read_bytes())
    vocab = json.loads((BUNDLED / "config.json").read_text())["vocab_size"]
    save_tiny(tmp_path, "XGLM", **FAMILIES["XGLM"], vocab_size=vocab)
    with LLM(str(tmp_path), **COMMON, max_model_len=128, max_num_seqs=4) as llm:
        held = SamplingParams(temperature=1.0, seed=3, max_tokens=30, structured=Regex("[0-9]{5}"))
        outputs = llm.generate(["Once", "A fox"], held)
        assert all(re.fullmatch("[0-9]{5}", one.text) for one in outputs)
        (free,) = llm.generate(["Once"], GREEDY)
        stop = free.text[3:5]
        (cut,) = llm.generate(["Once"], GREEDY.with_changes(stop=(stop,)))
        assert cut.text == free.text[: free.text.index(stop)]
        with llm.stream("Once", GREEDY) as stream:
            assert "".join(delta.text for delta in stream) == free.text


@pytest.mark.full
async def test_the_engine_may_be_another_process(saved):
    folder, model = saved("Beam")
    async with AsyncLLM(str(folder), engine="process", max_num_seqs=4, **COMMON) as engine:
        found = await asyncio.gather(*(engine.generate(p, GREEDY).result() for p in PROMPTS))
    for ids, output in zip(PROMPTS, found, strict=True):
        assert output.outputs[0].token_ids == reference_greedy(model, ids, 12)


def test_caches_are_freed(saved, monkeypatch):
    """Requests that ended, were aborted or failed lose their cache in the next step."""
    folder, model = saved("XGLM")
    with LLM(str(folder), **COMMON, max_num_batched_tokens=32, max_num_seqs=4) as llm:
        caches = caches_of(llm)
        with llm.stream(PROMPTS[1], GREEDY.with_changes(max_tokens=60)) as stream:
            next(stream)  # the stream is closed
        llm.generate(PROMPTS[2:3], GREEDY.with_changes(max_tokens=1))
        assert len(caches.by_slot) == 1
        each = llm.resolved.cache.groups[0].bytes_per_token
        assert caches.num_bytes == each * len(PROMPTS[2])

        step, calls = TransformersModel.step, []

        def failing(self, ids, cache, *, last):
            calls.append(len(ids))
            if len(calls) == 4:
                step(self, ids, cache, last=last)  # the cache may have grown
                raise RuntimeError("no memory")
            return step(self, ids, cache, last=last)

        monkeypatch.setattr(TransformersModel, "step", failing)
        outputs = llm.generate(PROMPTS[:1], GREEDY)
        assert outputs[0].outputs[0].finish_reason == "error"
        assert not caches.by_slot
        (output,) = llm.generate(PROMPTS[:1], GREEDY)
        assert output.outputs[0].token_ids == reference_greedy(model, PROMPTS[0], 12)
        llm._engine.engine.loop.executor.idle_step()
        assert not caches.by_slot and not caches.scored


def test_models_with_states_continue_token_by_token(saved):
    """Zamba's kernels take several tokens as the start of a text; attention models continue it."""
    for family, in_chunks in (("Zamba", False), ("XGLM", True)):
        found = TransformersModel(saved(family)[1])
        assert found.in_chunks == in_chunks
        found.in_chunks = False
        ids = torch.tensor(tokens(20))
        with torch.inference_mode():
            whole, _ = found.step(ids, None, last=False)
            _, cache = found.step(ids[:9], None, last=True)
            rest, _ = found.step(ids[9:], cache, last=False)
        torch.testing.assert_close(rest, whole[9:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_what_a_cache_takes(saved, family):
    folder, model = saved(family)
    resolved = resolve_config(EngineConfig(str(folder), **COMMON))
    facts = resolved.model.fallback
    assert facts.parameters == sum(one.numel() for one in {*model.parameters(), *model.buffers()})
    assert resolved.model.dtype == "float32"
    assert resolved.memory.weights == 4 * facts.parameters
    found = TransformersModel(model)
    with torch.inference_mode():
        _, cache = found.step(torch.tensor(tokens(70)), None, last=True)
    planned = 70 * resolved.cache.groups[0].bytes_per_token + 2 * facts.state_bytes
    taken = sum(tensor.nbytes for tensor in transformers_model._tensors(cache))
    assert taken <= planned
    if family == "XGLM":
        assert taken == planned
    assert {d.name: d.value for d in resolved.decisions}["fallback"] == "transformers"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"quantization": "int8"}, "quantization"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype_skip_layers": (0,)}, "kv_cache_dtype_skip_layers"),
        ({"window": 16, "attention_sinks": 4}, "window"),
        ({"kernels": "torch"}, "kernels"),
        ({"attention_backend": "sdpa"}, "attention_backend"),
        ({"engine_cache": "x"}, "engine_cache"),
        ({"kv_tiers": "memory:1GiB"}, "kv_tiers"),
        ({"kv_budget": "x"}, "kv_budget"),
        ({"spec_method": "ngram"}, "spec_method"),
        ({"fallback": "none"}, "config.json architectures"),
    ],
)
def test_options_that_do_not_fit_are_named(saved, options, field):
    folder, _ = saved("XGLM")
    with pytest.raises(KvikError, match="transformers") as error:
        resolve_config(EngineConfig(str(folder), **{**COMMON, **options}))
    assert error.value.field == field and "\n" not in str(error.value)


def test_adapters_do_not_fit(saved, tmp_path):
    folder, _ = saved("XGLM")
    adapter = write_adapter(
        tmp_path / "a", draw_pairs({"model.layers.0.self_attn.q_proj": (32, 32)})
    )
    named = {"adapters": (f"mine={adapter}",)}
    for options in ({"lora": str(adapter)}, named, {"max_adapters": 2}):
        with pytest.raises(KvikError, match="transformers") as error:
            resolve_config(EngineConfig(str(folder), **COMMON, **options))
        assert error.value.field in options


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}, "config.json auto_map"),
        ({"model_type": "mine"}, "config.json model_type"),
        ({"architectures": ["BertForTokenClassification"]}, "config.json architectures"),
        ({"model_type": "t5", "architectures": ["T5Model"]}, "config.json architectures"),
        ({"quantization_config": {"quant_method": "awq"}}, "config.json quantization_config"),
    ],
)
def test_models_that_do_not_run_are_refused(tmp_path, changes, field):
    save_tiny(tmp_path, "XGLM", **FAMILIES["XGLM"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError) as error:
        read_spec(tmp_path, "transformers")
    assert error.value.field == field and "\n" not in str(error.value)


def test_weights_must_be_there(tmp_path):
    save_tiny(tmp_path, "XGLM", **FAMILIES["XGLM"])
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.self_attn.out_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="out_proj"):
        LLM(str(tmp_path), **COMMON)
    with LLM(str(tmp_path), **COMMON, load_format="random", max_num_seqs=2) as llm:
        (output,) = llm.generate(PROMPTS[:1], GREEDY)
        assert len(output.outputs[0].token_ids) == 12


def test_architectures_of_kvik_do_not_fall_back(tmp_path):
    model = save_tiny(tmp_path, "Llama")
    with LLM(str(tmp_path), **COMMON, max_num_seqs=4) as llm:
        assert llm.resolved.model.fallback is None
        (output,) = llm.generate(PROMPTS[:1], GREEDY)
        assert output.outputs[0].token_ids == reference_greedy(model, PROMPTS[0], 12)


def test_models_that_kvik_knows_in_part(tmp_path):
    """kvik refuses GPT-2 with scores divided by the layer's number, which falls back."""
    model = save_tiny(tmp_path, "GPT2", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(ModelError):
        read_spec(tmp_path, "none")
    with LLM(str(tmp_path), **COMMON, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        found = llm.generate(PROMPTS, GREEDY)
        for ids, output in zip(PROMPTS, found, strict=True):
            assert output.outputs[0].token_ids == reference_greedy(model, ids, 12)


def test_texts_are_evaluated(saved):
    """Reads the logits of every token."""
    folder, model = saved("XGLM")
    config = EngineConfig(str(folder), **COMMON, max_num_batched_tokens=16)
    ids = tokens(40)
    with loaded_reader(resolve_reader(config, 48)) as reader:
        hidden = torch.cat([reader.read(ids, i, min(i + 16, 40)) for i in range(0, 40, 16)])
        found = reader.model.logits(hidden)
    torch.testing.assert_close(found, reference_logits(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.full
def test_a_process_of_its_own_asks_transformers(saved, tmp_path):
    """`kvik info` and a text, as a user starts them; and without the library."""
    folder, _ = saved("XGLM")
    command = [sys.executable, "-m", "kvik", "info", str(folder), "--json"]
    done = subprocess.run(
        [*command, "--fallback", "transformers"], capture_output=True, text=True, check=True
    )
    printed = json.loads(done.stdout)
    assert printed["fallback"]["parameters"] == printed["parameters"] > 0
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode and "fallback=transformers" in refused.stderr
    (tmp_path / "transformers.py").write_text("raise ImportError('gone')")
    script = (
        "import sys; from kvik.worker.transformers_model import main;"
        f"sys.path.insert(0, {str(tmp_path)!r}); main([{str(folder)!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["field"] == "fallback"
