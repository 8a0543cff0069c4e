"""Tokens in common are found by their spelling."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel

from kvik.errors import ConfigError
from kvik.launch import shared_vocabulary
from kvik.text.tokenizer import Tokenizer

WORDS = [f"w{i}" for i in range(20)]


def tokenizer(words: list[str]) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(words)}
    return Tokenizer(Library(WordLevel(vocab, unk_token=words[0])))


def test_equal_vocabularies_need_no_map() -> None:
    assert shared_vocabulary(tokenizer(WORDS), tokenizer(list(WORDS))) is None


def test_tokens_are_found_by_their_spelling() -> None:
    found = shared_vocabulary(tokenizer(WORDS), tokenizer(["extra", *reversed(WORDS)]))
    assert found == (-1, *reversed(range(20)))


def test_a_smaller_vocabulary_may_lack_a_tenth() -> None:
    assert shared_vocabulary(tokenizer(WORDS), tokenizer(WORDS[:18])) == tuple(range(18))
    with pytest.raises(ConfigError, match=r"spec_model.*knows 85% of the model's tokens"):
        shared_vocabulary(tokenizer(WORDS), tokenizer(WORDS[:17]))
