"""Text that calibrates a model, the package's or a file's, as windows of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import Tensor

from kvik.config.errors import ConfigError
from kvik.text.tokenizer import Tokenizer

BUILTIN = "builtin"
TEXT = Path(__file__).parents[1] / "bundled" / "calibration" / "text.txt"
PART = 1 << 16  # letters that are tokenised together
PROBE = 4  # times as many tokens as are wanted are read at most, to spread the windows over
MOST = 1 << 24  # tokens that can be wanted


def calibration_windows(
    source: str | Path, tokenizer: Tokenizer, *, samples: int, tokens: int
) -> Tensor:
    """Windows taken evenly from a text; of a long one, from its beginning.

    Args:
        source: "builtin", or a text file in UTF-8.
        samples: windows at most.
        tokens: of a window.

    Returns:
        [up to samples, tokens] int64.

    Raises:
        ConfigError: a file that cannot be read or is no text; it is too short for one window.
    """
    for field, count, least in (("samples", samples, 1), ("calib_tokens", tokens, 2)):
        if count < least:
            raise ConfigError(field, f"must be at least {least}, not {count}")
    if samples * tokens > MOST:
        raise ConfigError("samples", f"must be at most {MOST // tokens} of {tokens} tokens")
    path = TEXT if source == BUILTIN else Path(source)
    try:
        with path.open(encoding="utf-8-sig") as file:
            ids = np.fromiter(islice(_ids(file, tokenizer), PROBE * samples * tokens), np.int64)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError("calib", f"cannot read {str(path)!r} ({why})") from None
    found = len(ids) // tokens
    if not found:
        raise ConfigError(
            "calib",
            f"{str(source)!r} has {len(ids)} tokens, one window needs {tokens}: name a longer text "
            "or fewer tokens",
        )
    windows = torch.from_numpy(ids[: found * tokens]).view(found, tokens)
    kept = min(samples, found)
    return windows[torch.arange(kept) * found // kept]


def _ids(file: TextIO, tokenizer: Tokenizer) -> Iterator[int]:
    """The tokens of a text, a few pages at a time, cut between paragraphs or lines; where a line
    has no end, between words or anywhere."""
    rest = ""
    for part in iter(lambda: file.read(PART), ""):
        rest += part
        cut = rest.rfind("\n\n") + 2 if "\n\n" in rest else rest.rfind("\n") + 1
        if not cut and len(rest) > PART:
            cut = rest.rfind(" ") if rest.rfind(" ") > 0 else len(rest)
        if cut:
            yield from tokenizer.encode(rest[:cut], add_special_tokens=False)
            rest = rest[cut:]
    yield from tokenizer.encode(rest, add_special_tokens=False)
