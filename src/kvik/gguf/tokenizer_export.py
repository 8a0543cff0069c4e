"""A tokenizer.json in the words of GGUF: the other way of `tokenizer`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from kvik.errors import ModelError, shown
from kvik.gguf.tokenizer import AT, SPACE, WORD_RULES, TokenKind, WordRule
from kvik.gguf.writer import Scalar

BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def tokenizer_metadata(
    library: Tokenizer, vocab_size: int, bos: int | None, eos: int | None, template: str | None
) -> dict[str, Scalar | Sequence[Scalar]]:
    """The metadata of a tokenizer.

    Args:
        vocab_size: rows of the embedding; ids without a token get one that is never used.
        bos, eos: ids.
        template: of chats.

    Raises:
        ModelError: GGUF has no words for such a tokenizer.
    """
    state = json.loads(library.to_str())
    model = state["model"]
    if model["type"] != "BPE":
        raise ModelError("tokenizer.json", f"must be BPE for GGUF, not {shown(model['type'])}")
    by_score = bool(model["byte_fallback"])
    tokens, kinds = _tokens(library, model, vocab_size, by_score)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata: dict[str, Scalar | Sequence[Scalar]] = {
        f"{AT}.model": "llama" if by_score else "gpt2",
        f"{AT}.tokens": tokens,
        f"{AT}.token_type": kinds,
    }
    if by_score:
        metadata[f"{AT}.pre"] = "default"
        metadata[f"{AT}.scores"] = _scores(tokens, merges)
        metadata[f"{AT}.add_space_prefix"] = _space_prefix(state)
    else:
        metadata[f"{AT}.pre"] = _rule_name(state)
        metadata[f"{AT}.merges"] = merges
    ends = library.encode("a").ids, library.encode("a", add_special_tokens=False).ids
    metadata[f"{AT}.add_bos_token"] = ends[0] != ends[1] and ends[0][0] == bos
    metadata[f"{AT}.add_eos_token"] = ends[0] != ends[1] and ends[0][-1] == eos
    if template:
        metadata["tokenizer.chat_template"] = template
    return metadata


def _tokens(
    library: Tokenizer, model: Mapping[str, Any], vocab_size: int, by_score: bool
) -> tuple[list[str], list[int]]:
    """Tokens by id and their kinds."""
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds: list[int] = [TokenKind.UNUSED] * vocab_size
    added = library.get_added_tokens_decoder()
    for token, index in library.get_vocab(with_added_tokens=True).items():
        if index >= vocab_size:
            raise ModelError("tokenizer.json", f"{shown(token)} must be below {vocab_size}")
        tokens[index] = token
        if index in added:
            special = added[index].special
            kinds[index] = TokenKind.CONTROL if special else TokenKind.USER_DEFINED
        else:
            byte = by_score and token in BYTES
            kinds[index] = TokenKind.BYTE if byte else TokenKind.NORMAL
        if token == model["unk_token"]:
            kinds[index] = TokenKind.UNKNOWN
    return tokens, kinds


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Of each token; the earlier a merge makes it, the higher."""
    rank: dict[str, int] = {}
    for index, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), index)
    return [-float(rank.get(token, 0)) for token in tokens]


def _space_prefix(state: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text whose spaces are tokens' own characters."""
    normal, before = state["normalizer"] or {}, state["pre_tokenizer"] or {}
    steps = normal.get("normalizers", [normal])
    kinds = [step.get("type") for step in steps]
    if before.get("type") == "Metaspace":
        return bool(before["prepend_scheme"] != "never")
    if kinds in (["Prepend", "Replace"], ["Replace"]) and steps[-1].get("content") == SPACE:
        return bool(kinds[0] == "Prepend")
    raise ModelError("tokenizer.json", "must replace spaces as SentencePiece does, for GGUF")


def _rule_name(state: Mapping[str, Any]) -> str:
    """The name of how text is cut into words."""
    normalizer, before = state["normalizer"], state["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [before])
    splits = []
    for step in steps:
        kind = step.get("type")
        if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            splits.append(step["pattern"].get("Regex"))
        elif kind == "Digits" and step["individual_digits"]:
            splits.append(r"\p{N}")
        elif kind == "ByteLevel" and not step["add_prefix_space"] and step is steps[-1]:
            splits += list(WORD_RULES["gpt-2"].splits) if step["use_regex"] else []
        else:
            splits.append(None)
    nfc = (normalizer or {}).get("type") == "NFC"
    whole = bool(state["model"].get("ignore_merges", False))
    for name, rule in WORD_RULES.items():
        same = WordRule(tuple(splits), nfc, whole, rule.bos) == rule
        if same and (nfc or normalizer is None):
            return name
    raise ModelError("tokenizer.json", "cuts text into words in a way that has no name in GGUF")
