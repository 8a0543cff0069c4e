"""Configurations of well-known public models, so that they can be planned for without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

# What names of one configuration differ in: owner, maker, and what a model was tuned for.
_OWNER = re.compile(r".*/|^meta-")
_TUNED = re.compile(r"-(instruct|chat|base|hf|it)\b")


@cache
def public_configs() -> Mapping[str, Mapping[str, object]]:
    """Return what each config.json says that costs something, by a short name in lower case."""
    text = files("kvik.models").joinpath("public_configs.json").read_text(encoding="utf-8")
    configs: dict[str, dict[str, object]] = json.loads(text)
    return configs


def public_name(model: str) -> str | None:
    """Return the short name of a hub id or of a model as people call it; None: it is not known."""
    name = _TUNED.sub("", _OWNER.sub("", _OWNER.sub("", model.lower())))
    return name if name in public_configs() else None
