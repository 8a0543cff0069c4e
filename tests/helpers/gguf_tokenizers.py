"""Small trained tokenizers of the kinds in GGUF files, and texts to test them with."""

from __future__ import annotations

import json
import random
from functools import cache

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CORPUS = [
    "Once upon a time a fox lived by the river, and it DIDN'T know the sea; she's 1234 years old.",
    "naïve café déjà vu; Ångström; Привет, мир! Ελληνικά; שלום; 日本語のテキスト; 👩‍🚀🦊🌊",
    "def f(x):\n    return x  # two  spaces,   three\n\n\tand a tab\r\n",
    "Lambs in Las Lagos say HE'LLama and SHE'Mother, it'Sea; La la La.",
    "We're what they've said: it'll be I'm sure; He'd go. $3.50 + 7% = x^2 | `a` ~ <b>",
] * 3

# From the tokenizer.json files of these models.
WORDS = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "seed-coder": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}|"
        r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
WORDS["smaug-bpe"] = WORDS["llama-bpe"]  # of SmolLM3, which adds no BOS
# Pre-tokenizers that split several times.
STEPS = {
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ\u30a0-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
BYTE_LEVEL = ("gpt-2", "smollm", *WORDS, *STEPS)


@cache
def byte_level(pre: str) -> Tokenizer:
    """Return one with ids <s>, </s>, 256 bytes, merges, <tool call>."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "smaug-bpe", "tekken")))
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "gpt-2":
        tokenizer.pre_tokenizer = gpt2
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    else:
        steps = STEPS.get(pre) or (WORDS[pre],)
        splits = [pre_tokenizers.Split(Regex(step), behavior="isolated") for step in steps]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_alone])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool call>"])
    if pre in ("llama-bpe", "tekken"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return tokenizer


@cache
def sentencepiece(prefix: bool) -> Tokenizer:
    """Return one with ids <unk>, <s>, </s>, 256 bytes, characters and merges."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    escape = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), escape]) if prefix else escape
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *BYTES],
        limit_alphabet=40,  # the rest of the corpus falls back to bytes
        max_token_length=12,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())  # the trainer makes the byte tokens special
    state["added_tokens"] = state["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def texts(count: int, seed: int = 0) -> list[str]:
    """Return random Unicode texts with words, spaces, digits and special tokens."""
    draw = random.Random(seed)
    special = ["<s>", "</s>", "<tool call>", "<unk>", "<0x41>"]
    words = [*" ".join(CORPUS[:5]).split(" "), *special]

    def piece() -> str:
        kind = draw.randrange(7)
        if kind == 0:
            return draw.choice([" ", "  ", "\n", "\t", "\r\n", "   \n "])
        if kind == 1:
            return str(draw.randrange(10**6))
        if kind == 2:
            return chr(draw.choice([draw.randrange(0xA0, 0xD800), draw.randrange(0xE000, 0x20000)]))
        if kind == 3:
            return chr(draw.randrange(32, 127))
        return draw.choice(words)

    made = ("".join(piece() for _ in range(draw.randrange(1, 30))) for _ in range(count))
    return ["", " ", *made]
