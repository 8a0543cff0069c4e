"""Fields that are known, are not honoured, and would change the answer: refused by name.

Each stands with the values that ask for nothing, which some clients always send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvik.config.errors import ParamError

# field -> (values that ask for nothing, beside null; why others are refused)
Table = Mapping[str, tuple[Sequence[object], str]]
# The type of such a field.
Unhonoured = Annotated[
    Any, Meta(description="Not supported: leave it out, or give what asks for nothing.")
]


def refuse(body: Struct, table: Table, param: str | None = None) -> None:
    """Raises `ParamError` if a field of the table asks for something.

    Args:
        param: the field of the request that `body` stands in, if it is not the request itself.
    """
    for name, (harmless, why) in table.items():
        value = getattr(body, name)
        if value is None or any(_same(value, one) for one in harmless):
            continue
        if param is None:
            raise ParamError(name, f"is not honoured: {why}")
        raise ParamError(param, f"have {name}, which is not honoured: {why}")


def _same(value: object, other: object) -> bool:
    """Equal as JSON: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
