"""Small tokenizers of every kind used by language models, built here without files."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CORPUS = [
    "Once upon a time a fox lived by the river, and it didn't know the sea.",
    "naïve café déjà vu; Ångström; Привет, мир! Ελληνικά; שלום; 日本語のテキスト; 👩‍🚀🦊🌊",
    "def f(x):\n    return x  # two  spaces,   three\n\n\tand a tab",
]
SPECIAL = ["<s>", "</s>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool call>", "naïve"])  # the library decodes the second one wrongly
    return tokenizer


def _sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoder
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", *SPECIAL, *BYTES, "▁▁", "�"],
        limit_alphabet=40,  # the rest of the corpus falls back to bytes
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())  # the trainer makes the byte tokens special
    state["added_tokens"] = [
        t for t in state["added_tokens"] if t["content"] in ("<unk>", *SPECIAL)
    ]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


def _llama2() -> Tokenizer:
    return _sentencepiece(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )


def _gemma() -> Tokenizer:
    """Like Llama 2, but the leading space is part of the text."""
    return _sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    )


def _metaspace() -> Tokenizer:
    """Converted sentencepiece models with a Metaspace decoder."""
    return _sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _words() -> Tokenizer:
    """No decoder at all: tokens are joined with spaces."""
    words = sorted({word for text in CORPUS for word in text.split()})
    names = ["<unk>", *SPECIAL, *words]
    tokenizer = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "llama2": _llama2,
    "gemma": _gemma,
    "metaspace": _metaspace,
    "wordpiece": _wordpiece,
    "words": _words,
}


@pytest.fixture(scope="session", params=KINDS)
def library(request: pytest.FixtureRequest) -> Tokenizer:
    """The library's tokenizer, one of each kind."""
    return KINDS[request.param]()


@pytest.fixture(scope="session")
def build() -> Callable[[str], Tokenizer]:
    """Return a function that builds a tokenizer by kind."""
    return lambda kind: KINDS[kind]()
