"""Reads everything but the weights from a model's folder or GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvik.config.model_source import DESCRIPTION, MODULE
from kvik.core.sampling_params import MIN_TEMPERATURE, PARAMETERS, SamplingParams
from kvik.errors import ModelError, ParamError
from kvik.files import is_gguf, is_named
from kvik.gguf.facts import MODEL_NAME, gguf_model_spec, model_config, sampling_config
from kvik.gguf.reader import read_gguf
from kvik.gguf.tokenizer import has_tokenizer, read_tokenizer
from kvik.models.model_spec import ModelSpec, read_model_spec
from kvik.spec.fields import read_json
from kvik.spec.pooling import MODULE_CONFIG, MODULES
from kvik.text.tokenizer import Tokenizer

# Sampling parameters that a model's authors recommend.
GENERATION_CONFIG = "generation_config.json"
POOLING = "1_Pooling"  # folder of a module of sentence-transformers
# Sampling parameter -> its name in that file.
_STORED = {one.name: one.facts["stored"] for one in PARAMETERS.values() if one.facts["stored"]}


class Folder:
    """A folder in Hugging Face format. Each method reads some of the files, and raises `ModelError`
    if they are invalid."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def name(self) -> str:
        """Return what the model is called: the folder's name, or what the GGUF file says."""
        return self._path.name

    def spec(self) -> ModelSpec:
        return read_model_spec(self._path)

    def has_tokenizer(self) -> bool:
        """Return whether there is a tokenizer; without one, prompts are token ids."""
        return is_named(self._path / "tokenizer.json")

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; if there is none, `ModelError` says what is missing."""
        return Tokenizer.load(self._path)

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters of requests that set none."""
        file = self._path / GENERATION_CONFIG
        return default_params(read_json(file), file.name) if is_named(file) else SamplingParams()

    def descriptions(self) -> dict[str, bytes]:
        """Return name -> content of the same files in Hugging Face format, without weights."""
        patterns = (*DESCRIPTION, MODULE)
        paths = {path for pattern in patterns for path in self._path.glob(pattern)}
        names = sorted(path.relative_to(self._path).as_posix() for path in paths if path.is_file())
        try:
            return {
                name: (self._path / name).read_bytes()
                for name in names
                if not name.endswith(".index.json")
            }
        except OSError as error:
            raise ModelError("model", f"cannot be read ({error.strerror})") from None


class Gguf:
    """A GGUF file; the methods are those of `Folder`."""

    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)

    def name(self) -> str:
        return self._file.metadata.string(MODEL_NAME, self._file.path.stem)

    def spec(self) -> ModelSpec:
        return gguf_model_spec(self._file)

    def has_tokenizer(self) -> bool:
        return has_tokenizer(self._file.metadata)

    def tokenizer(self) -> Tokenizer:
        stored = read_tokenizer(self._file.metadata)
        return Tokenizer(stored.library, stored.bos_token, stored.eos_token, stored.chat_template)

    def default_params(self) -> SamplingParams:
        return default_params(sampling_config(self._file.metadata), self._file.path.name)

    def descriptions(self) -> dict[str, bytes]:
        files = {"config.json": _as_json(model_config(self._file))}
        if sampling := sampling_config(self._file.metadata):
            files[GENERATION_CONFIG] = _as_json(sampling)
        if (pooling := self.spec().pooling) is not None:
            if pooling.scores:
                reason = "is a classifier in a GGUF file, which cannot be built: use its folder"
                raise ModelError("model", reason)
            modules = [("Transformer", ""), ("Pooling", POOLING)]
            files[MODULES] = _as_json([{"type": kind, "path": path} for kind, path in modules])
            mode = {"last": "lasttoken"}.get(pooling.kind, pooling.kind)
            files[f"{POOLING}/{MODULE_CONFIG}"] = _as_json({"pooling_mode": mode})
        if self.has_tokenizer():
            tokenizer = read_tokenizer(self._file.metadata)
            named = {
                "bos_token": tokenizer.bos_token,
                "eos_token": tokenizer.eos_token,
                "chat_template": tokenizer.chat_template,
            }
            files["tokenizer.json"] = tokenizer.library.to_str().encode()
            files["tokenizer_config.json"] = _as_json(
                {name: value for name, value in named.items() if value is not None}
            )
        return files


ModelFiles = Folder | Gguf


def model_files(path: Path) -> ModelFiles:
    """Return the files of a model at a path that `find_model` returned.

    Raises:
        ModelError: it is not a valid GGUF file.
    """
    return Gguf(path) if is_gguf(path) else Folder(path)


def _as_json(values: Mapping[str, object] | Sequence[object]) -> bytes:
    return json.dumps(values, indent=2, ensure_ascii=False).encode()


def default_params(stored: Mapping[str, object], file: str) -> SamplingParams:
    """Return sampling parameters from the parsed values of a file.

    Raises:
        ModelError: the file holds an impossible value.
    """
    params: dict[str, Any] = {
        ours: stored[key] for ours, key in _STORED.items() if stored.get(key) is not None
    }
    temperature = params.get("temperature")
    # Qwen2.5-VL has 1e-6, at which every other token has probability 0.
    nearly_greedy = isinstance(temperature, float) and 0 < temperature < MIN_TEMPERATURE
    if params.get("top_p") == 0:  # keeps only the likeliest token
        del params["top_p"]
        nearly_greedy = True
    if stored.get("do_sample") is False or nearly_greedy:
        params["temperature"] = 0.0
    if isinstance(top_k := params.get("top_k"), float) and top_k.is_integer():
        params["top_k"] = int(top_k)
    words, suppressed = params.get("bad_words", []), stored.get("suppress_tokens")
    if isinstance(words, list) and isinstance(suppressed, list):
        params["bad_words"] = [*words, *([token] for token in suppressed)]
    try:
        return SamplingParams().with_changes(**params)
    except ParamError as error:
        raise ModelError(file, f"{_STORED[error.field]} {error.message}") from None
