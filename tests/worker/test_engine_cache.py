"""The cache of engine folders: mapped weights give the same tokens as loaded ones, and an unusable
entry only costs a warning."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.optional_native import needs_native

from kvik import LLM, SamplingParams
from kvik.config.model_source import BUNDLED
from kvik.nn.parts import FreshStorage
from kvik.spec.engine_folder import MANIFEST, WEIGHTS, file_facts, verify
from kvik.worker import engine_cache
from kvik.worker.engine_cache import SOURCE

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def tokens(model: Path, cache: Path | None, **options: object) -> list[int]:
    """Return the tokens of a new engine."""
    if cache is not None:
        options["engine_cache"] = str(cache)
    with LLM(str(model), **options) as llm:
        (output,) = llm.generate(["Once upon a time"], GREEDY)
        return list(output.outputs[0].token_ids)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED, tmp_path / "model"))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the warnings since its last call."""

    def taken() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        caplog.clear()
        return [message for message in found if message.startswith("engine_cache: ")]

    return taken


def refuse_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*arguments: object) -> None:
        raise AssertionError("the weights were loaded again")

    monkeypatch.setattr(FreshStorage, "matrix", loads)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_second_start_maps_what_the_first_one_kept(
    model: Path, tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    expected = tokens(model, None, quantization=quantization)
    assert tokens(model, cache, quantization=quantization) == expected
    (entry,) = cache.iterdir()
    verify(entry)

    refuse_loads(monkeypatch)
    assert tokens(model, cache, quantization=quantization) == expected
    assert list(cache.iterdir()) == [entry]


GROUP = {"tensor_parallel_size": 2, "threads": 2}
STAGES = {"pipeline_parallel_size": 2, "threads": 2}


@needs_native
@pytest.mark.full
@pytest.mark.parametrize(
    "group",
    [
        pytest.param(GROUP, id="shares"),
        pytest.param(STAGES, id="stages", marks=pytest.mark.nightly),
    ],
)
def test_a_group_maps_what_its_first_process_has_written(
    group: dict[str, object],
    model: Path,
    tmp_path: Path,
    warnings: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is written whole, so that it also serves one process; a damaged entry is written again."""
    cache = tmp_path / "cache"
    expected = tokens(model, None)
    assert tokens(model, cache, **group) == expected
    (entry,) = cache.iterdir()
    verify(entry)
    a_tensor_is_missing(entry)
    assert not warnings()
    assert tokens(model, cache, **group) == expected
    (warning,) = warnings()
    assert "made again" in warning
    verify(entry)

    refuse_loads(monkeypatch)
    assert tokens(model, cache, **group) == expected
    assert tokens(model, cache) == expected
    assert not warnings() and list(cache.iterdir()) == [entry]


def test_other_options_and_other_files_have_entries_of_their_own(
    model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    tokens(model, cache)
    tokens(model, cache, quantization="int8")
    assert len(list(cache.iterdir())) == 2
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2:] = b"\0\0"  # of the same size
    weights.write_bytes(data)
    tokens(model, cache)
    assert len(list(cache.iterdir())) == 3


def cut(entry: Path) -> None:
    (entry / WEIGHTS).write_bytes((entry / WEIGHTS).read_bytes()[:-4096])


def no_manifest(entry: Path) -> None:
    (entry / MANIFEST).unlink()


def another_model(entry: Path) -> None:
    """A valid entry of other files."""
    source = json.loads((entry / SOURCE).read_text())
    source["files"]["model.safetensors"]["size"] += 1
    edit(entry, SOURCE, source)


def source_is_no_json(entry: Path) -> None:
    edit(entry, SOURCE, None)


def a_tensor_is_missing(entry: Path) -> None:
    manifest = json.loads((entry / MANIFEST).read_text())
    manifest["tensors"].popitem()
    (entry / MANIFEST).write_text(json.dumps(manifest))


def other_packing(entry: Path) -> None:
    manifest = json.loads((entry / MANIFEST).read_text())
    manifest["packing"] = "tiles-0"
    (entry / MANIFEST).write_text(json.dumps(manifest))


def edit(entry: Path, name: str, values: object) -> None:
    """Replace a file and its hash in the manifest; None: by invalid JSON."""
    (entry / name).write_text("{" if values is None else json.dumps(values))
    facts = file_facts(entry / name)
    manifest = json.loads((entry / MANIFEST).read_text())
    manifest["files"][name] = {"size": facts.size, "sha256": facts.sha256}
    (entry / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "damage",
    [cut, no_manifest, another_model, source_is_no_json, a_tensor_is_missing, other_packing],
)
def test_an_entry_that_cannot_be_used_is_made_again(
    model: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    warnings: Callable[[], list[str]],
) -> None:
    cache = tmp_path / "cache"
    expected = tokens(model, cache)
    (entry,) = cache.iterdir()
    damage(entry)
    assert not warnings()
    assert tokens(model, cache) == expected
    (warning,) = warnings()
    assert str(entry) in warning and "made again" in warning
    verify(entry)
    assert tokens(model, cache) == expected
    assert not warnings()


@pytest.mark.parametrize(
    "group",
    [
        pytest.param({}, id="one process"),
        pytest.param(GROUP, id="shares", marks=[needs_native, pytest.mark.full]),
    ],
)
def test_a_folder_that_cannot_be_written_only_warns(
    group: dict[str, object], model: Path, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert tokens(model, file, **group) == tokens(model, None)
    (warning,) = warnings()
    assert str(file) in warning and "cannot be written" in warning


def test_a_full_disk_only_warns_and_leaves_nothing(
    model: Path,
    tmp_path: Path,
    warnings: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(file: object, *arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(engine_cache, "write_weights", full)
    cache = tmp_path / "cache"
    assert tokens(model, cache) == tokens(model, None)
    (warning,) = warnings()
    assert "No space left on device" in warning
    assert list(cache.iterdir()) == []
