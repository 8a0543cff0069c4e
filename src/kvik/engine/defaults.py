"""Sampling defaults that a model's authors recommend, as generation_config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvik.core.sampling_params import PARAMETERS, SamplingParams
from kvik.errors import ModelError, ParamError
from kvik.spec.fields import read_json

FILE = "generation_config.json"
# Our name -> theirs.
_KEYS = {one.name: one.facts["stored"] for one in PARAMETERS.values() if one.facts["stored"]}


def read_default_params(folder: Path) -> SamplingParams:
    """What a request gets that asks for nothing: the file's values where it has them.

    Raises:
        ModelError: the file holds an impossible value.
    """
    if not (folder / FILE).exists():
        return SamplingParams()
    return default_params(read_json(folder / FILE), FILE)


def default_params(stored: Mapping[str, object], file: str) -> SamplingParams:
    """Of the parsed values of a file.

    Raises:
        ModelError: an impossible value.
    """
    given: dict[str, Any] = {
        ours: stored[key] for ours, key in _KEYS.items() if stored.get(key) is not None
    }
    if stored.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return SamplingParams().with_changes(**given)
    except ParamError as error:
        raise ModelError(file, f"{_KEYS[error.field]} {error.message}") from None
