"""The config.json files of public models, without keys that do not matter to the planner."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from kvik.planner.families import public_configs, shape_from_config
from kvik.planner.shape import ModelShape

FOLDER = Path(__file__).parents[1] / "planner"
NAMES = tuple(sorted(public_configs()))


def config(name: str) -> dict[str, Any]:
    """Return the config.json of a public model."""
    return deepcopy(dict(public_configs()[name]))


@cache
def public_shape(name: str) -> ModelShape:
    """Return the shape of a public model, cached: one with many experts takes half a second."""
    return shape_from_config(config(name), name)


def facts(file: str) -> dict[str, Any]:
    """Return the content of a JSON file next to the planner's tests."""
    return json.loads((FOLDER / file).read_text())
