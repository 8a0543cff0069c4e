"""Where blocks of the KV cache are kept beyond it, as the option `kv_tiers` says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvik.errors import shown
from kvik.options import Kind, bad_value

EXAMPLE = "memory:4GiB,disk:/var/cache/kvik:200GiB"
MOST_BYTES = 1 << 50
_UNITS = {"": 0, "KIB": 10, "K": 10, "MIB": 20, "M": 20, "GIB": 30, "G": 30, "TIB": 40, "T": 40}


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What is asked for.

    Attributes:
        memory: bytes; 0: no memory tier.
        disk: bytes; 0: no disk tier.
        folder: of the disk tier.
        peers: pages come from other engines.
        lends: other engines get pages.
    """

    memory: int = 0
    disk: int = 0
    folder: str | None = None
    peers: bool = False
    lends: bool = False


@dataclass(frozen=True)
class Tiers(Kind):
    """Tiers, each with its size, such as `EXAMPLE`."""

    expects = f"tiers such as {EXAMPLE}"
    metavar = "TIERS"

    def parse(self, text: str) -> str:
        return text

    def checked(self, value: object) -> str:
        if not isinstance(value, str):
            raise bad_value(f"such as {EXAMPLE}", value)
        read_tiers(value)
        return value


def read_tiers(text: str) -> TierOptions:
    """Read the option.

    Raises:
        ValueError: it cannot be understood; says what is allowed.
    """
    memory, disk, folder = 0, 0, None
    for part in text.split(","):
        kind, _, rest = part.strip().partition(":")
        if "\0" in part:
            raise _bad("a path has no NUL")
        if kind == "memory" and not memory:
            memory = _bytes(rest, part)
        elif kind == "disk" and not disk:
            folder, _, size = rest.rpartition(":")
            if not folder:
                raise _bad(f"{shown(part.strip())} lacks its folder or its size")
            disk = _bytes(size, part)
        elif kind in ("memory", "disk"):
            raise _bad(f"{kind} is given twice")
        else:
            raise _bad(f"{shown(kind)} is no tier (known: memory, disk)")
    return TierOptions(memory, disk, folder)


def _bytes(text: str, part: str) -> int:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise _bad(f"{shown(text)} of {shown(part.strip())} is no size (such as 512MiB or 4GiB)")
    size = int(float(match[1]) * (1 << unit))
    if not 0 < size <= MOST_BYTES:
        raise _bad(f"the size of {shown(part.strip())} must be from 1 byte to 1024 TiB")
    return size


def _bad(what: str) -> ValueError:
    return ValueError(f"must be such as {EXAMPLE}: {what}")
