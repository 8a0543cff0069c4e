"""How authors would sample, there and back."""

from __future__ import annotations

from pathlib import Path

import gguf
from helpers.gguf_files import llama_file

from kvik.gguf.facts import KEYS, LAST_N, sampling_config, sampling_metadata
from kvik.gguf.reader import read_gguf

GENERAL = gguf.Keys.General


def test_keys_are_those_of_the_public_package() -> None:
    assert set(KEYS.values()) == {
        GENERAL.SAMPLING_TEMP,
        GENERAL.SAMPLING_TOP_K,
        GENERAL.SAMPLING_TOP_P,
        GENERAL.SAMPLING_MIN_P,
        GENERAL.SAMPLING_PENALTY_REPEAT,
    }
    assert LAST_N == GENERAL.SAMPLING_PENALTY_LAST_N


def test_there_and_back(tmp_path: Path) -> None:
    config = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    stored = sampling_metadata({**config, "max_new_tokens": 5})
    assert stored[LAST_N] == -1  # all of them, as kvik does
    file = read_gguf(llama_file(tmp_path / "m.gguf", values={**stored, LAST_N: 64}))
    assert sampling_config(file.metadata) == config
    assert sampling_metadata({}) == {}
    assert sampling_config(read_gguf(llama_file(tmp_path / "n.gguf")).metadata) == {}
