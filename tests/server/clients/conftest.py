"""All routes on a real socket, for third-party programs."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
from helpers.story_site import site_fixture

site = site_fixture()


@pytest.fixture
def offline(tmp_path: object) -> Mapping[str, str]:
    """Return the environment of a program that must not access the network."""
    switches = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
    return {**os.environ, **dict.fromkeys(switches, "1"), "HF_HOME": f"{tmp_path}/hf"}
