"""Find the files of a `MODEL`: the bundled model, a folder, a GGUF file, or a hub id.

After a hub id may stand the type of a GGUF file, as for llama.cpp: owner/name:Q4_K_M.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from kvik.errors import ConfigError, ModelError, shown
from kvik.files import ADAPTER_FILES, GGUF, gguf_parts, is_gguf
from kvik.options import did_you_mean
from kvik.spec.adapters import ADAPTER_NAME, Adapter

BUNDLED = Path(__file__).parents[1] / "bundled" / "stories"

CONFIG = "config.json"
FILES = (GGUF, ".safetensors", ".json")  # endings that no hub id has
MAX_LISTED = 4  # files named in an error
# Only files that kvik reads. Pickles and code are never fetched.
DESCRIPTION = ("*.json", "*.jinja", "merges.txt")
WEIGHTS = ("*.safetensors",)
# A sentence-transformers module, which has its own folder.
MODULE = "[0-9]*_*/config.json"
# Other subfolders, and Mistral's second copy of the weights under different names.
IGNORED = ("[!0-9]*/*", "*/*/*", "consolidated*")
HUB_ID = re.compile(r"[\w][\w.-]{0,95}(/[\w][\w.-]{0,95})?")
HUB_GGUF = re.compile(rf"({HUB_ID.pattern}):([\w.-]{{1,32}})")
USUAL_TYPE = "Q4_K_M"
NO_MODELS = ("mmproj*", "*/mmproj*", "*imatrix*")  # GGUF files of encoders and of statistics
TYPE = re.compile(
    r"(?:.*?[-._])?((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32))(?:-\d+-of-\d+)?\.gguf", re.I
)


def names_model(word: str) -> bool:
    """Return whether a text is a model name rather than a prompt: it names a local file or folder,
    or is one word that has a "/", begins with "~", or ends like a model file."""
    if os.path.exists(os.path.expanduser(word)):
        return True
    if len(word.split()) != 1:
        return False
    return "/" in word or word.startswith("~") or word.lower().endswith(FILES)


def find_model(model: str, *, weights: bool = True, revision: str | None = None) -> Path:
    """Return the folder of a model, or its GGUF file, which a folder without config.json may hold;
    a hub id is downloaded into the hub's own cache first, once in a process.

    Args:
        weights: if False, only the description is downloaded, not the weights.
        revision: branch, tag or commit on the hub.

    Raises:
        ModelError: there is no such folder or file, or the hub does not provide it.
        ConfigError: a revision of a model that is not from the hub.
    """
    path = os.path.expanduser(model)  # os.path accepts names that cannot be paths
    if revision is not None and (not model or os.path.exists(path)):
        problem = (
            f"{shown(model)} is a file or folder here" if model else "the bundled model has none"
        )
        raise ConfigError("revision", f"is for models of the hub; {problem}")
    if not model:
        return BUNDLED
    if os.path.isdir(path):
        folder = Path(path)
        named = folder.parent.resolve() / folder.name  # not resolved: a link keeps its name
        return _in_folder(named if folder.is_symlink() else folder.resolve())
    if os.path.exists(path):
        if os.path.isfile(path) and is_gguf(Path(path)):
            return Path(path).absolute()  # not resolved: a link keeps its name
        problem = f"must be a folder, a {GGUF} file or a hub id; {shown(model)} is another file"
        raise ModelError("model", problem)
    if of_type := HUB_GGUF.fullmatch(model):
        return _hub_gguf(of_type[1], of_type[3], revision)
    folder = _download(model, DESCRIPTION + (WEIGHTS if weights else ()), revision)
    if not (folder / CONFIG).exists() and (types := _hub_types(model, revision)):
        best = USUAL_TYPE if USUAL_TYPE in types else types[0]
        problem = f"{shown(model)} has GGUF files: name one by its type, as in {model}:{best}"
        raise ModelError("model", f"{problem} (of {', '.join(types)})")
    return folder


def model_name(path: Path) -> str:
    """Return the name of a model whose files are at a path that `find_model` gave: its hub id if
    they are in the hub's cache, else that of the folder or file."""
    if path.parent.name == "snapshots":  # .../models--owner--name/snapshots/<commit>
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def _in_folder(folder: Path) -> Path:
    if (folder / CONFIG).exists():
        return folder
    every = {path for path in folder.iterdir() if is_gguf(path) and _is_model(path.name)}
    files = sorted(every - {other for path in every for other in gguf_parts(path)[1:]})
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:MAX_LISTED])
        raise ModelError("model", f"name one of the {len(files)} GGUF files of the folder: {names}")
    return files[0] if files else folder


def _hub_gguf(hub_id: str, kind: str, revision: str | None) -> Path:
    """Return the GGUF file of a type, its first part if it has several."""
    spellings = {kind, kind.upper(), kind.lower()}
    ends = (f"{name}{end}" for name in spellings for end in (GGUF, f"-*-of-*{GGUF}"))
    patterns = tuple(pattern for end in ends for pattern in (end, f"*[-._/]{end}"))
    folder = _download(hub_id, patterns, revision, NO_MODELS)
    name = re.compile(rf"(.*[-._])?{re.escape(kind)}(-0*1-of-\d+)?\.gguf", re.I)
    files = sorted(path for path in folder.rglob("*") if name.fullmatch(path.name))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(str(path.relative_to(folder)) for path in files[:MAX_LISTED])
        raise ModelError("model", f"{shown(hub_id)} has several files of type {kind}: {names}")
    types = _hub_types(hub_id, revision)
    known = f" (it has {', '.join(types)})" if types else ""
    raise ModelError("model", f"{shown(hub_id)} has no GGUF file of type {shown(kind)}{known}")


def _hub_types(hub_id: str, revision: str | None) -> list[str]:
    """Return the types of the GGUF files that the hub has of a model, for an error message; none if
    it does not answer."""
    import huggingface_hub

    try:
        names = huggingface_hub.list_repo_files(hub_id, revision=revision)
    except Exception:  # of the hub's library, or of the HTTP library below it
        return []
    typed = (TYPE.fullmatch(os.path.basename(name)) for name in filter(_is_model, names))
    return sorted({match[1] for match in typed if match})


def _is_model(name: str) -> bool:
    return not any(fnmatch(name, pattern) for pattern in NO_MODELS)


def find_adapter(option: str, adapter: str) -> Path:
    """Return the folder of a LoRA adapter that an option names; a hub id is downloaded first.

    Raises:
        ConfigError: there is no such folder, or the hub does not provide it.
    """
    path = os.path.expanduser(adapter)
    if os.path.isdir(path):
        return Path(path).absolute()
    try:
        return _download(adapter, ADAPTER_FILES)
    except ModelError as error:
        raise ConfigError(option, error.message) from None


def read_adapter(name: str, adapter: str) -> Adapter:
    """Return an adapter from which requests choose; see `find_adapter`.

    Raises:
        ConfigError: the name is none, or `find_adapter` raises it.
        ModelError: a file cannot be read.
    """
    if not re.fullmatch(ADAPTER_NAME, name):
        raise ConfigError("name", f"must be 1 to 256 characters without '=', not {shown(name)}")
    return Adapter.read(name, find_adapter("adapters", adapter))


def find_config(model: str) -> Path:
    """Return the config.json of a model: a file named itself, one in a folder, or the hub's, alone;
    or a GGUF file, which says the same.

    Raises:
        ModelError: there is no such file or folder, or the hub does not give it.
    """
    path = os.path.expanduser(model)
    if os.path.isfile(path):
        return Path(path).absolute()  # not resolved: a link keeps its name
    if not model or os.path.exists(path) or HUB_GGUF.fullmatch(model):
        path_of_model = find_model(model, weights=False)
        return path_of_model if is_gguf(path_of_model) else path_of_model / CONFIG
    return _download(model, (CONFIG,)) / CONFIG


def _download(
    hub_id: str,
    files: tuple[str, ...],
    revision: str | None = None,
    ignored: tuple[str, ...] = IGNORED,
) -> Path:
    if hub_id.lower().endswith(FILES):
        raise ModelError("model", f"there is no file {shown(hub_id)}{_nearest(hub_id)}")
    if not HUB_ID.fullmatch(hub_id):
        raise ModelError("model", f"there is no folder {shown(hub_id)}{_nearest(hub_id)}")
    owner = os.path.dirname(hub_id)
    if owner and os.path.isdir(owner):  # a mistyped folder must not become a download
        problem = f"there is no folder {shown(hub_id)}; {owner!r} is a folder, so it is no hub id"
        raise ModelError("model", problem + _nearest(hub_id))

    # Imported late: it is slow, and most runs name a folder.
    import huggingface_hub
    from huggingface_hub import errors

    # The exception of a broken connection belongs to the underlying HTTP library, which differs
    # between versions.
    http_error: Any = errors.HfHubHTTPError.__bases__[0]
    ask = partial(_snapshot, huggingface_hub.snapshot_download, hub_id, files, ignored, revision)
    try:
        if not (folder := ask()).exists():  # deleted since this process asked
            _snapshot.cache_clear()
            folder = ask()
        return folder
    except errors.HFValidationError:
        reason = "is neither a folder here nor a valid hub id"
    except (OSError, http_error) as error:
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
        if revision is not None and isinstance(cause, errors.RevisionNotFoundError):
            message = f"{shown(revision)} is not a branch, tag or commit of {hub_id}"
            raise ConfigError("revision", message) from None
        reason = _hub_reason(error)
    except RuntimeError as error:  # of pathlib, if there is no home, or of hf_xet
        reason = f"could not be downloaded ({shown(str(error))})"
    raise ModelError("model", f"{shown(hub_id)} {reason}")


@lru_cache  # commands check a model before they load it, and must not get another commit then
def _snapshot(
    download: Callable[..., str],
    hub_id: str,
    files: tuple[str, ...],
    ignored: tuple[str, ...],
    revision: str | None,
) -> Path:
    from huggingface_hub.errors import LocalEntryNotFoundError

    take = partial(
        download,
        hub_id,
        revision=revision,
        allow_patterns=list(files),
        ignore_patterns=list(ignored),
    )
    try:
        take(local_files_only=True)
    except LocalEntryNotFoundError:
        print(f"kvik: downloading {hub_id} from the hub", file=sys.stderr)
    return Path(take())


def _nearest(path: str) -> str:
    """Return the end of an error message that suggests an existing path with a similar name, or
    ""."""
    folder, name = os.path.split(os.path.expanduser(path).rstrip("/"))
    try:
        names = os.listdir(folder or ".")
    except (OSError, ValueError):
        return ""
    hint = did_you_mean(name, names)
    return f"; {hint}" if hint else ""


def _hub_reason(error: Exception) -> str:
    """Return the reason why the hub did not provide a model, from an error of `huggingface_hub`."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the actual reason
    if isinstance(error, errors.GatedRepoError):
        return "is gated: accept its terms on the hub, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "is neither a folder here nor a public model on the hub; a private one needs HF_TOKEN"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"needs a token that may read it: set HF_TOKEN (the hub answers {status})"
        if status == 404:
            return "is neither a folder here nor a model on the hub"
        if status == 429:
            return "cannot be downloaded now: the hub limits requests (429); wait, or set HF_TOKEN"
        if status >= 500:
            return f"cannot be downloaded now: the hub failed ({status}); try again"
        return f"is not a folder here, and the hub refused it ({status})"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            "is not a folder here and not in the hub's cache, and HF_HUB_OFFLINE forbids a download"
        )
    if isinstance(error, OSError) and error.strerror:  # of the disk
        where = "" if error.filename is None else f": {str(error.filename)!r}; set HF_HOME"
        return f"could not be downloaded ({error.strerror}{where})"
    return "is not a folder here, and the hub cannot be reached: check the network"
