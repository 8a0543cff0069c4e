"""GGUF files of encoders: vectors and tokens equal those of the model they were made from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers.optional_native import needs_native
from helpers.tiny_encoders import ENCODERS, hidden_states, save_encoder
from helpers.tiny_models import tokens
from safetensors.torch import load_file
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kvik import LLM, ModelError
from kvik.build import build_engine
from kvik.config.config import EngineConfig
from kvik.gguf.export import gguf_family
from kvik.gguf.reader import read_gguf
from kvik.gguf.tokenizer import read_tokenizer
from kvik.models.model_spec import read_model_spec
from kvik.nn.checkpoint import SINGLE

KERNELS = ["torch", pytest.param("native", marks=needs_native)]
COMMON: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1}
LENGTHS = (1, 7, 33, 90)
PROMPTS = [[2, *(4 + i for i in tokens(n, seed=n, vocab=90)), 3] for n in LENGTHS]
NAMES = {"BertModel": "bert", "XLMRobertaModel": "bert", "NomicBertModel": "nomic-bert"}
TEXTS = [
    "The Foxes ran, quickly; they'd un-run 12 miles!",
    "Café  crème\n(naïve)\t[CLS] x",
    "unaffable runningly",
    "\ufb01ne \u2460 \uff21",
    "",
]
# Word pieces: with marks for continuations, as in a vocab.txt.
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "fox", "##es", "ran", "un", "##aff", "##able"]
PIECES += ["run", "##ning", "##ly", "cafe", "creme", "naive", "they", "d", "'", "x", "1", "##2"]
PIECES += [",", ";", "!", "-", "(", ")", "[", "]", "miles", "quick", "fine", "a", "cls"]
UNIGRAMS = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁the", "▁f", "ox", "es", "▁ran", "quick", "ly"]
UNIGRAMS += ["▁run", "ning", "a", "e", "n", "r", "u", "▁un", "af", "f", "able", "'", "x", "12"]


def save_gguf(
    folder: Path,
    path: Path,
    name: str,
    type: str = "F32",
    pooling: int = 2,
    labels: Sequence[str] = (),
) -> None:
    """Write the model in a folder as the public converter does; matrices have a type."""
    config = json.loads((folder / "config.json").read_text())
    architecture = NAMES[name]
    skipped = 2 if name == "XLMRobertaModel" else 0
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"] - skipped)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_uint32(f"{architecture}.pooling_type", pooling)
    writer.add_token_type_count(config["type_vocab_size"])
    if labels:
        writer.add_classifier_output_labels(labels)
    if architecture == "nomic-bert":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    number = next(a for a, kind in gguf.MODEL_ARCH_NAMES.items() if kind == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    for stored, tensor in load_file(folder / SINGLE).items():
        if stored.startswith("pooler"):
            continue
        own = names.get_name(stored.removeprefix("roberta."), try_suffixes=(".weight", ".bias"))
        values = tensor.float().numpy()
        if own == "position_embd.weight":
            values = values[skipped:]
        kind = gguf.GGMLQuantizationType[type if ("blk" in own or "token_embd.w" in own) else "F32"]
        if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(own, values)
        else:
            writer.add_tensor(own, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_vectors_equal_those_of_transformers(tmp_path, name, kernels):
    model = save_encoder(tmp_path, name)
    save_gguf(tmp_path, tmp_path / "m.gguf", name)
    with LLM(str(tmp_path / "m.gguf"), kernels=kernels, **COMMON) as llm:
        for pooling, pooled in (("mean", lambda x: x.mean(0)), (None, lambda x: x[0])):
            outputs = llm.embed(PROMPTS, pooling, normalize=False)
            for ids, output in zip(PROMPTS, outputs, strict=True):
                wanted = pooled(hidden_states(model, ids))
                found = torch.tensor(output.embedding)
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["BertModel", "NomicBertModel"])
def test_quantised_files(tmp_path, name, kernels):
    """Also of the embedding, to which token types are added."""
    model = save_encoder(tmp_path, name, intermediate_size=64)
    save_gguf(tmp_path, tmp_path / "m.gguf", name, "Q8_0", pooling=1)
    with LLM(str(tmp_path / "m.gguf"), kernels=kernels, **COMMON) as llm:
        outputs = llm.embed(PROMPTS)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        wanted = torch.nn.functional.normalize(hidden_states(model, ids).mean(0), dim=0)
        assert float(torch.tensor(output.embedding) @ wanted) > 0.999


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("labels", [["good"], ["good", "bad", "neither"]])
def test_scores_and_classes(tmp_path, labels, kernels):
    model = save_encoder(tmp_path, "XLMRobertaForSequenceClassification", num_labels=len(labels))
    save_gguf(tmp_path, tmp_path / "m.gguf", "XLMRobertaModel", pooling=4, labels=labels)
    with torch.inference_mode():
        logits = torch.stack([model(torch.tensor([ids])).logits[0] for ids in PROMPTS])
    with LLM(str(tmp_path / "m.gguf"), kernels=kernels, **COMMON) as llm:
        raw = llm.classify(PROMPTS, use_activation=False)
        outputs = llm.classify(PROMPTS)
    found = torch.tensor([output.probs for output in raw])
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
    wanted = logits.softmax(-1) if len(labels) > 1 else logits.sigmoid()
    found = torch.tensor([output.probs for output in outputs])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert [output.label for output in outputs] == [labels[i] for i in logits.argmax(-1).tolist()]
    with pytest.raises(ModelError, match="model: is a classifier in a GGUF file"):
        build_engine(EngineConfig(model=str(tmp_path / "m.gguf")), tmp_path / "e", lambda *n: None)


def test_heads_that_do_not_fit_are_refused(tmp_path):
    save_encoder(tmp_path, "BertModel")
    save_gguf(tmp_path, tmp_path / "m.gguf", "BertModel", pooling=4)
    with pytest.raises(ModelError, match="pooling_type: must be 1, 2, 3, or 4 with a matrix"):
        LLM(str(tmp_path / "m.gguf"), **COMMON)


def test_encoders_are_not_exported(tmp_path):
    assert "BertModel" in ENCODERS
    save_encoder(tmp_path, "BertModel")
    with pytest.raises(ModelError, match="architectures: must be one of LlamaForCausalLM"):
        gguf_family(read_model_spec(tmp_path))


def save_tokenizer(path: Path, kind: str, pieces: list[str], **values: Any) -> None:
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(pieces)
    for key, value in values.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        else:
            writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("marked", [False, True])
def test_word_pieces(tmp_path, marked):
    """In old files special tokens are normal ones."""
    wanted = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]")
    )
    wanted.normalizer = normalizers.BertNormalizer()
    wanted.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    wanted.decoder = decoders.WordPiece()
    wanted.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    stored = [
        piece[2:] if piece[:2] == "##" else piece if i < 4 else f"▁{piece}"
        for i, piece in enumerate(PIECES)
    ]
    kinds = [3, 2, 3, 3] + [1] * (len(PIECES) - 4)
    values: dict[str, Any] = {"seperator_token_id": 3, "cls_token_id": 2, "unknown_token_id": 1}
    if marked:
        values["token_type"] = kinds
        wanted.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    save_tokenizer(tmp_path / "m.gguf", "bert", stored, **values)
    found = read_tokenizer(read_gguf(tmp_path / "m.gguf").metadata).library
    for text in TEXTS:
        assert found.encode(text).ids == wanted.encode(text).ids
    pair, other = (library.encode(TEXTS[0], TEXTS[2]) for library in (found, wanted))
    assert (pair.ids, pair.type_ids) == (other.ids, other.type_ids)
    assert found.decode(pair.ids) == wanted.decode(pair.ids)


def test_unigrams(tmp_path):
    scores = [0.0] * 4 + [float(s) for s in -np.linspace(2, 9, len(UNIGRAMS) - 4)]
    wanted = Tokenizer(models.Unigram(list(zip(UNIGRAMS, scores, strict=True)), 3))
    wanted.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    wanted.pre_tokenizer = pre_tokenizers.Metaspace()
    wanted.decoder = decoders.Metaspace()
    wanted.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=False, add_prefix_space=False
    )
    wanted.add_special_tokens(UNIGRAMS[:4])
    values: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 2, "scores": scores}
    values["token_type"] = [3, 3, 3, 2] + [1] * (len(UNIGRAMS) - 4)
    save_tokenizer(tmp_path / "m.gguf", "t5", UNIGRAMS, **values)
    found = read_tokenizer(read_gguf(tmp_path / "m.gguf").metadata).library
    for text in TEXTS:
        assert found.encode(text).ids == wanted.encode(text).ids
    pair, other = (library.encode(TEXTS[2], TEXTS[0]) for library in (found, wanted))
    assert (pair.ids, found.decode(pair.ids)) == (other.ids, wanted.decode(other.ids))


def test_a_tokenizer_without_separators_is_refused(tmp_path):
    save_tokenizer(tmp_path / "m.gguf", "bert", ["[UNK]", "▁a"])
    with pytest.raises(ModelError, match="cls_token_id: is missing"):
        read_tokenizer(read_gguf(tmp_path / "m.gguf").metadata)
