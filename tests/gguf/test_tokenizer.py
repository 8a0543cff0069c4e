"""Tokenizers from GGUF files, compared with the originals."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.gguf_files import write_with_package
from helpers.gguf_tokenizers import BYTE_LEVEL, BYTES, byte_level, sentencepiece, texts
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import generate_merges

from kvik.config.model_source import BUNDLED
from kvik.errors import ModelError
from kvik.gguf import tokenizer as module
from kvik.gguf.reader import read_gguf
from kvik.gguf.tokenizer import GgufTokenizer, merges_by_score, read_tokenizer


def entries(library: Tokenizer) -> dict[str, Any]:
    """Return the lists of a file: tokens by id, their kinds, and merges."""
    added = library.get_added_tokens_decoder()
    tokens = [library.id_to_token(index) for index in range(library.get_vocab_size())]
    model = json.loads(library.to_str())["model"]

    def kind(index: int) -> int:
        if tokens[index] == model["unk_token"]:
            return 2
        if index in added:
            return 3 if added[index].special else 4
        return 6 if tokens[index] in BYTES else 1

    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kind(index) for index in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
    }


def with_scores(library: Tokenizer) -> dict[str, Any]:
    """Return the lists of a file without merges: a token's score is minus the rank of its first
    merge."""
    values = entries(library)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(values.pop("tokenizer.ggml.merges")):
        ranks.setdefault(merge.replace(" ", ""), rank)
    scores = [-float(ranks.get(token, 0)) for token in values["tokenizer.ggml.tokens"]]
    return {**values, "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}


def read(path: Path, values: dict[str, Any]) -> GgufTokenizer:
    write_with_package(path, "llama", values, {})
    return read_tokenizer(read_gguf(path).metadata)


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_bytes_merged_by_rank(tmp_path: Path, pre: str) -> None:
    original = byte_level(pre)
    values = {
        **entries(original),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    library = read(tmp_path / "m.gguf", values).library
    for text in texts(300):
        ids = original.encode(text).ids
        assert library.encode(text).ids == ids, text
        assert library.decode(ids) == original.decode(ids)
        plain = original.encode(text, add_special_tokens=False).ids
        assert library.encode(text, add_special_tokens=False).ids == plain


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("scored", [True, False])
def test_characters_merged_by_score(tmp_path: Path, prefix: bool, scored: bool) -> None:
    original = sentencepiece(prefix)
    values = with_scores(original) if scored else entries(original)
    values |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    library = read(tmp_path / "m.gguf", values).library
    for text in texts(300):
        ids = original.encode(text).ids
        assert library.encode(text).ids == ids, text
        assert library.decode(ids) == original.decode(ids)


def by_definition(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece: merge the adjacent tokens whose union has the highest score, the first on
    ties."""
    parts = list(text)
    while True:
        unions = [a + b for a, b in pairwise(parts)]
        best = max((scores[u] for u in unions if u in scores), default=None)
        if best is None:
            return parts
        at = next(i for i, u in enumerate(unions) if scores.get(u) == best)
        parts[at : at + 2] = [unions[at]]


def test_the_definition_of_merging_by_score(tmp_path: Path) -> None:
    values = with_scores(sentencepiece(True))
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    found = zip(tokens, values["tokenizer.ggml.scores"], kinds, strict=True)
    scores = {token: score for token, score, kind in found if kind == 1}
    library = read(tmp_path / "m.gguf", values).library
    for text in ("the fox lived by the sea", "she said it and they said", "returns  two   tabs"):
        parts = by_definition("▁" + text.replace(" ", "▁"), scores)
        assert library.encode(text, add_special_tokens=False).tokens == parts


def test_merges_are_those_of_transformers() -> None:
    values = with_scores(sentencepiece(True))
    tokens = values["tokenizer.ggml.tokens"][259:]
    ids = {token: index for index, token in enumerate(tokens)}
    scores = [float(len(token) % 3) for token in tokens]  # many are equal
    merges = merges_by_score(ids, tokens, scores)
    assert len(merges) > 100
    assert merges == generate_merges(ids, dict(zip(tokens, scores, strict=True)))


def test_the_bundled_model(tmp_path: Path) -> None:
    original = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    values = {**entries(original), "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    found = read(tmp_path / "m.gguf", values)
    assert [found.bos_token, found.eos_token, found.chat_template] == [None, None, None]
    for text in texts(200):
        assert found.library.encode(text).ids == original.encode(text).ids


def test_bos_eos_and_template(tmp_path: Path) -> None:
    values = {
        **entries(byte_level("gpt-2")),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}é",
    }
    found = read(tmp_path / "m.gguf", values)
    assert (found.bos_token, found.eos_token) == ("<s>", "</s>")
    assert found.chat_template == "{{ bos_token }}é"
    plain = found.library.encode("abc").ids
    for index, (bos, eos) in enumerate([(True, False), (False, True), (True, True)]):
        ends = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        library = read(tmp_path / f"{index}.gguf", values | ends).library
        assert library.encode("abc").ids == [0] * bos + plain + [1] * eos
        assert library.encode("abc", add_special_tokens=False).ids == plain
    values |= {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    assert read(tmp_path / "no.gguf", values).library.encode("abc").ids[0] != 0


def test_special_tokens_are_hidden_and_others_are_not(tmp_path: Path) -> None:
    library = byte_level("gpt-2")
    values = {**entries(library), "tokenizer.ggml.model": "gpt2"}
    found = read(tmp_path / "m.gguf", values).library
    ids = found.encode("a<s><tool call></s>", add_special_tokens=False).ids
    assert [found.id_to_token(i) for i in ids] == ["a", "<s>", "<tool call>", "</s>"]
    assert found.decode(ids) == "a<tool call>"
    assert found.decode(ids, skip_special_tokens=False) == "a<s><tool call></s>"


def test_unused_and_empty_tokens_keep_their_ids(tmp_path: Path) -> None:
    values = {**entries(byte_level("gpt-2")), "tokenizer.ggml.model": "gpt2"}
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "[PAD0]", "", ""]
    values["tokenizer.ggml.token_type"] = [*values["tokenizer.ggml.token_type"], 5, 1, 1]
    count = len(values["tokenizer.ggml.tokens"])
    library = read(tmp_path / "m.gguf", values).library
    assert library.get_vocab_size() == count
    assert library.id_to_token(count - 3) == "[PAD0]"
    assert library.encode("a").ids == byte_level("gpt-2").encode("a").ids


def test_whole_words_that_are_tokens(tmp_path: Path) -> None:
    """Llama 3 uses them even if no merges lead to them; GPT-2 does not."""
    values = {**entries(byte_level("gpt-2")), "tokenizer.ggml.model": "gpt2"}
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "Ġzqzq"]
    values["tokenizer.ggml.token_type"] = [*values["tokenizer.ggml.token_type"], 1]
    last = len(values["tokenizer.ggml.tokens"]) - 1
    for pre, whole in (("llama-bpe", True), ("gpt-2", False)):
        library = read(tmp_path / pre, values | {"tokenizer.ggml.pre": pre}).library
        assert (library.encode("a zqzq").ids[-1] == last) is whole


def test_characters_without_bytes_are_one_unknown(tmp_path: Path) -> None:
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "▁", "a"],
        "tokenizer.ggml.token_type": [2, 1, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0],
    }
    library = read(tmp_path / "m.gguf", values).library
    assert library.encode("a日本a").tokens == ["▁", "a", "<unk>", "a"]


SMALL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}
SCORED = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.scores": [0.0, 0.0, -1.0],
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "tokenizer.ggml.model: is missing"),
        (SMALL | {"tokenizer.ggml.model": "rwkv"}, "must be gpt2 or .* or t5, not 'rwkv'"),
        (SMALL | {"tokenizer.ggml.pre": "hawk"}, "pre: must be one of default, gpt-2.*'hawk'"),
        (SMALL | {"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokens: holds 'a' twice"),
        (SMALL | {"tokenizer.ggml.tokens": [1, 2]}, "tokens: must be an array of strings"),
        (SMALL | {"tokenizer.ggml.token_type": [1, 1]}, "token_type: must have 3 values, .* not 2"),
        (SMALL | {"tokenizer.ggml.merges": ["ab"]}, "merges: must hold pairs of tokens, not 'ab'"),
        (SMALL | {"tokenizer.ggml.merges": ["a c"]}, "ggml: is not a tokenizer: .*c"),
        (SMALL | {"tokenizer.ggml.bos_token_id": 3}, "bos_token_id: must be an integer in"),
        (SMALL | {"tokenizer.chat_template": "x" * 1_100_000}, "template: must have at most"),
        (SCORED | {"tokenizer.ggml.scores": [0.0]}, "scores: must have 3 values, .* not 1"),
        (SCORED | {"tokenizer.ggml.tokens": ["a", "b", "c" * 200]}, "at most 128 characters each"),
        ({k: v for k, v in SMALL.items() if "tokens" not in k}, "ggml.tokens: is missing"),
        ({k: v for k, v in SMALL.items() if "merges" not in k}, "ggml.merges: is missing"),
        (SCORED | {"tokenizer.ggml.model": "gemma4"}, "ggml.merges: is missing"),
    ],
)
def test_wrong_lists(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path / "m.gguf", values)


def test_a_rule_that_is_not_named_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by llama.cpp, whose rule is used."""
    read(tmp_path / "m.gguf", SMALL)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "tokenizer.ggml.pre" in record.getMessage()
    caplog.clear()
    read(tmp_path / "m.gguf", SMALL | {"tokenizer.ggml.pre": "default"})
    read(tmp_path / "m.gguf", SCORED)
    assert not caplog.records


def test_too_many_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(tmp_path / "m.gguf", SCORED).library.encode("ab").tokens == ["ab"]
    monkeypatch.setattr(module, "MAX_MERGES_PER_TOKEN", 0)
    with pytest.raises(ModelError, match="is not a tokenizer: more than 0 merges"):
        read(tmp_path / "m.gguf", SCORED)
    monkeypatch.setattr(module, "MAX_MERGES", 0)
    with pytest.raises(ModelError, match="merges: must have at most 0 values, not 1"):
        read(tmp_path / "m.gguf", SMALL)


def test_words_without_their_metadata(tmp_path: Path) -> None:
    values = {**entries(byte_level("gpt-2")), "tokenizer.ggml.model": "gpt2"}
    rule = read(tmp_path / "m.gguf", values).library.pre_tokenizer
    words = [word for word, _ in rule.pre_tokenize_str("x=12345 it's  <b>")]
    assert words == ["x", "=", "123", "45", "Ġit", "'", "s", "ĠĠ", "<", "b", ">"]
