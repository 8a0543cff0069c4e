"""Builds a tokenizer of the `tokenizers` library from the metadata of a GGUF file.

There are several kinds: "gpt2" merges bytes by rank (Sennrich et al. 2016; Radford et al. 2019);
"llama" merges characters by score (SentencePiece, Kudo and Richardson 2018), and characters without
a token fall back to bytes; "gemma4" is like "llama" but merges by rank. Encoders have two more:
"bert" takes the longest token that begins the rest of a word (WordPiece, Wu et al. 2016), "t5" the
likeliest tokens (a unigram model, Kudo 2018).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE, Unigram, WordPiece

from kvik.errors import ModelError, brief, shown
from kvik.gguf.types import Metadata

log = logging.getLogger(__name__)

# Rules that split text into words before bytes are merged, by their names in GGUF files.
#
# The expressions come from the models' own tokenizer.json files.

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_QWEN2 = _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SEED = (
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS[:-1]}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS[:-1]}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ\u30a0-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_HAN = r"[一-龥ࠀ-一가-\x{d7ff}]+"
# Files of DeepSeek-LLM and V2 list the letters with case.
_DEEPSEEK = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN,
    r"\p{N}",
)
_BLOOM = r" ?[^(\s|[.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c" + r"])]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")
# The rule of llama.cpp if a file names none.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class WordRule:
    """How a tokenizer splits text into words."""

    # Expressions whose matches are separate words; each is applied to the words from the one
    # before.
    splits: tuple[str, ...]
    nfc: bool = False  # whether text is normalised first
    # Whether a word that is a token is taken whole instead of merged from its bytes.
    whole_words: bool = False
    bos: bool = False  # whether BOS is added by default

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_LLAMA3_RULE = WordRule((_LLAMA3,), whole_words=True, bos=True)

WORD_RULES: Mapping[str, WordRule] = {
    "default": WordRule(_DEFAULT),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "exaone4", "mpt", "mellum", "trillion", "a.x-4.0", "gigachat"),
        WordRule((_GPT2,)),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "pixtral", "midm-2.0"), _LLAMA3_RULE
    ),
    "bloom": WordRule((_BLOOM,)),
    "dbrx": WordRule((_LLAMA3,)),
    **dict.fromkeys(("glm4", "smaug-bpe"), WordRule((_LLAMA3,), whole_words=True)),
    "seed-coder": WordRule((_SEED,)),
    **dict.fromkeys(("gpt-4o", "minimax-m2", "kanana2"), WordRule((_GPT4O,))),
    "llama4": WordRule((_GPT4O,), bos=True),
    "qwen2": WordRule((_QWEN2,), nfc=True),
    "qwen35": WordRule((_QWEN35,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), WordRule((_QWEN2,))),
    **dict.fromkeys(("deepseek-v3", "joyai-llm"), WordRule(_DEEPSEEK3)),
    "deepseek-llm": WordRule(_DEEPSEEK),
    "deepseek-coder": WordRule(_DEEPSEEK_CODER),
    **dict.fromkeys(
        ("smollm", "starcoder", "command-r", "refact", "minerva-7b", "codeshell"),
        WordRule((r"\p{N}", _GPT2)),
    ),
    "falcon": WordRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "tekken": WordRule((_TEKKEN,), whole_words=True, bos=True),
}


MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 21
MAX_PIECE = 128  # characters of a token that is merged by score, as all its splits are tried
MAX_MERGES_PER_TOKEN = 8  # trained tokenizers have about two
MAX_TEMPLATE = 1 << 20  # characters
MAX_TABLE = 1 << 24  # bytes of rules that normalise characters
SPACE = "▁"  # a space in SentencePiece's tokens
AT = "tokenizer.ggml"


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL = (TokenKind.CONTROL, TokenKind.UNKNOWN)


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer with its special tokens and chat template."""

    library: Tokenizer  # the tokenizer, which adds BOS and EOS if the file says so
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


def has_tokenizer(metadata: Metadata) -> bool:
    """Return whether a file has a tokenizer; some have the kind "no_vocab"."""
    return metadata.raw(f"{AT}.model") not in (None, "no_vocab", "none")


def read_tokenizer(metadata: Metadata) -> GgufTokenizer:
    """Return the tokenizer in the metadata of a file.

    Raises:
        ModelError: there is none, its kind is unknown, or its lists do not fit together.
    """
    kind = metadata.string(f"{AT}.model")
    if kind not in _KINDS:
        choices = " or ".join(_KINDS)
        raise metadata.error(f"{AT}.model", f"must be {choices}, not {shown(kind)}")
    tokens = metadata.string_array(f"{AT}.tokens", MAX_TOKENS)
    if not tokens:
        raise metadata.error(f"{AT}.tokens", "is missing")
    # Renamed as in llama.cpp: an empty token would match everywhere.
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise metadata.error(f"{AT}.tokens", f"holds {shown(twice)} twice")
    kinds = metadata.integer_array(f"{AT}.token_type", MAX_TOKENS) or [TokenKind.NORMAL] * len(ids)
    _fits(metadata, "token_type", len(kinds), len(tokens))
    names = {name: _token_name(metadata, name, tokens) for name in ("bos", "eos")}
    try:
        library, bos = _KINDS[kind](metadata, ids, kinds)
        _add_special(library, tokens, kinds)
        if kind in SEPARATORS:
            _add_separators(library, metadata, tokens, SEPARATORS[kind])
        else:
            _add_ends(library, metadata, names, {"bos": bos, "eos": False})
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise metadata.error(f"{AT}", f"is not a tokenizer: {brief(error)}") from None
    template = metadata.string("tokenizer.chat_template", "")
    if len(template) > MAX_TEMPLATE:
        raise metadata.error(
            "tokenizer.chat_template", f"must have at most {MAX_TEMPLATE} characters"
        )
    return GgufTokenizer(library, names["bos"], names["eos"], template or None)


def _byte_level(
    metadata: Metadata, ids: Mapping[str, int], kinds: Sequence[int]
) -> tuple[Tokenizer, bool]:
    """Return the tokenizer of the kind "gpt2", and whether it adds BOS by default."""
    name = metadata.string(f"{AT}.pre", "")
    if not name:  # as in llama.cpp
        name = "default"
        reason = f"is missing: the rule {name!r} splits texts, perhaps not as in the training"
        log.warning("%s", metadata.error(f"{AT}.pre", reason))
    if name not in WORD_RULES:
        choices = ", ".join(WORD_RULES)
        raise metadata.error(f"{AT}.pre", f"must be one of {choices}, not {shown(name)}")
    rule = WORD_RULES[name]
    merges = _merges(metadata)
    if not merges:
        raise metadata.error(f"{AT}.merges", "is missing")
    library = Tokenizer(BPE(dict(ids), merges, ignore_merges=rule.whole_words))
    if (normalizer := rule.normalizer()) is not None:
        library.normalizer = normalizer
    library.pre_tokenizer = rule.pre_tokenizer()
    library.decoder = decoders.ByteLevel()
    return library, rule.bos


def _sentencepiece(
    metadata: Metadata, ids: Mapping[str, int], kinds: Sequence[int], *, prefixed: bool = True
) -> tuple[Tokenizer, bool]:
    """Return the tokenizer of the kind "llama", and True: it adds BOS by default.

    Args:
        prefixed: whether it puts a space before a text by default.
    """
    merges = _merges(metadata)
    if not merges:
        scores = metadata.number_array(f"{AT}.scores", MAX_TOKENS)
        _fits(metadata, "scores", len(scores), len(ids))
        plain = {TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED}
        pieces = {token: index for token, index in ids.items() if kinds[index] in plain}
        _short_enough(metadata, pieces)
        merges = merges_by_score(pieces, list(ids), scores)
    unknown = next((token for token, i in ids.items() if kinds[i] == TokenKind.UNKNOWN), None)
    library = Tokenizer(
        BPE(dict(ids), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.boolean(f"{AT}.add_space_prefix", prefixed)
    escape = normalizers.Replace(" ", SPACE)
    library.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), escape]) if prefix else escape
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return library, True


def _characters_by_rank(
    metadata: Metadata, ids: Mapping[str, int], kinds: Sequence[int]
) -> tuple[Tokenizer, bool]:
    """Like `_sentencepiece`, but with merges, not scores, and no space before a text."""
    if f"{AT}.merges" not in metadata:
        raise metadata.error(f"{AT}.merges", "is missing")
    return _sentencepiece(metadata, ids, kinds, prefixed=False)


def _word_pieces(
    metadata: Metadata, ids: Mapping[str, int], kinds: Sequence[int]
) -> tuple[Tokenizer, bool]:
    """Return the tokenizer of the kind "bert", and True. In a file, tokens that begin a word begin
    with `SPACE`, and others have no mark."""
    vocabulary = {
        token.removeprefix(SPACE)
        if token.startswith(SPACE) or kinds[i] in SPECIAL or _is_marked(token)
        else f"##{token}": i
        for token, i in ids.items()
    }
    unknown = _token_name(metadata, "unknown", list(ids)) or "[UNK]"
    library = Tokenizer(WordPiece(vocabulary, unk_token=unknown))
    lower = metadata.boolean(f"{AT}.normalizer.lowercase", True)
    library.normalizer = normalizers.BertNormalizer(lowercase=lower)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library, True


def _unigrams(
    metadata: Metadata, ids: Mapping[str, int], kinds: Sequence[int]
) -> tuple[Tokenizer, bool]:
    """Return the tokenizer of the kind "t5", and True."""
    scores = metadata.number_array(f"{AT}.scores", MAX_TOKENS)
    _fits(metadata, "scores", len(scores), len(ids))
    unknown = next((i for i in ids.values() if kinds[i] == TokenKind.UNKNOWN), None)
    library = Tokenizer(Unigram(list(zip(ids, scores, strict=True)), unknown))
    steps: list[normalizers.Normalizer] = []
    if table := metadata.integer_array(f"{AT}.precompiled_charsmap", MAX_TABLE):
        steps.append(normalizers.Precompiled(bytes(byte % 256 for byte in table)))
    if metadata.boolean(f"{AT}.remove_extra_whitespaces", True):
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    library.normalizer = normalizers.Sequence(steps)
    prefixed = metadata.boolean(f"{AT}.add_space_prefix", True)
    scheme = "always" if prefixed else "never"
    library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme)
    library.decoder = decoders.Metaspace(SPACE, scheme)
    return library, True


def _is_marked(token: str) -> bool:
    """Return whether a token of BERT looks special, such as [CLS]."""
    return token.startswith("[") and token.endswith("]")


_KINDS: Mapping[
    str, Callable[[Metadata, Mapping[str, int], Sequence[int]], tuple[Tokenizer, bool]]
] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _characters_by_rank,
    "bert": _word_pieces,
    "t5": _unigrams,
}
# Kinds of encoders -> separators between the texts of a pair.
SEPARATORS: Mapping[str, int] = {"bert": 1, "t5": 2}


def merges_by_score(
    ids: Mapping[str, int], tokens: Sequence[str], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return the merges of SentencePiece: all pairs that form a token, highest score first.

    Tokens of equal score are ordered as in `transformers`, so that ids are the same.

    Args:
        ids: of the tokens that text is merged to.
        tokens, scores: of all tokens, by id.

    Raises:
        ValueError: there are more merges than a trained tokenizer can have.
    """
    merges: list[tuple[float, int, int]] = []
    for token, index in ids.items():
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        halves = [(ids[left], ids[right]) for left, right in cuts if left in ids and right in ids]
        merges += [(scores[index], left, right) for left, right in halves]
        if len(merges) > MAX_MERGES_PER_TOKEN * len(tokens):
            raise ValueError(f"more than {MAX_MERGES_PER_TOKEN} merges for each token")
    merges.sort(key=lambda m: (m[0], len(tokens[m[1]]), len(tokens[m[2]])), reverse=True)
    return [(tokens[left], tokens[right]) for _, left, right in merges]


def _short_enough(metadata: Metadata, pieces: Mapping[str, int]) -> None:
    longest = max(pieces, key=len, default="")
    if len(longest) > MAX_PIECE:
        raise metadata.error(
            f"{AT}.tokens", f"must have at most {MAX_PIECE} characters each, not {shown(longest)}"
        )


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    pairs = []
    for merge in metadata.string_array(f"{AT}.merges", MAX_MERGES):
        cut = merge.find(" ", 1)
        if cut < 0:
            raise metadata.error(f"{AT}.merges", f"must hold pairs of tokens, not {shown(merge)}")
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _fits(metadata: Metadata, name: str, length: int, expected: int) -> None:
    if length != expected:
        raise metadata.error(
            f"{AT}.{name}", f"must have {expected} values, one for each token, not {length}"
        )


def _add_special(library: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Add tokens that are matched before text is split into words; control tokens are hidden."""
    pairs = list(zip(tokens, kinds, strict=True))
    library.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in pairs
            if kind in SPECIAL
        ]
    )
    library.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in pairs
            if kind == TokenKind.USER_DEFINED
        ]
    )


def _token_name(metadata: Metadata, name: str, tokens: Sequence[str]) -> str | None:
    key = f"{AT}.{name}_token_id"
    if key not in metadata:
        return None
    return tokens[metadata.integer(key, 0, len(tokens) - 1)]


def _add_separators(
    library: Tokenizer, metadata: Metadata, tokens: Sequence[str], between: int
) -> None:
    """Make the tokenizer of an encoder put tokens around each text and between those of a pair.

    Args:
        between: number of separators between the texts; with one, the second text has type 1.
    """
    first = _token_name(metadata, "cls", tokens) or _token_name(metadata, "bos", tokens)
    last = _token_name(metadata, "seperator", tokens) or _token_name(metadata, "eos", tokens)
    if first is None or last is None:
        raise metadata.error(f"{AT}.cls_token_id", "is missing, or seperator_token_id")
    end = f"{last}:1" if between == 1 else last
    second = ["$B:1" if between == 1 else "$B", end]
    library.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", *[last] * between, *second],
        special_tokens=[(token, library.token_to_id(token)) for token in {first, last}],
    )


def _add_ends(
    library: Tokenizer,
    metadata: Metadata,
    names: Mapping[str, str | None],
    defaults: Mapping[str, bool],
) -> None:
    """Make the tokenizer add BOS and EOS to each text, if the file or the default says so."""
    added = {
        name: token
        for name, token in names.items()
        if metadata.boolean(f"{AT}.add_{name}_token", defaults[name]) and token is not None
    }
    if not added:
        return
    bos, eos = added.get("bos"), added.get("eos")
    parts = [part for part in (bos, "$A", eos) if part]
    pairs = [part for part in (bos, "$A", eos, bos, "$B:1", eos) if part]
    library.post_processor = processors.TemplateProcessing(
        single=parts,
        pair=pairs,
        special_tokens=[(token, library.token_to_id(token)) for token in set(added.values())],
    )
