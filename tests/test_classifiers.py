"""Classifiers, encoders and decoders: classes equal those of transformers, whatever shares their
steps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.optional_native import needs_native
from helpers.tiny_encoders import (
    CLASSIFIERS,
    change_config,
    save_encoder,
    save_tokenizer,
    word_tokenizer,
    words,
)
from helpers.tiny_models import tokens
from transformers import PreTrainedTokenizerFast

from kvik import LLM, AsyncLLM, ModelError, ParamError
from kvik.build import build_engine
from kvik.config.config import EngineConfig
from kvik.quantize.source import open_source

KERNELS = ["torch", pytest.param("native", marks=needs_native)]
COMMON: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1}
PROMPTS = [[2, *(4 + i for i in tokens(n, seed=n, vocab=90)), 3] for n in (1, 7, 33, 64, 90)]
NAMES = {0: "bad", 1: "good", 2: "neither"}
CHAT = (
    "{% for m in messages %}[CLS] {{ m.content }} [SEP] {% endfor %}"
    "{% if add_generation_prompt %}w0{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("classifier")
    save_encoder(folder, "BertForSequenceClassification", num_labels=3, id2label=NAMES)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_equal_those_of_transformers(tmp_path, name, kernels):
    model = save_encoder(tmp_path, name, num_labels=3, id2label=NAMES)
    with torch.inference_mode():
        logits = torch.stack([model(torch.tensor([ids])).logits[0] for ids in PROMPTS])
    with LLM(str(tmp_path), kernels=kernels, **COMMON) as llm:
        outputs = llm.classify(PROMPTS)
        raw = llm.classify(PROMPTS, use_activation=False)
        alone = [llm.classify(ids)[0].probs for ids in PROMPTS]
        with pytest.raises(ParamError, match="model: is a classifier, which writes no text"):
            llm.generate(PROMPTS[1])
    found = torch.tensor([output.probs for output in raw])
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
    probs = torch.tensor([output.probs for output in outputs])
    torch.testing.assert_close(probs, logits.softmax(-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(alone), probs, atol=1e-6, rtol=0)
    assert [output.label for output in outputs] == [NAMES[int(i)] for i in logits.argmax(-1)]


def test_classes_of_pairs(tmp_path):
    """As natural language inference has them, and the texts of a pair in several forms."""
    model = save_encoder(tmp_path, "BertForSequenceClassification", num_labels=3)
    save_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer())
    premises, hypotheses = [words(5), words(60, 1)], [words(9, 2), words(30, 3)]
    with torch.inference_mode():
        wanted = torch.cat(
            [
                model(**tokenizer(*pair, return_tensors="pt", return_token_type_ids=True)).logits
                for pair in zip(premises, hypotheses, strict=True)
            ]
        ).softmax(-1)
    with LLM(str(tmp_path), **COMMON) as llm:
        outputs = llm.classify(premises, hypotheses)
        assert llm.classify(premises[0], hypotheses)[0].probs == outputs[0].probs
        with pytest.raises(ParamError, match="prompt: must be a text if there is a second"):
            llm.classify([PROMPTS[0]], [words(3)])
    found = torch.tensor([output.probs for output in outputs])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert all(output.label.startswith("LABEL_") for output in outputs)


@pytest.mark.parametrize(
    ("facts", "function"),
    [
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda x: x),
        # This function is for scores of one label.
        ({"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, lambda x: x.softmax(0)),
    ],
)
def test_the_function_that_files_name(folder, tmp_path, facts, function):
    save_encoder(tmp_path, "BertForSequenceClassification", num_labels=3)
    save_tokenizer(tmp_path)
    change_config(tmp_path, **facts)
    with LLM(str(tmp_path), **COMMON) as llm:
        outputs = (llm.classify(words(9), use_activation=use)[0].probs for use in (True, False))
        probs, raw = map(torch.tensor, outputs)
    torch.testing.assert_close(probs, function(raw), atol=1e-6, rtol=1e-6)


def test_one_label_is_a_score(tmp_path):
    """Such as a reward of a conversation, whose template writes the special tokens."""
    model = save_encoder(tmp_path, "LlamaForSequenceClassification")
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    ids = [2, 5, 6, 3, 2, 7, 3]
    with torch.inference_mode():
        (reward,) = model(torch.tensor([ids])).logits[0].tolist()
    with LLM(str(tmp_path), **COMMON) as llm:
        text = llm.render_chat(messages, add_generation_prompt=False)
        (raw,) = llm.classify(text, use_activation=False, add_special_tokens=False)
        (output,) = llm.classify(ids)
        score = llm.score("w1", "w2")[0].score
        assert score == pytest.approx(llm.classify("w1", "w2")[0].probs[0], abs=1e-6)
    assert raw.prompt_token_ids == ids
    assert raw.probs == [pytest.approx(reward, abs=1e-4)]
    assert output.probs == [pytest.approx(torch.tensor(reward).sigmoid().item(), abs=1e-5)]


def test_tasks_classify(folder):
    """Results equal those of `LLM`, to the bit."""
    cases: list[tuple[Any, str | None]] = [
        (words(30), None),
        (PROMPTS[2], None),
        (words(9), words(5, 1)),
    ]

    async def run() -> list[list[float]]:
        async with AsyncLLM(str(folder), engine="thread", **COMMON) as engine:
            outputs = await asyncio.gather(*(engine.classify(*case) for case in cases))
            with pytest.raises(ParamError, match="prompt: must be a text if there is a second"):
                await engine.classify(PROMPTS[0], "w1")
            return [output.probs for output in outputs]

    with LLM(str(folder), **COMMON) as llm:
        assert asyncio.run(run()) == [llm.classify(*case)[0].probs for case in cases]


@needs_native
@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "LlamaForSequenceClassification"]
)
def test_engine_folders_of_classifiers(tmp_path, name):
    source, built = tmp_path / "model", tmp_path / "engine"
    source.mkdir()
    save_encoder(source, name, num_labels=3, id2label=NAMES)
    save_tokenizer(source)
    options = COMMON | {"kernels": "native", "quantization": "int8"}
    with LLM(str(source), **options) as llm:
        wanted = llm.classify(words(20))[0]
    build_engine(EngineConfig(model=str(source), **options), built, lambda *sizes: None)
    with LLM(str(built), device="cpu", threads=1) as llm:
        found = llm.classify(words(20))[0]
    assert (found.probs, found.label) == (wanted.probs, wanted.label)


def test_what_a_classifier_cannot_do_is_refused(folder, tmp_path):
    save_encoder(tmp_path / "llama", "LlamaForSequenceClassification")
    with pytest.raises(ModelError, match="model: is a classifier, which can only be rounded"):
        open_source(tmp_path / "llama")
    with LLM(str(folder), **COMMON) as llm:
        with pytest.raises(ParamError, match="model: is a classifier, which writes no text"):
            llm.generate(words(3))
        with pytest.raises(ParamError, match="model: gives classes of texts, and no vectors"):
            llm.embed(words(3))
        with pytest.raises(ParamError, match="model: gives 3 classes, and no single score"):
            llm.score(words(3), words(3))
    save_encoder(tmp_path, "BertModel")
    with LLM(str(tmp_path), **COMMON) as llm, pytest.raises(ParamError, match="gives no classes"):
        llm.classify(PROMPTS[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label: must name 1 to 65536 labels"),
        ({"id2label": {}}, "id2label: must name 1 to 65536 labels"),
        ({"id2label": {"0": 1, "1": "b"}}, "id2label: must name 1 to 65536 labels"),
        ({"problem_type": "ranking"}, "problem_type: must be one of single_label"),
        ({"id2label": {str(i): "x" for i in range(5)}}, "classifier.weight"),
    ],
)
def test_files_of_classifiers_that_cannot_be_read_are_refused(tmp_path, change, message):
    save_encoder(tmp_path, "BertForSequenceClassification", num_labels=3)
    change_config(tmp_path, **change)
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path), **COMMON)
