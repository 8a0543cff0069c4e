"""Validated reading of JSON files: every error names the file and the field."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvik.errors import ModelError, shown
from kvik.files import SAFETENSORS, SAFETENSORS_INDEX, is_named, regular
from kvik.options import Flag, Integer, Kind, Number, OneOf, Text

MAX_JSON_BYTES = 32 << 20  # far above any real config or shard index
# Larger sizes of a model are errors or attacks.
MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 576  # channels of a head; no family has more than 512, and latent vectors have 576


def read_json(path: Path) -> dict[str, object]:
    """Return the object in a JSON file.

    Raises:
        ModelError: the file is missing, unreadable, too large, or holds no JSON object.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        problem = "is a link to a missing file" if is_named(path) else "is missing"
        raise ModelError(path.name, f"{problem} in {str(path.parent)!r}") from None
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from None
    if len(data) > MAX_JSON_BYTES:
        raise ModelError(path.name, f"must have at most {MAX_JSON_BYTES} bytes")
    try:
        values = json.loads(data.decode("utf-8"))
    except (RecursionError, ValueError):
        raise ModelError(path.name, "is not valid JSON") from None
    if not isinstance(values, dict):
        raise ModelError(path.name, f"must hold a JSON object, not {shown(values)}")
    return values


def tensor_names(folder: Path) -> Iterator[str]:
    """Yield the names of a folder's tensors, without checking the files; none if there are none."""
    index, single = folder / SAFETENSORS_INDEX, folder / SAFETENSORS
    if single.exists():
        yield from _tensor_entries(single)
    elif index.exists():
        yield from Fields(read_json(index), index.name).mapping("weight_map") or ()


def float_dtype(folder: Path) -> str | None:
    """Return the dtype of most float numbers in the first file of a folder's tensors: "float32",
    "float16" or "bfloat16"; None: there are none."""
    single = folder / SAFETENSORS
    file = single if single.exists() else min(folder.glob("*.safetensors"), default=single)
    numbers: Counter[str] = Counter()
    for entry in _tensor_entries(file).values():
        stored = Fields(entry if isinstance(entry, dict) else {}, file.name)
        dtype, shape = stored.raw("dtype"), stored.raw("shape")
        sizes = [n for n in shape if type(n) is int] if isinstance(shape, list) else []
        if isinstance(dtype, str) and dtype in _FLOAT_CODES:
            numbers[_FLOAT_CODES[dtype]] += math.prod(sizes)
    return max(numbers, key=lambda dtype: numbers[dtype], default=None)


_FLOAT_CODES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _tensor_entries(file: Path) -> dict[str, object]:
    """Return the header of a file of tensors; {} if it cannot be read, as opening the checkpoint
    will say why."""
    try:
        with open(file, "rb", opener=regular) as opened:
            header = opened.read(min(int.from_bytes(opened.read(8), "little"), MAX_JSON_BYTES))
        entries = json.loads(header)
    except (OSError, RecursionError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


ANY_TEXT = Text("a text", ".*")


class Fields:
    """Checked access to a JSON object. A key with the value null counts as absent.

    Every reader returns the default for an absent key, and raises `ModelError` if there is no
    default or the value is invalid.

    Args:
        where: name of the object in errors.
        names: keys -> their names in the object, if they differ.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        where: str = "config.json",
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._values = values
        self.where = where
        self._names = names

    def __contains__(self, key: str) -> bool:
        return self.raw(key) is not None

    def is_null(self, key: str) -> bool:
        """Return whether the key is present with the value null."""
        return self._name(key) in self._values and self.raw(key) is None

    def raw(self, key: str) -> object:
        return self._values.get(self._name(key))

    def error(self, key: str, message: str) -> ModelError:
        return ModelError(f"{self.where} {self._name(key)}", message)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value: int = self._checked(key, Integer(low, high), default)
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        return float(self._checked(key, Number(low, high), default))

    def boolean(self, key: str, default: bool) -> bool:
        value: bool = self._checked(key, Flag(), default)
        return value

    def text(self, key: str, kind: Text = ANY_TEXT) -> str:
        value: str = self._checked(key, kind, None)
        return value

    def choice(self, key: str, allowed: Collection[str], default: str | None = None) -> str:
        value: str = self._checked(key, OneOf(tuple(allowed)), default)
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; () if absent."""
        value = self._get(key, ())
        if not isinstance(value, list | tuple) or not all(isinstance(s, str) for s in value):
            raise self.error(key, f"must be a list of strings, not {shown(value)}")
        return tuple(value)

    def numbers(self, key: str, low: float, high: float) -> tuple[float, ...]:
        """Return a list of at least one number."""
        values = self._get(key, None)
        kind = Number(low, high)
        if not isinstance(values, list | tuple) or not values:
            raise self.error(key, f"must be a list of numbers, not {shown(values)}")
        try:
            numbers: tuple[Any, ...] = tuple(kind.checked(value) for value in values)
            return tuple(map(float, numbers))
        except ValueError as bad:
            raise self.error(key, str(bad)) from None

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids of a list or of a single id; () if absent."""
        value = self._get(key, ())
        ids: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
        good: dict[int, None] = {}  # keeps the order, drops duplicates
        for token in ids:
            is_int = isinstance(token, int) and not isinstance(token, bool)
            if not is_int or not 0 <= token < vocab_size:
                raise self.error(
                    key, f"must hold token ids in [0, {vocab_size - 1}], not {shown(token)}"
                )
            good[token] = None
        return tuple(good)

    def mapping(self, key: str) -> Mapping[str, object] | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, not {shown(value)}")
        return value

    def inside(self, key: str) -> Fields:
        """Return the fields of an object within this one; no fields if it is absent."""
        return Fields(self.mapping(key) or {}, f"{self.where} {key}")

    def changed(self, values: Mapping[str, object]) -> Fields:
        """Return the same fields with some values replaced."""
        named = {self._name(key): value for key, value in values.items()}
        return Fields({**self._values, **named}, self.where, self._names)

    def named(self, names: Mapping[str, str]) -> Fields:
        """Return the same fields, some of which have other names in the object."""
        return Fields(self._values, self.where, {**self._names, **names})

    def _name(self, key: str) -> str:
        return self._names.get(key, key)

    def _checked(self, key: str, kind: Kind, default: object) -> Any:
        try:
            return kind.checked(self._get(key, default))
        except ModelError:
            raise
        except ValueError as bad:
            raise self.error(key, str(bad)) from None

    def _get(self, key: str, default: object) -> Any:
        value = self.raw(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, "is missing")
        return default
