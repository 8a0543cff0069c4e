"""What `MODEL` names -> a folder on this machine: the bundled model, a folder, or a hub id."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvik.config.errors import ModelError
from kvik.config.fields import shown

BUNDLED = Path(__file__).parents[1] / "bundled" / "stories"

CONFIG = "config.json"
# Only what kvik reads. Pickles and code are never fetched.
DESCRIPTION = ("*.json", "*.jinja", "merges.txt")
WEIGHTS = ("*.safetensors",)
# Subfolders, and Mistral's second copy of the weights under names of its own.
IGNORED = ("*/*", "consolidated*")
HUB_ID = re.compile(r"[\w][\w.-]{0,95}(/[\w][\w.-]{0,95})?")


def find_model(model: str, *, weights: bool = True) -> Path:
    """The folder of a model; a hub id is downloaded into the hub's own cache first.

    Args:
        weights: False leaves them on the hub: the description is wanted alone.

    Raises:
        ModelError: there is no such folder, or the hub does not give it.
    """
    if not model:
        return BUNDLED
    path = os.path.expanduser(model)  # os.path: a name that cannot be a path is no error there
    if os.path.isdir(path):
        return Path(path).resolve()
    if os.path.exists(path):
        raise ModelError("model", f"must be a folder or a hub id; {shown(model)} is a file")
    if not HUB_ID.fullmatch(model):
        raise ModelError("model", f"there is no folder {shown(model)}")
    return _download(model, DESCRIPTION + (WEIGHTS if weights else ()))


def find_config(model: str) -> Path:
    """The config.json of a model: a file named itself, one in a folder, or the hub's, alone.

    Raises:
        ModelError: there is no such file or folder, or the hub does not give it.
    """
    path = os.path.expanduser(model)
    if os.path.isfile(path):
        return Path(path).absolute()  # not resolved: a link keeps its name
    if model.endswith(".json"):
        raise ModelError("model", f"there is no file {shown(model)}")
    if not model or os.path.isdir(path) or not HUB_ID.fullmatch(model):
        return find_model(model, weights=False) / CONFIG
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
