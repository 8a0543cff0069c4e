"""What every answer begins with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvik import __version__

FINGERPRINT = f"kvik-{__version__}"


@dataclass(frozen=True, slots=True)
class Heading:
    """`id` and `model` of an answer, and when it was begun, in whole seconds since 1970."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
