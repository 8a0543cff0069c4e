"""From what the user names to a folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from kvik.config.errors import ModelError
from kvik.config.model_source import BUNDLED, find_config, find_model, is_gguf


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hub that gives every model and records what is asked of it."""
    calls: list[dict[str, Any]] = []

    def download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        return "/cache/model"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_nothing_named_is_the_bundled_model() -> None:
    assert find_model("") == BUNDLED
    assert (BUNDLED / "config.json").is_file()


def test_a_folder_is_itself(tmp_path: Path, hub: list[Any]) -> None:
    assert find_model(str(tmp_path)) == tmp_path.resolve()
    assert not hub


def test_a_hub_id_fetches_only_data_files(hub: list[Any]) -> None:
    assert find_model("owner/model-1.5B") == Path("/cache/model")
    (call,) = hub
    assert call["repo_id"] == "owner/model-1.5B"
    assert "*.safetensors" in call["allow_patterns"]
    assert "consolidated*" in call["ignore_patterns"]  # a second copy of the weights
    assert not any(".bin" in p or ".py" in p or ".pt" in p for p in call["allow_patterns"])


def test_a_description_needs_no_weights(hub: list[Any]) -> None:
    find_model("owner/model", weights=False)
    (call,) = hub
    assert "*.json" in call["allow_patterns"]
    assert "*.safetensors" not in call["allow_patterns"]


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./nowhere", "a/b/c", "a b", "~nobody/x", "\0"]
)
def test_a_path_that_is_not_there_never_reaches_the_hub(name: str, hub: list[Any]) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        find_model(name)
    assert not hub


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelError, match=r"a folder, a .gguf file or a hub id.* is another file"):
        find_model(str(file))


def test_a_gguf_file_is_one(tmp_path: Path, hub: list[Any]) -> None:
    file = tmp_path / "model.GGUF"
    file.touch()
    assert find_model(str(file)) == file and is_gguf(file)
    link = tmp_path / "named.gguf"  # the hub's own cache has no names but of links
    link.symlink_to(file)
    assert find_model(str(link)) == link
    with pytest.raises(ModelError, match="there is no file '/"):
        find_model(str(tmp_path / "other.gguf"))
    with pytest.raises(ModelError, match=r"there is no file 'owner/model.gguf'"):
        find_model("owner/model.gguf")
    assert not hub


def test_a_folder_with_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert find_model(str(tmp_path)) == tmp_path.resolve() / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"name one of the 2 GGUF files .*: a.gguf, b.gguf"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").touch()  # then it is a folder in Hugging Face format
    assert find_model(str(tmp_path)) == tmp_path.resolve()
    named_like_one = tmp_path / "folder.gguf"
    named_like_one.mkdir()
    assert not is_gguf(find_model(str(named_like_one)))


def hub_error(kind: type[Exception], status: int) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "details with https://host/secret?token=1\nand lines")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (hub_error(errors.GatedRepoError, 403), "is gated"),
        (hub_error(errors.RepositoryNotFoundError, 404), "nor a public model on the hub"),
        (hub_error(errors.HfHubHTTPError, 500), "the hub refused it (500)"),
        (errors.LocalEntryNotFoundError("no\nnetwork"), "the hub cannot be reached"),
        (errors.HFValidationError("bad\nid"), "nor a valid hub id"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_a_hub_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, part: str
) -> None:
    def download(repo_id: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError) as caught:
        find_model("owner/model")
    assert part in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_is_a_file_or_stands_in_a_folder(tmp_path: Path, hub: list[Any]) -> None:
    file = tmp_path / "shape.json"
    file.touch()
    assert find_config(str(file)) == file
    assert find_config(str(tmp_path)) == tmp_path.resolve() / "config.json"
    assert find_config("") == BUNDLED / "config.json"
    assert not hub


def test_of_a_hub_id_a_config_alone_is_fetched(hub: list[Any]) -> None:
    assert find_config("owner/model") == Path("/cache/model/config.json")
    (call,) = hub
    assert call["allow_patterns"] == ["config.json"]


@pytest.mark.parametrize("name", ["a/b.json", "/no/such/folder", "a/b/c"])
def test_a_config_that_is_not_there_never_reaches_the_hub(name: str, hub: list[Any]) -> None:
    with pytest.raises(ModelError, match="there is no"):
        find_config(name)
    assert not hub
