"""Text to token ids and back, by the `tokenizers` library.

`tokenizer.json` defines how text is split and which special tokens are added, as in `transformers`
5; the other files of the folder only name the BOS and EOS tokens and the chat template, and change
how BERT's tokenizers normalise text. Decoding does not clean up text: spaces before punctuation
stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Library
from tokenizers import normalizers

from kvik.core.sampling_params import WORDS, SamplingParams, Words
from kvik.errors import ConfigError, ModelError, ParamError, brief, shown
from kvik.files import is_named, regular
from kvik.spec.pooling import LENGTHS
from kvik.text.detokenizer import NO_MARKS, REPLACEMENT, Detokenizer, TokenTexts, panics_are_errors

MAX_TOKENIZER_BYTES = 128 << 20  # the largest public ones have about 35 MB
MAX_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 1 << 20
# Keys of tokenizer_config.json -> attributes of BERT's normaliser, over which they take precedence.
BERT_KEYS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
# Tokenizers in files that are not read.
UNREAD = {
    "tokenizer.model": "tokenizer.model alone (sentencepiece) is",
    "vocab.json": "vocab.json and merges.txt alone are",
    "vocab.txt": "vocab.txt alone is",
}
_MARKUP = re.compile(r"<[^\s<>]+>|\[/?[A-Z_]+\]")
BRIEF_CHARS = 2048  # encoded in about a millisecond


class Tokenizer:
    """One model's tokenizer; stateless, so any number of requests may share it."""

    def __init__(
        self,
        library: Library,
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        library.no_truncation()  # a file may contain the limits of a training run
        library.no_padding()
        self.library = library
        self._token_texts = TokenTexts(library)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.chat_template = chat_template
        added = library.get_added_tokens_decoder()
        named = [library.token_to_id(name) for name in (bos_token, eos_token) if name is not None]
        self.special_ids: frozenset[int] = frozenset(
            [token for token, content in added.items() if content.special]
            + [token for token in named if token is not None]
        )
        # Added tokens that text never tokenises to by parts: special ones, and other markup.
        self.markup_ids: Mapping[str, int] = {
            content.content: token
            for token, content in added.items()
            if token in self.special_ids or _MARKUP.fullmatch(content.content)
        }
        self.vocab_size: int = max([library.get_vocab_size() - 1, *added]) + 1

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of a model folder in Hugging Face format.

        Raises:
            ModelError: tokenizer.json is missing; or it or another file is too large or corrupt.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not is_named(path):
            raise ModelError("tokenizer.json", _why_missing(folder))
        data = _read(path, MAX_TOKENIZER_BYTES)
        with panics_are_errors():
            try:
                library = Library.from_buffer(data)
            except Exception as error:  # the library raises plain Exception
                raise ModelError("tokenizer.json", f"is not a tokenizer: {brief(error)}") from None
        config = _read_json(folder / "tokenizer_config.json")
        if isinstance(normalizer := library.normalizer, normalizers.BertNormalizer):
            for key, attribute in BERT_KEYS.items():
                if isinstance(value := config.get(key), bool):
                    setattr(normalizer, attribute, value)
        if _read_json(folder / LENGTHS).get("do_lower_case") is True:
            steps = [library.normalizer] if library.normalizer is not None else []
            library.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
        special = _read_json(folder / "special_tokens_map.json")
        return cls(
            library,
            bos_token=_token_name("bos_token", config, special),
            eos_token=_token_name("eos_token", config, special),
            chat_template=_find_template(folder, config),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, which may be empty.

        A chat template writes BOS itself, so its output is encoded without special tokens.
        Special tokens that are spelt out in the text are recognised either way.

        Raises:
            ParamError: `text` is not a string of Unicode characters.
        """
        check_unicode(text)
        with panics_are_errors():
            if len(text) <= BRIEF_CHARS:
                return self.library.encode(text, add_special_tokens=add_special_tokens).ids
            # Unlike `encode`, this lets other threads run.
            (encoding,) = self.library.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return encoding.ids

    def encode_texts(
        self, texts: Sequence[str], limit: int | None, *, special: bool = True
    ) -> tuple[list[int], int]:
        """Return the token ids of one text or of a pair, with the special tokens that the file puts
        around them; and the index where the second token type begins, 0 if there is only one type.

        Args:
            limit: tokens to keep; None: all. Special tokens are kept, and the first ones of a text.
                Of a pair, the longer text is cut until both are equally long, then both.
            special: add special tokens.

        Raises:
            ParamError: a text is not a string of Unicode characters, or `limit` leaves none of it.
        """
        for text in texts:
            check_unicode(text)
        library = self.library
        with panics_are_errors():
            if limit is None:
                pair = texts[1] if len(texts) > 1 else None
                encoding = library.encode(texts[0], pair, add_special_tokens=special)
            else:
                parts = library.encode_batch(list(texts), add_special_tokens=False)
                added = library.num_special_tokens_to_add(len(parts) > 1) if special else 0
                if limit - added < len(parts):
                    raise ParamError(
                        "truncate_prompt_tokens", f"must be at least {added + len(parts)}"
                    )
                lengths = [len(part) for part in parts]
                for part, length in zip(parts, _cut(lengths, limit - added), strict=True):
                    part.truncate(length)
                second = parts[1] if len(parts) > 1 else None
                encoding = library.post_process(parts[0], second, add_special_tokens=special)
        types = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the whole text of a sequence; equal to what a stream of it yields."""
        shown = [token for token in ids if 0 <= token < self.vocab_size]
        if skip_special_tokens:
            shown = [token for token in shown if token not in self.special_ids]
        text = self._token_texts.decode(shown)
        if REPLACEMENT in text:  # the library rejects a whole run of bytes if one is invalid
            stream = self.new_stream((), skip_special_tokens)
            text = stream.push(shown) + stream.flush()
        return text

    def token(self, token_id: int) -> str:
        """Return the vocabulary entry of an id, spelt as in the file; "" for an unknown id."""
        in_range = 0 <= token_id < self.vocab_size
        return (self.library.id_to_token(token_id) or "") if in_range else ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds inside a text; b"" for an unknown id."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        piece = self._token_texts.of(token_id)
        return piece if isinstance(piece, bytes) else piece.encode()

    def bytes_of_all(self, count: int) -> list[bytes]:
        """Return `token_bytes` of the first `count` ids."""
        pieces = map(self._token_texts.find, range(min(count, self.vocab_size)))
        texts = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
        return texts + [b""] * (count - len(texts))

    def new_stream(
        self,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        marks: Mapping[int, str] = NO_MARKS,
    ) -> Detokenizer:
        """Return an incremental decoder of the tokens after `prompt_ids`.

        Args:
            marks: token id -> text that replaces it, even if it is skipped.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        return Detokenizer(self._token_texts, prompt_ids, skipped, marks)


def check_unicode(text: str) -> None:
    """Raise ParamError if a prompt is no string, or UTF-8 cannot hold it: half a surrogate pair."""
    if not isinstance(text, str):
        raise ParamError("prompt", f"must be a string, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParamError(
            "prompt", f"must be valid Unicode; character {error.start} is half a surrogate pair"
        ) from None


def _cut(lengths: Sequence[int], limit: int) -> list[int]:
    """Return the kept lengths of one text or two, cutting the longer one first."""
    if sum(lengths) <= limit:
        return list(lengths)
    if len(lengths) == 1:
        return [limit]
    short = min(lengths)
    if 2 * short <= limit:
        return [short if length == short else limit - short for length in lengths]
    return [limit // 2, limit - limit // 2]


def _why_missing(folder: Path) -> str:
    if not folder.is_dir():
        return "the model folder does not exist"
    for name, subject in UNREAD.items():
        if (folder / name).is_file():
            return (
                f"is missing; {subject} not read: load the folder once with transformers' "
                "AutoTokenizer and save_pretrained() to get a tokenizer.json"
            )
    if (folder / "tekken.json").is_file():
        return "is missing; tekken.json alone is not read: take it from a model with that tokenizer"
    return "is missing from the model folder; without it prompts must be token ids"


def _read(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb", opener=regular) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from None
    if len(data) > limit:
        raise ModelError(path.name, f"must have at most {limit >> 20} MiB")
    return data


def _read_json(path: Path) -> Mapping[str, object]:
    """Read a JSON object; empty if there is no such file."""
    if not is_named(path):
        return {}
    data = _read(path, MAX_CONFIG_BYTES)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(path.name, f"is not JSON: {brief(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(path.name, "must be a JSON object")
    return value


def _token_name(field: str, *files: Mapping[str, object]) -> str | None:
    """Return a special token, given as a string or as an object with its content."""
    for file in files:
        value = file.get(field)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise ModelError(field, "must be a string or an object with a string `content`")
        if value:
            return value
    return None


def _find_template(folder: Path, config: Mapping[str, object]) -> str | None:
    """Return the chat template: from a separate file, or a field of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if is_named(path):
        return _read_text(path)
    value = _read_json(folder / "chat_template.json").get("chat_template")
    if value is None:
        value = config.get("chat_template")
    if isinstance(value, list):  # several named templates, for example for tool use
        named = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelError("chat_template", "must be a string or a list of named templates")
    return value


def read_template(file: str) -> str:
    """Return the chat template of a file.

    Raises:
        ConfigError: it cannot be read, is not text, or is empty.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError("chat_template", f"there is no file {shown(file)}")
    try:
        template = _read_text(path)
    except ModelError as error:
        raise ConfigError("chat_template", f"{shown(file)} {error.message}") from None
    if not template:
        raise ConfigError("chat_template", f"{shown(file)} is empty")
    return template


def _read_text(path: Path) -> str:
    try:
        return _read(path, MAX_TEMPLATE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ModelError(path.name, "must be UTF-8 text") from None


# Words in sampling parameters, as the token sequences that spell them.


def spelled(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the parameters with token ids in place of words; ids stay unchanged.

    A word becomes the tokens that the tokenizer gives. A model may still write it with other
    tokens, for example letter by letter.

    Raises:
        ParamError: there is a word and no tokenizer, or a word has no tokens.
    """
    kinds = {option.name: option.kind for option in WORDS}
    changes: dict[str, object] = {}
    for name, words in params.words.items():
        spellings: dict[tuple[int, ...], None] = {}  # in order, without duplicates
        for word in words:
            if not isinstance(word, str):
                spellings[word] = None
                continue
            if tokenizer is None:
                raise ParamError(name, "must be token ids: this model has no tokenizer")
            last = isinstance(kind := kinds[name], Words) and kind.last
            spellings.update(dict.fromkeys(_spellings(word, tokenizer, name, last=last)))
        changes[name] = tuple(spellings)
    return params.with_changes(**changes) if changes else params


def _spellings(word: str, tokenizer: Tokenizer, name: str, *, last: bool) -> list[tuple[int, ...]]:
    """Return the tokens of a word at the start of a line and after a space; or, with `last`, its
    last token inside a text."""
    bare = word.lstrip()
    texts = (f"a{word}",) if last else (bare, f" {bare}")
    spellings = [tuple(tokenizer.encode(text, False)) for text in texts]
    if not spellings[0]:
        raise ParamError(name, f"{word[:40]!r} has no tokens")
    return [ids[-1:] for ids in spellings] if last else spellings
