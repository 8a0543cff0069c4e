"""How a model's authors would sample: `general.sampling` of a GGUF file, in the words of
generation_config.json, and back."""

from __future__ import annotations

from collections.abc import Mapping

from kvik.gguf.values import Metadata
from kvik.gguf.writer import Scalar

AT = "general.sampling"
# Theirs -> the key of a GGUF file.
KEYS: Mapping[str, str] = {
    "temperature": f"{AT}.temp",
    "top_k": f"{AT}.top_k",
    "top_p": f"{AT}.top_p",
    "min_p": f"{AT}.min_p",
    "repetition_penalty": f"{AT}.penalty_repeat",
}
LAST_N = f"{AT}.penalty_last_n"  # tokens that the penalty looks back at
ALL = -1


def sampling_config(metadata: Metadata) -> dict[str, object]:
    """What a file says, not yet checked."""
    return {theirs: metadata.raw(key) for theirs, key in KEYS.items() if key in metadata}


def sampling_metadata(config: Mapping[str, float | int]) -> dict[str, Scalar]:
    """The metadata of a generation_config.json, of which only known keys are taken."""
    found: dict[str, Scalar] = {
        KEYS[theirs]: value for theirs, value in config.items() if theirs in KEYS
    }
    return found | ({LAST_N: ALL} if KEYS["repetition_penalty"] in found else {})
