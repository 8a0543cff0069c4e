"""What `MODEL` names -> files here: the bundled model, a folder, a GGUF file, or a hub id."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvik.config.errors import ModelError
from kvik.config.fields import shown

BUNDLED = Path(__file__).parents[1] / "bundled" / "stories"

CONFIG = "config.json"
GGUF = ".gguf"
MAX_LISTED = 4  # files named in an error
# Only what kvik reads. Pickles and code are never fetched.
DESCRIPTION = ("*.json", "*.jinja", "merges.txt")
WEIGHTS = ("*.safetensors",)
# Subfolders, and Mistral's second copy of the weights under names of its own.
IGNORED = ("*/*", "consolidated*")
HUB_ID = re.compile(r"[\w][\w.-]{0,95}(/[\w][\w.-]{0,95})?")


def is_gguf(path: Path) -> bool:
    """Whether a path that `find_model` gave is a GGUF file; else it is a folder."""
    return path.suffix.lower() == GGUF and not path.is_dir()


def find_model(model: str, *, weights: bool = True) -> Path:
    """The folder of a model, or its GGUF file, which a folder without config.json may hold; a hub
    id is downloaded into the hub's own cache first.

    Args:
        weights: False leaves them on the hub: the description is wanted alone.

    Raises:
        ModelError: there is no such folder or file, or the hub does not give it.
    """
    if not model:
        return BUNDLED
    path = os.path.expanduser(model)  # os.path: a name that cannot be a path is no error there
    if os.path.isdir(path):
        return _in_folder(Path(path).resolve())
    if os.path.exists(path):
        if os.path.isfile(path) and is_gguf(Path(path)):
            return Path(path).absolute()  # not resolved: a link keeps its name
        what = f"must be a folder, a {GGUF} file or a hub id; {shown(model)} is another file"
        raise ModelError("model", what)
    if model.lower().endswith(GGUF):
        raise ModelError("model", f"there is no file {shown(model)}")
    if not HUB_ID.fullmatch(model):
        raise ModelError("model", f"there is no folder {shown(model)}")
    return _download(model, DESCRIPTION + (WEIGHTS if weights else ()))


def _in_folder(folder: Path) -> Path:
    if (folder / CONFIG).exists():
        return folder
    found = sorted(path for path in folder.iterdir() if is_gguf(path))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:MAX_LISTED])
        raise ModelError("model", f"name one of the {len(found)} GGUF files of the folder: {names}")
    return found[0] if found else folder


def find_config(model: str) -> Path:
    """The config.json of a model: a file named itself, one in a folder, or the hub's, alone; or a
    GGUF file, which says the same.

    Raises:
        ModelError: there is no such file or folder, or the hub does not give it.
    """
    path = os.path.expanduser(model)
    if os.path.isfile(path):
        return Path(path).absolute()  # not resolved: a link keeps its name
    if model.endswith(".json"):
        raise ModelError("model", f"there is no file {shown(model)}")
    if not model or os.path.isdir(path) or not HUB_ID.fullmatch(model):
        found = find_model(model, weights=False)
        return found if is_gguf(found) else found / CONFIG
    return _download(model, (CONFIG,)) / CONFIG


def _download(hub_id: str, files: tuple[str, ...]) -> Path:
    # Imported late: it takes a while, and most runs name a folder.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, allow_patterns=list(files), ignore_patterns=list(IGNORED)
            )
        )
    except errors.GatedRepoError:
        reason = "is gated: accept its terms on the hub and log in"
    except errors.RepositoryNotFoundError:
        reason = "is neither a folder here nor a public model on the hub"
    except errors.HFValidationError:
        reason = "is neither a folder here nor a valid hub id"
    except errors.HfHubHTTPError as error:
        reason = f"is no folder here, and the hub refused it ({error.response.status_code})"
    except errors.LocalEntryNotFoundError:
        reason = "is no folder here, and the hub cannot be reached"
    except OSError as error:
        reason = f"could not be downloaded ({error.strerror or type(error).__name__})"
    raise ModelError("model", f"{shown(hub_id)} {reason}")
