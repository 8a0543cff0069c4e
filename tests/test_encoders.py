"""Encoders: embeddings and scores equal those of transformers, whatever shares their steps."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.optional_native import needs_native
from helpers.tiny_encoders import (
    ENCODERS,
    RERANKERS,
    SIZES,
    change_config,
    hidden_states,
    save_encoder,
    save_judge,
    save_modules,
    save_tokenizer,
    word_tokenizer,
    words,
)
from helpers.tiny_models import save_tiny, tokens
from torch.nn.functional import normalize
from transformers import PreTrainedTokenizerFast

from kvik import LLM, AsyncLLM, ConfigError, KvikError, ModelError, ParamError
from kvik.build import build_engine
from kvik.config.config import EngineConfig
from kvik.evaluate.quality import measure_quality
from kvik.quantize.source import open_source

KERNELS = ["torch", pytest.param("native", marks=needs_native)]
COMMON: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1}
LENGTHS = (1, 7, 33, 64, 90, 126)
PROMPTS = [[2, *(4 + i for i in tokens(n, seed=n, vocab=90)), 3] for n in LENGTHS]
POOLED = {
    "mean": lambda hidden: hidden.mean(0),
    "last": lambda hidden: hidden[-1],
    "cls": lambda hidden: hidden[0],
    "max": lambda hidden: hidden.amax(0),
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("bert")
    save_encoder(folder, "BertModel")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("reranker")
    save_encoder(folder, "BertForSequenceClassification")
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_equal_those_of_transformers(tmp_path, name, kernels):
    model = save_encoder(tmp_path, name)
    with LLM(str(tmp_path), kernels=kernels, **COMMON) as llm:
        for pooling, pooled in POOLED.items():
            outputs = llm.embed(PROMPTS, pooling, normalize=False)
            for ids, output in zip(PROMPTS, outputs, strict=True):
                wanted = pooled(hidden_states(model, ids))
                found = torch.tensor(output.embedding)
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_keys_of_published_files(tmp_path):
    """Those of NomicBERT, and what its other variants would need."""
    model = save_encoder(tmp_path, "NomicBertModel")
    names = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
    }
    config = json.loads((tmp_path / "config.json").read_text())
    older = {new: config[key] for key, new in names.items()} | dict.fromkeys(names)
    change_config(
        tmp_path,
        **older,
        rope_parameters=None,
        rotary_emb_base=1000,
        activation_function="swiglu",
        prenorm=False,
    )
    with LLM(str(tmp_path), **COMMON) as llm:
        found = torch.tensor(llm.embed(PROMPTS[2], "mean", normalize=False)[0].embedding)
    wanted = hidden_states(model, PROMPTS[2]).mean(0)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    for key, value in {
        "prenorm": True,
        "moe_every_n_layers": 2,
        "rotary_scaling_factor": 2,
    }.items():
        before = (tmp_path / "config.json").read_text()
        change_config(tmp_path, **{key: value})
        with pytest.raises(ModelError, match=f"{key}: must be"):
            LLM(str(tmp_path), **COMMON)
        (tmp_path / "config.json").write_text(before)


def test_positions_of_published_files_of_gte(tmp_path):
    """Their scaling is one of the base and one of all frequencies."""
    rope = {"rope_type": "linear", "rope_theta": 8 * 20_000.0, "factor": 8 ** (2 / 16)}
    model = save_encoder(tmp_path, "GteModel", rope_parameters=rope)
    change_config(
        tmp_path,
        architectures=["NewModel"],
        model_type="new",
        rope_parameters=None,
        rope_theta=20_000,
        rope_scaling={"type": "ntk", "factor": 8.0},
        logn_attention_scale=False,
        position_embedding_type="rope",
    )
    with LLM(str(tmp_path), **COMMON) as llm:
        found = torch.tensor(llm.embed(PROMPTS[4], "cls", normalize=False)[0].embedding)
    wanted = hidden_states(model, PROMPTS[4])[0]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    change_config(tmp_path, position_embedding_type="absolute")
    with pytest.raises(ModelError, match="position_embedding_type: must be rope"):
        LLM(str(tmp_path), **COMMON)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", RERANKERS)
def test_scores_equal_those_of_transformers(tmp_path, name, kernels):
    """Also of pairs whose second text has type 1, with the logits that files select."""
    model = save_encoder(tmp_path, name)
    typed = name.startswith(("Bert", "Electra"))
    save_tokenizer(tmp_path, typed=typed)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(typed=typed))
    queries, documents = [words(5), words(9, 1), words(40, 2)], [words(n, n) for n in (3, 60, 70)]
    encoded = [
        tokenizer(*pair, return_tensors="pt", return_token_type_ids=typed)
        for pair in zip(queries, documents, strict=True)
    ]
    with torch.inference_mode():
        logits = torch.tensor([float(model(**each).logits) for each in encoded])
    with LLM(str(tmp_path), kernels=kernels, **COMMON) as llm:
        found = llm.score(queries, documents)
        alone = [llm.score(q, d)[0].score for q, d in zip(queries, documents, strict=True)]
        one_query = [output.score for output in llm.score(queries[0], documents)]
    scores = torch.tensor([output.score for output in found])
    torch.testing.assert_close(scores, logits.sigmoid(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(alone), scores, atol=1e-6, rtol=0)
    assert one_query[0] == pytest.approx(alone[0], abs=1e-6)
    for output, each in zip(found, encoded, strict=True):
        assert output.prompt_token_ids == each["input_ids"][0].tolist()
    if typed:
        change_config(tmp_path, sentence_transformers={"activation_fn": "torch.nn.Identity"})
        with LLM(str(tmp_path), kernels=kernels, **COMMON) as llm:
            raw = torch.tensor([output.score for output in llm.score(queries, documents)])
        torch.testing.assert_close(raw, logits, atol=1e-3, rtol=1e-4)


def test_the_files_of_sentence_transformers_for_scores(reranker, tmp_path):
    """The function of scores, which comes before that of config.json, and the default prompt, which
    is put before the first text."""
    shutil.copytree(reranker, tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, sentence_transformers={"activation_fn": "torch.nn.Sigmoid"})
    facts = {"activation_fn": "torch.nn.modules.linear.Identity", "prompts": {"query": "w1 w2 "}}
    facts["default_prompt_name"] = "query"
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(facts))
    query, document = words(5), words(9, 1)
    with LLM(str(reranker), **COMMON) as llm:
        (wanted,) = llm.score(f"w1 w2 {query}", document)
    with LLM(str(tmp_path), **COMMON) as llm:
        (found,) = llm.score(query, document)
    assert found.prompt_token_ids == wanted.prompt_token_ids
    assert torch.tensor(found.score).sigmoid().item() == pytest.approx(wanted.score, abs=1e-6)


def judged(query: str, document: str, instruction: str | None = None) -> str:
    """Return the prompt of Qwen3-Reranker, from its model card."""
    task = (
        instruction or "Given a web search query, retrieve relevant passages that answer the query"
    )
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}<|im_end|>"
        "\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("classifier", [True, False])
def test_qwen3_rerankers(tmp_path, classifier, kernels):
    """As a classifier of one label, and by the logits of the two tokens that its modules name."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes |= {"max_position_embeddings": 256}
    save_tokenizer(tmp_path)
    encode = word_tokenizer().encode
    documents = [words(n, n) for n in (3, 40, 70)]

    def prompt(document: str, instruction: str | None = None) -> list[int]:
        return encode(judged(words(5), document, instruction), add_special_tokens=False).ids

    if classifier:
        facts = SIZES | sizes | {"num_labels": 1, "pad_token_id": 0}
        model = save_encoder(tmp_path, "Qwen3ForSequenceClassification", **facts)
    else:
        model = save_tiny(tmp_path, "Qwen3", **sizes)
        save_judge(tmp_path, yes=41, no=17)

    def expected(ids: list[int]) -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits
        if classifier:
            return float(logits.sigmoid())
        return float((logits[0, -1, 41] - logits[0, -1, 17]).sigmoid())

    with LLM(str(tmp_path), kernels=kernels, max_num_batched_tokens=64, **COMMON) as llm:
        for instruction in (None, "w1 w2"):
            outputs = llm.score(words(5), documents, instruction=instruction)
            for document, output in zip(documents, outputs, strict=True):
                ids = prompt(document, instruction)
                assert output.prompt_token_ids == ids
                assert output.score == pytest.approx(expected(ids), abs=1e-4)
        (again,) = llm.score(words(5), documents[-1])
        assert again.num_cached_tokens > 0
        if not classifier:
            assert llm.generate(words(3))[0].outputs[0].token_ids  # it is also a language model


@pytest.mark.parametrize("kernels", KERNELS)
def test_causal_models_that_were_trained_to_embed(tmp_path, kernels):
    """Qwen3-Embedding: the last token, an instruction before queries."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = save_tiny(tmp_path, "Qwen3", **sizes)
    save_tokenizer(tmp_path)
    save_modules(tmp_path, "lasttoken", normalise=True, prompts={"query": "w9 w8 ", "document": ""})
    with LLM(str(tmp_path), kernels=kernels, max_num_batched_tokens=48, **COMMON) as llm:
        for name, before in (("query", "w9 w8 "), ("document", ""), (None, "")):
            (found,) = llm.embed(words(60), prompt_name=name)
            ids = word_tokenizer().encode(before + words(60)).ids
            with torch.inference_mode():
                hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0]
            wanted = normalize(hidden[-1], dim=0)
            torch.testing.assert_close(torch.tensor(found.embedding), wanted, atol=1e-4, rtol=0)
        assert len(llm.embed(words(9), dimensions=32)[0].embedding) == 32


@pytest.mark.parametrize("dense", [(), ((32, 48), (48, 24))])
def test_the_modules_of_sentence_transformers(tmp_path, dense):
    """Pooling, dense layers, prompts, and truncated embeddings."""
    model = save_encoder(tmp_path, "BertModel")
    save_tokenizer(tmp_path)
    prompts = {"query": "w1 w2 ", "document": "w3 "}
    layers = save_modules(
        tmp_path, "cls_token", dense, prompts=prompts, default_prompt_name="document"
    )
    change_config(tmp_path, matryoshka_dimensions=[8, 16])
    encode = word_tokenizer().encode
    text = words(20)

    def expected(before: str) -> torch.Tensor:
        vector = hidden_states(model, encode(before + text).ids)[0]
        with torch.inference_mode():
            for layer in layers:
                vector = layer(vector)
        return vector

    def check(found: Any, wanted: torch.Tensor) -> None:
        vector = torch.tensor(found[0].embedding)
        torch.testing.assert_close(vector, wanted, atol=1e-4, rtol=1e-4)

    with LLM(str(tmp_path), **COMMON) as llm:
        check(llm.embed(text, normalize=False), expected("w3 "))
        check(llm.embed(text), normalize(expected("w3 "), dim=0))
        check(llm.embed(text, prompt_name="query", normalize=False), expected("w1 w2 "))
        check(llm.embed(text, dimensions=8), normalize(expected("w3 ")[:8], dim=0))
        with pytest.raises(ParamError, match="dimensions: must be one of 8, 16, "):
            llm.embed(text, dimensions=9)
        with pytest.raises(ParamError, match="prompt_name: must be one of query, document"):
            llm.embed(text, prompt_name="passage")


@pytest.mark.full
@needs_native
def test_other_modules_have_an_entry_of_their_own_in_the_engine_cache(tmp_path):
    folder, options = tmp_path / "model", COMMON | {"kernels": "native"}
    folder.mkdir()
    save_encoder(folder, "BertModel")
    save_tokenizer(folder)
    save_modules(folder, "cls_token", ((32, 48),))
    weights = folder / "2_Dense" / "model.safetensors"

    def embedded(**cache: str) -> list[float]:
        with LLM(str(folder), **options, **cache) as llm:
            return llm.embed(words(20), normalize=False)[0].embedding

    before = embedded(engine_cache=str(tmp_path / "cache"))
    content = bytearray(weights.read_bytes())
    content[-400:] = bytes(400)
    weights.write_bytes(content)
    assert before != embedded(engine_cache=str(tmp_path / "cache")) == embedded()


@pytest.mark.full
@needs_native
def test_engine_folders_have_the_modules(tmp_path):
    """An encoder built with its dense layers, prompts and pooling answers like the model."""
    folder, built = tmp_path / "model", tmp_path / "engine"
    folder.mkdir()
    save_encoder(folder, "BertModel")
    save_tokenizer(folder)
    save_modules(folder, "cls_token", ((32, 48),), prompts={"query": "w1 "})
    text, options = words(20), COMMON | {"kernels": "native"}
    with LLM(str(folder), **options) as llm:
        wanted = llm.embed(text, prompt_name="query")[0].embedding
    for _ in range(2):  # the second build replaces the first
        build_engine(EngineConfig(model=str(folder), **options), built, lambda *sizes: None)
    with LLM(str(built), device="cpu", threads=1) as llm:
        assert llm.embed(text, prompt_name="query")[0].embedding == wanted


def test_truncation_is_that_of_transformers(bert, reranker):
    """Special tokens stay; of a pair the longer text is cut first."""
    theirs = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer())
    with LLM(str(bert), **COMMON) as llm:
        for most in (3, 10, 128):
            (found,) = llm.embed(words(200), truncate_prompt_tokens=most)
            wanted = theirs(words(200), truncation=True, max_length=most)
            assert found.prompt_token_ids == wanted["input_ids"]
        (found,) = llm.embed(words(200), truncate_prompt_tokens=-1)
        assert len(found.prompt_token_ids) == 128
        with pytest.raises(ParamError, match=r"has 202 tokens.*the context of 128 \(max_model_len"):
            llm.embed(words(200))
        with pytest.raises(ParamError, match="truncate_prompt_tokens: must be at least 3"):
            llm.embed(words(200), truncate_prompt_tokens=2)
    with LLM(str(reranker), **COMMON) as llm:
        for first, second, most in ((5, 200, 20), (200, 5, 20), (90, 90, 31), (90, 90, 32)):
            texts = words(first, 1), words(second, 2)
            (output,) = llm.score(*texts, truncate_prompt_tokens=most)
            wanted = theirs(*texts, truncation="longest_first", max_length=most)
            assert output.prompt_token_ids == wanted["input_ids"]


def test_tasks_embed_and_score(bert, reranker):
    """Results equal those of `LLM`, to the bit."""

    async def run(folder: Path) -> list[float]:
        options = {"engine": "thread", **COMMON}
        async with AsyncLLM(str(folder), **options) as engine:
            if folder == bert:
                return (await engine.embed(words(30), "cls", normalize=False)).embedding
            return [(await engine.score(words(9), words(40))).score]

    with LLM(str(bert), **COMMON) as llm:
        assert llm.embed(words(30), "cls", normalize=False)[0].embedding == asyncio.run(run(bert))
    with LLM(str(reranker), **COMMON) as llm:
        assert [llm.score(words(9), words(40))[0].score] == asyncio.run(run(reranker))


def test_what_an_encoder_cannot_do_is_refused(bert, reranker, tmp_path):
    with LLM(str(bert), **COMMON) as llm:
        with pytest.raises(ParamError, match="model: is an encoder, which writes no text"):
            llm.generate(words(3))
        with pytest.raises(ParamError, match="model: gives no scores"):
            llm.score(words(3), words(3))
        with pytest.raises(ParamError, match="dimensions: must be 32"):
            llm.embed(words(3), dimensions=8)
        with pytest.raises(ParamError, match="prompt_name: must be left out"):
            llm.embed(words(3), prompt_name="query")
    with pytest.raises(ParamError, match="model: is an encoder, which writes no text"):
        measure_quality(EngineConfig(model=str(bert), **COMMON), [words(9)])
    with pytest.raises(ModelError, match="model: is an encoder, which can only be rounded at load"):
        open_source(bert)
    with LLM(str(reranker), **COMMON) as llm:
        with pytest.raises(ParamError, match="model: gives scores of texts, and no vec"):
            llm.embed(words(3))
        with pytest.raises(ParamError, match="instruction: must be left out"):
            llm.score(words(3), words(3), instruction="w1")
        with pytest.raises(ParamError, match="text_2: must have as many texts"):
            llm.score([words(3)] * 2, [words(3)] * 3)
    save_tiny(tmp_path, "Llama")
    with LLM(str(tmp_path), **COMMON) as llm, pytest.raises(ParamError, match="not a reranker"):
        llm.score("a", "b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 128, "max_num_batched_tokens": 64}, "max_num_batched_tokens: must be"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: must be auto"),
        ({"spec_method": "ngram"}, "spec_method: must be left out"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: must be 1"),
        ({"attention_backend": "triton"}, "attention_backend: triton"),
    ],
)
def test_options_that_contradict_an_encoder_are_refused(bert, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(bert), **COMMON | options)


def test_the_context_is_what_steps_and_files_allow(bert, tmp_path):
    with LLM(str(bert), max_num_batched_tokens=64, **COMMON) as llm:
        assert llm.resolved.scheduler.max_model_len == 64
        with pytest.raises(ParamError, match="context of 64"):
            llm.embed(words(70))
    save_encoder(tmp_path, "BertModel")
    save_modules(tmp_path, "mean_tokens")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 50}))
    with LLM(str(tmp_path), **COMMON) as llm:
        assert llm.resolved.scheduler.max_model_len == 50


@pytest.mark.parametrize(("limit", "context"), [(40, 40), (512, 128), (10**30, 128)])
def test_the_limit_of_the_tokenizer_is_that_of_texts(tmp_path, limit, context):
    """Newer releases of sentence-transformers write no other."""
    save_encoder(tmp_path, "BertModel")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
    with LLM(str(tmp_path), **COMMON) as llm:
        assert llm.resolved.scheduler.max_model_len == context


def test_texts_in_lower_case(bert, tmp_path):
    shutil.copytree(bert, tmp_path, dirs_exist_ok=True)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    with LLM(str(bert), **COMMON) as plain, LLM(str(tmp_path), **COMMON) as llm:
        assert llm.embed("W1 W2")[0].prompt_token_ids == plain.embed("w1 w2")[0].prompt_token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_decoder": True}, "is_decoder: must be false"),
        ({"hidden_act": "silu"}, "hidden_act: must be"),
    ],
)
def test_networks_that_cannot_run_are_refused(tmp_path, change, message):
    save_encoder(tmp_path, "BertForSequenceClassification")
    change_config(tmp_path, **change)
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path), **COMMON)


def test_dense_modules_that_cannot_run_are_refused(tmp_path):
    save_encoder(tmp_path, "BertModel")
    save_modules(tmp_path, "mean_tokens", ((32, 48),), normalise=True)
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps([*modules[:2], modules[3], modules[2]]))
    with pytest.raises(ModelError, match="modules.json 3 type"):
        LLM(str(tmp_path), **COMMON)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    facts = {"in_features": 32, "out_features": 48, "use_residual": True}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ModelError, match="use_residual: must be false"):
        LLM(str(tmp_path), **COMMON)


def test_modules_that_cannot_run_are_refused(tmp_path):
    save_encoder(tmp_path, "BertModel")
    save_modules(tmp_path, "weightedmean_tokens")
    with pytest.raises(ModelError, match="must be cls, mean, max or lasttoken"):
        LLM(str(tmp_path), **COMMON)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "..", "type": "x.Pooling"}]))
    with pytest.raises(ModelError, match=r"path must name a folder"):
        LLM(str(tmp_path), **COMMON)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": "x.CNN"}]))
    with pytest.raises(KvikError, match="type: must be one of Transformer, Pooling"):
        LLM(str(tmp_path), **COMMON)
