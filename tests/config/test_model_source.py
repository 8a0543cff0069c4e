"""From the user's name of a model to a folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from kvik.config.model_source import BUNDLED, find_adapter, find_config, find_model, model_name
from kvik.errors import ConfigError, ModelError
from kvik.files import gguf_parts, is_gguf

Answers = dict[str, Any]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Provide a hub that has every model and records requests; its cache is empty."""
    calls: list[dict[str, Any]] = []

    def download(repo_id: str, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not in the cache")
        calls.append({"repo_id": repo_id, **options})
        (tmp_path / "cached").mkdir(exist_ok=True)
        return str(tmp_path / "cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: [])
    return calls


GGUF_FILES = [
    *("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.q8_0.gguf", "m-UD-Q4_K_XL.gguf", "mmproj-F16.gguf"),
    *("BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf", "imatrix-Q6_K.gguf"),
    *("README.md", "a-Q2_K.gguf", "b-Q2_K.gguf"),
]


@pytest.fixture
def gguf_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Provide a hub whose models have these files, and return the folder of its cache."""

    def download(repo_id: str, *, local_files_only: bool = False, **options: Any) -> str:
        patterns = {name: options[name] for name in ("allow_patterns", "ignore_patterns")}
        for name in () if local_files_only else filter_repo_objects(GGUF_FILES, **patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: GGUF_FILES)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q4_k_s", ["m-Q4_K_S.gguf"]),
        ("Q8_0", ["m.q8_0.gguf"]),
        ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("BF16", GGUF_FILES[5:7]),
    ],
)
def test_a_gguf_file_of_the_hub_by_its_type(kind: str, files: list[str], gguf_hub: Path) -> None:
    found = find_model(f"owner/m-GGUF:{kind}")
    assert found == find_config(f"owner/m-GGUF:{kind}") == gguf_hub / files[0]
    assert [gguf_hub / name for name in files] == gguf_parts(found)
    (gguf_hub / "mmproj-F16.gguf").touch()  # by another program
    assert find_model(str(found.parent)) == found
    (gguf_hub / "mmproj-F16.gguf").unlink()
    assert {path.name for path in gguf_hub.rglob("*.gguf")} == {Path(name).name for name in files}


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("o/m:Q5_K_M", r"no GGUF file of type 'Q5_K_M' \(it has BF16, Q2_K, Q4_K_M, Q4_K_S, UD-Q4"),
        ("o/m:F16", "no GGUF file of type 'F16'"),
        ("o/m:Q2_K", "several files of type Q2_K: a-Q2_K.gguf, b-Q2_K.gguf"),
        ("o/m", "has GGUF files: name one by its type, as in o/m:Q4_K_M"),
        ("o/m:", "no folder"),
    ],
)
def test_a_type_that_the_hub_does_not_have_once(model: str, part: str, gguf_hub: Path) -> None:
    refused(lambda: find_model(model), part)


def test_the_default_is_the_bundled_model() -> None:
    assert find_model("") == BUNDLED
    assert (BUNDLED / "config.json").is_file()


def test_a_folder_is_itself(tmp_path: Path, hub: list[Any]) -> None:
    assert find_model(str(tmp_path)) == tmp_path.resolve()
    assert not hub


def test_an_adapter_is_a_folder_or_a_hub_id(hub: list[Any], tmp_path: Path) -> None:
    assert find_adapter("lora", str(tmp_path)) == tmp_path and not hub
    assert find_adapter("lora", "owner/adapter") == tmp_path / "cached"
    assert hub[0]["allow_patterns"] == ["adapter_config.json", "adapter_model.safetensors"]
    with pytest.raises(ConfigError, match="lora: there is no folder"):
        find_adapter("lora", str(tmp_path / "no-adapter"))


def test_a_hub_id_fetches_only_data_files(hub: list[Any], tmp_path: Path) -> None:
    assert find_model("owner/model-1.5B") == tmp_path / "cached"
    (call,) = hub
    assert call["repo_id"] == "owner/model-1.5B"
    assert "*.safetensors" in call["allow_patterns"]
    names = ["config.json", "1_Pooling/config.json", "2_Dense/model.safetensors"]
    others = ["consolidated.safetensors", "onnx/model.json", "1_a/b/config.json"]
    taken = filter_repo_objects(
        [*names, *others],
        allow_patterns=call["allow_patterns"],
        ignore_patterns=call["ignore_patterns"],
    )
    assert list(taken) == names  # no second copy of the weights
    assert not any(".bin" in p or ".py" in p or ".pt" in p for p in call["allow_patterns"])


def test_a_process_asks_the_hub_once_for_a_model(hub: list[Any]) -> None:
    for revision in (None, None, "v1.0", None):
        find_model("owner/model", revision=revision)
    assert [call["revision"] for call in hub] == [None, "v1.0"]


def test_a_model_that_has_been_deleted_is_downloaded_again(hub: list[Any]) -> None:
    find_model("owner/model").rmdir()
    assert find_model("owner/model").is_dir()
    assert len(hub) == 2


def test_a_description_needs_no_weights(hub: list[Any]) -> None:
    find_model("owner/model", weights=False)
    (call,) = hub
    assert "*.json" in call["allow_patterns"]
    assert "*.safetensors" not in call["allow_patterns"]


def test_a_revision_is_for_the_hub(hub: list[Any], tmp_path: Path) -> None:
    find_model("owner/model", revision="v1.0")
    assert hub[0]["revision"] == "v1.0"
    for here in (str(tmp_path), ""):
        with pytest.raises(ConfigError, match="^revision: is for models of the hub"):
            find_model(here, revision="v1.0")


def test_a_revision_that_the_hub_does_not_have(answers: Answers) -> None:
    answers |= {"status": 404, "error": {"X-Error-Code": "RevisionNotFound"}}
    with pytest.raises(
        ConfigError, match="^revision: 'v9' is not a branch, tag or commit of owner/m"
    ):
        find_model("owner/model", revision="v9")


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./nowhere", "a/b/c", "a b", "~nobody/x", "\0"]
)
def test_a_missing_path_never_reaches_the_hub(name: str, hub: list[Any]) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        find_model(name)
    assert not hub


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelError, match=r"a folder, a .gguf file or a hub id.* is another file"):
        find_model(str(file))


def test_a_gguf_file_is_a_model(tmp_path: Path, hub: list[Any]) -> None:
    file = tmp_path / "model.GGUF"
    file.touch()
    assert find_model(str(file)) == file and is_gguf(file)
    link = tmp_path / "named.gguf"  # in the hub's cache, only links have names
    link.symlink_to(file)
    assert find_model(str(link)) == link
    with pytest.raises(ModelError, match="there is no file '/"):
        find_model(str(tmp_path / "other.gguf"))
    with pytest.raises(ModelError, match=r"there is no file 'owner/model.gguf'"):
        find_model("owner/model.gguf")
    assert not hub


def test_a_link_to_a_folder_names_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "snapshots" / "4f7e"
    folder.mkdir(parents=True)
    (tmp_path / "prod").symlink_to(folder)
    (tmp_path / "links").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("prod", "./prod/", f"{tmp_path}/links/prod"):
        assert find_model(name) == tmp_path.resolve() / "prod", name
        assert model_name(find_model(name)) == "prod"
    monkeypatch.chdir("prod")
    assert find_model(".") == folder.resolve()


def test_a_folder_with_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert find_model(str(tmp_path)) == tmp_path.resolve() / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"name one of the 2 GGUF files .*: a.gguf, b.gguf"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").touch()  # then the folder is in Hugging Face format
    assert find_model(str(tmp_path)) == tmp_path.resolve()
    named_like_one = tmp_path / "folder.gguf"
    named_like_one.mkdir()
    assert not is_gguf(find_model(str(named_like_one)))


@pytest.mark.parametrize("name", ["models/qwen", "model.safetensors", "owner/m.SAFETENSORS"])
def test_names_that_look_like_paths_are_not_downloaded(
    name: str, hub: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    for find in (find_model, find_config):
        with pytest.raises(ModelError, match=f"there is no (file|folder) '{name}'"):
            find(name)
    assert not hub


def test_a_mistyped_path_gets_a_suggestion(tmp_path: Path, hub: list[Any]) -> None:
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "model-Q4.gguf").touch()
    for wrong, right in (("Qwen-0.6B", "Qwen3-0.6B"), ("model-Q3.gguf", "model-Q4.gguf")):
        with pytest.raises(ModelError, match=f"; did you mean {right}\\?$"):
            find_model(str(tmp_path / wrong))
    with pytest.raises(ModelError, match="there is no folder '[^;]*$"):
        find_model(str(tmp_path / "nothing-like-it"))


def test_model_names_come_from_their_paths() -> None:
    assert model_name(BUNDLED) == "stories"
    assert model_name(Path("/m/story.gguf")) == "story.gguf"
    cached = Path("/cache/models--Qwen--Qwen3-0.6B/snapshots/5fb1d2c0")
    assert model_name(cached) == "Qwen/Qwen3-0.6B"


def test_a_download_is_announced(hub: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    find_model("owner/model")
    captured = capsys.readouterr()
    assert captured.err == "kvik: downloading owner/model from the hub\n"
    assert captured.out == ""


def test_a_cached_model_is_not_announced_as_a_download(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: "/cache/model")
    find_model("owner/model")
    assert capsys.readouterr().err == ""


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Answers]:
    """Provide a hub over HTTP that gives the same answer to all requests: `status`, and headers of
    `error`."""
    answers: Answers = {"status": 200, "error": {}}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers["status"])
            for name, value in answers["error"].items():
                self.send_header(name, value)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, args=(0.01,))
    serving.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        yield answers
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "part"),
    [
        (401, "GatedRepo", "is gated: .*HF_TOKEN"),
        (403, "GatedRepo", "is gated: .*HF_TOKEN"),
        (401, "RepoNotFound", "nor a public model on the hub.*HF_TOKEN"),
        (404, "RepoNotFound", "nor a public model on the hub"),
        (404, None, "nor a model on the hub"),
        (403, None, r"needs a token .*HF_TOKEN.*\(the hub answers 403\)"),
        (429, None, "the hub limits requests"),
        (500, None, r"the hub failed \(500\); try again"),
        (503, None, r"the hub failed \(503\); try again"),
        (418, None, r"the hub refused it \(418\)"),
    ],
)
def test_errors_of_the_hub_are_reported(
    status: int, code: str | None, part: str, answers: Answers
) -> None:
    answers |= {"status": status, "error": {"X-Error-Code": code} if code else {}}
    refused(lambda: find_model("owner/model"), part)


def test_an_unreachable_hub_is_reported(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: no listener
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    refused(lambda: find_model("owner/model"), "the hub cannot be reached: check the network")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(lambda: find_model("owner/model"), "HF_HUB_OFFLINE forbids a download")


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (errors.LocalEntryNotFoundError("no\nnetwork"), "the hub cannot be reached"),
        (errors.HFValidationError("bad\nid"), "nor a valid hub id"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(13, "Permission denied", "/.cache"), "Permission denied: '/.cache'; set HF_HOME"),
        (RuntimeError("Could not determine\nhome directory."), "could not be downloaded"),
    ],
)
def test_a_download_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, part: str
) -> None:
    def download(repo_id: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    refused(lambda: find_model("owner/model"), part)


def refused(find: Callable[[], Path], part: str) -> None:
    with pytest.raises(ModelError, match=part) as caught:
        find()
    assert "127.0.0.1" not in str(caught.value)  # nor a signed address of a file
    assert "\n" not in str(caught.value)


def test_a_config_is_a_file_or_in_a_folder(tmp_path: Path, hub: list[Any]) -> None:
    file = tmp_path / "shape.json"
    file.touch()
    assert find_config(str(file)) == file
    assert find_config(str(tmp_path)) == tmp_path.resolve() / "config.json"
    assert find_config("") == BUNDLED / "config.json"
    assert not hub


def test_only_the_config_of_a_hub_id_is_fetched(hub: list[Any], tmp_path: Path) -> None:
    assert find_config("owner/model") == tmp_path / "cached" / "config.json"
    (call,) = hub
    assert call["allow_patterns"] == ["config.json"]


@pytest.mark.parametrize("name", ["a/b.json", "/no/such/folder", "a/b/c", "a b", "\0"])
def test_a_missing_config_never_reaches_the_hub(name: str, hub: list[Any]) -> None:
    with pytest.raises(ModelError, match="there is no"):
        find_config(name)
    assert not hub
