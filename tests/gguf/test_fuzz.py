"""Files with any truncation or change are read, or refused in one clear line."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers.gguf_files import (
    ARRAY,
    F32,
    STRING,
    U8,
    array,
    directory,
    entry,
    llama_file,
    raw,
    string,
)
from helpers.tiers import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from kvik.errors import ModelError
from kvik.gguf.facts import model_config
from kvik.gguf.reader import read_gguf
from kvik.gguf.tokenizer import read_tokenizer
from kvik.models.model_spec import ModelSpec

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VALUES = {
    "gpt2": {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["<s>", "</s>", *ALPHABET, "ab", "abc", "[PAD]"],
        "tokenizer.ggml.token_type": [3, 3, *[1] * 256, 1, 1, 5],
        "tokenizer.ggml.merges": ["a b", "ab c"],
    },
    "llama": {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", *BYTES, "a", "b", "▁", "ab", "▁ab"],
        "tokenizer.ggml.token_type": [2, 3, *[6] * 256, *[1] * 5],
        "tokenizer.ggml.scores": [0.0] * 261 + [-1.0, -2.0],
    },
}
COMMON = {
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 2.0,
}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("fuzz")
    tensors = {"token_embd.weight": np.zeros((264, 32), np.float32)}
    made = {}
    for kind, values in VALUES.items():
        path = llama_file(folder / kind, values={**values, **COMMON}, tensors=tensors)
        made[kind] = path.read_bytes()
    return made


def use(path: Path) -> bool:
    """Read everything of a file; return whether it is valid."""
    try:
        file = read_gguf(path)
        ModelSpec.from_config(model_config(file))
        tokenizer = read_tokenizer(file.metadata)
        assert tokenizer.library.decode(tokenizer.library.encode("ab a <s>").ids) is not None
        return True
    except ModelError as error:
        assert "\n" not in str(error)
        return False


@pytest.mark.parametrize("kind", VALUES)
def test_the_unchanged_file_is_valid(files: dict[str, bytes], tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(files[kind])
    assert use(path)
    file = read_gguf(path)
    config = model_config(file)
    assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize("kind", VALUES)
def test_truncated_files_are_refused(files: dict[str, bytes], tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    data = files[kind]
    for length in [*range(0, 400), *range(400, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        assert not use(path), length


NUMBERS = st.sampled_from(
    [0, 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 1]
) | st.integers(0, 300)


@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(VALUES)),
    changes=st.lists(
        st.tuples(st.floats(0, 1), st.one_of(NUMBERS, st.binary(min_size=1, max_size=12))),
        min_size=1,
        max_size=4,
    ),
)
def test_any_change_is_valid_or_an_error(
    files: dict[str, bytes],
    tmp_path: Path,
    kind: str,
    changes: list[tuple[float, int | bytes]],
) -> None:
    data = bytearray(files[kind])
    head = len(data) - 264 * 32 * 4
    for place, change in changes:
        new = struct.pack("<Q", change) if isinstance(change, int) else change
        at = int(place * (head - 1))
        data[at : at + len(new)] = new
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    use(path)


@pytest.mark.parametrize("kind", VALUES)
def test_every_length_and_count_made_hostile(
    files: dict[str, bytes], tmp_path: Path, kind: str
) -> None:
    """Each 32-bit number of the first part of the header in turn, where all kinds of fields are."""
    path = tmp_path / "model.gguf"
    data = files[kind]
    start = data.index(b"tokenizer.ggml.tokens")
    for at in [*range(4, 200), *range(start - 8, start + 120)]:
        for value in (0, 2**31, 2**32 - 1):
            path.write_bytes(data[:at] + struct.pack("<I", value) + data[at + 4 :])
            use(path)


@pytest.mark.full
def test_a_megabyte_never_needs_sixty_four(tmp_path: Path) -> None:
    """Headers of a megabyte with the most objects: short strings, numbers, entries, tensors."""
    size = 1 << 20
    words = b"".join(string(f"{index:x}") for index in range(size // 13))
    floats = entry("tokenizer.ggml.scores", ARRAY, array(F32, size // 4, bytes(size)))
    model = entry("tokenizer.ggml.model", STRING, string("llama"))
    tokens = entry("tokenizer.ggml.tokens", ARRAY, array(STRING, size // 13, words))
    text = "abcdefghijklmnopqrstuvwxyz0123456789"
    runs = dict.fromkeys(
        word[first:last]
        for word in (text[turn:] + text[:turn] for turn in range(36))
        for first in range(36)
        for last in range(first + 1, 37)
    )
    parts = array(STRING, len(runs), b"".join(map(string, runs)))
    scores = array(F32, len(runs), bytes(4 * len(runs)))
    heads = {
        "words": raw([model, tokens]),
        "numbers": raw([model, floats]),
        "entries": raw([entry(f"{index:05x}", U8, b"\x01") for index in range(size // 18)]),
        "tensors": raw([], [directory(f"{i:x}", [1]) for i in range(size // 37)], data=64),
        "pieces": raw(
            [
                model,
                entry("tokenizer.ggml.tokens", ARRAY, parts),
                entry("tokenizer.ggml.scores", ARRAY, scores),
            ]
        ),
    }
    for name, data in heads.items():
        path = tmp_path / name
        path.write_bytes(data)
        assert len(data) < 1.3 * size
        tracemalloc.start()
        use(path)
        with contextlib.suppress(ModelError):
            read_tokenizer(read_gguf(path).metadata)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 20, name
