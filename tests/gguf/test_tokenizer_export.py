"""tokenizer.json in the words of GGUF and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.gguf_tokenizers import BYTE_LEVEL, byte_level, sentencepiece, texts
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from kvik.config.model_source import BUNDLED
from kvik.errors import ModelError
from kvik.gguf.export import tokenizer_metadata
from kvik.gguf.reader import read_gguf
from kvik.gguf.tokenizer import GgufTokenizer, read_tokenizer
from kvik.gguf.writer import write_gguf


def there_and_back(
    path: Path, library: Tokenizer, bos: int, eos: int, template: str | None = None
) -> GgufTokenizer:
    metadata = tokenizer_metadata(library, 600, bos, eos, template)
    ids = {"tokenizer.ggml.bos_token_id": bos, "tokenizer.ggml.eos_token_id": eos}
    write_gguf(path, {**metadata, **ids}, [])
    return read_tokenizer(read_gguf(path).metadata)


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_bytes(tmp_path: Path, pre: str) -> None:
    original = byte_level(pre)
    found = there_and_back(tmp_path / "m.gguf", original, 0, 1, "{{ x }}")
    assert (found.bos_token, found.eos_token, found.chat_template) == ("<s>", "</s>", "{{ x }}")
    for text in texts(100, seed=1):
        assert found.library.encode(text).ids == original.encode(text).ids


@pytest.mark.parametrize("prefix", [True, False])
def test_characters(tmp_path: Path, prefix: bool) -> None:
    original = sentencepiece(prefix)
    library = there_and_back(tmp_path / "m.gguf", original, 1, 2).library
    for text in texts(100, seed=2):
        ids = original.encode(text).ids
        assert library.encode(text).ids == ids and library.decode(ids) == original.decode(ids)


@pytest.mark.parametrize(("scheme", "prefix"), [("first", True), ("never", False)])
def test_metaspace(scheme: str, prefix: bool) -> None:
    library = Tokenizer.from_str(sentencepiece(True).to_str())
    library.normalizer = None  # type: ignore[assignment]
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    metadata = tokenizer_metadata(library, 600, 1, 2, None)
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix


def test_a_token_is_worth_its_first_merge() -> None:
    ids = {token: index for index, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    merges = [("a", "b"), ("ab", "c"), ("b", "c"), ("a", "bc")]
    library = Tokenizer(models.BPE(ids, merges, byte_fallback=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    scores = tokenizer_metadata(library, 6, None, None, None)["tokenizer.ggml.scores"]
    assert isinstance(scores, list) and scores[3:] == [0.0, -2.0, -1.0]


def test_rows_without_a_token(tmp_path: Path) -> None:
    library = there_and_back(tmp_path / "m.gguf", byte_level("gpt-2"), 0, 1).library
    assert library.get_vocab_size() == 600 and library.id_to_token(599) == "[PAD599]"
    with pytest.raises(ModelError, match=r"tokenizer\.json: .* must be below 300"):
        tokenizer_metadata(byte_level("gpt-2"), 300, 0, 1, None)


def test_the_bundled_model(tmp_path: Path) -> None:
    original = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    metadata = tokenizer_metadata(original, 2048, 0, 0, None)
    write_gguf(tmp_path / "m.gguf", metadata, [])
    library = read_tokenizer(read_gguf(tmp_path / "m.gguf").metadata).library
    for text in texts(100):
        assert library.encode(text).ids == original.encode(text).ids


def test_what_gguf_has_no_words_for() -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ModelError, match="must be BPE for GGUF, not 'WordLevel'"):
        tokenizer_metadata(words, 1, None, None, None)
    text = byte_level("gpt-2").to_str()
    for change in (
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Lowercase"}},
    ):
        other = Tokenizer.from_str(json.dumps({**json.loads(text), **change}))
        with pytest.raises(ModelError, match="cuts text into words in a way that has no name"):
            tokenizer_metadata(other, 600, 0, 1, None)
    spaces = Tokenizer.from_str(sentencepiece(True).to_str())
    spaces.normalizer = normalizers.Lowercase()
    with pytest.raises(ModelError, match="must replace spaces as SentencePiece does"):
        tokenizer_metadata(spaces, 600, 1, 2, None)
