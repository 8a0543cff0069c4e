"""Prompts as callers give them: texts, token ids or arrays of them, mappings as for vLLM, and the
texts around a gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol, runtime_checkable

from kvik.errors import ParamError, shown


@runtime_checkable
class TokenArray(Protocol):
    """Token ids in an array of numpy or torch."""

    def tolist(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Infill:
    """A prompt whose answer stands between two texts, one of which may be empty."""

    prefix: str
    suffix: str


PlainPrompt = str | list[int] | Infill
# A mapping has one of the keys `MAPPED`, or those of `GAP`.
Prompt = str | Sequence[int] | TokenArray | Mapping[str, Any] | Infill
MAPPED = ("prompt", "prompt_token_ids")
GAP = ("prompt", "suffix")
ONE = "a text or a list of token ids"


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[PlainPrompt]:
    """Return one prompt or many as a list; raise ParamError if they are not prompts."""
    single = _plain(prompts)
    if single is not None:
        return [single] if single != [] else []
    several = _listed(prompts)
    plain = [None] if several is None else [_plain(prompt) for prompt in several]
    if None in plain:
        raise ParamError("prompt", f"must be {ONE}, or a list of those")
    return plain  # type: ignore[return-value]


def one_prompt(prompt: Prompt) -> PlainPrompt:
    """Return a prompt that must be one; raise ParamError if it is not one, or empty."""
    plain = _plain(prompt)
    if plain is None:
        raise ParamError("prompt", f"must be {ONE}")
    if not plain:
        raise ParamError("prompt", "must not be empty")
    return plain


def no_infill(prompt: PlainPrompt) -> str | list[int]:
    """Return a prompt that is not to be completed; raise ParamError if it has a gap."""
    if isinstance(prompt, Infill):
        raise ParamError("prompt", "has a suffix, which is for texts to complete")
    return prompt


def _listed(value: object) -> Sequence[object] | None:
    """Return a sequence or an array as a sequence; None: it is neither."""
    sequence = value.tolist() if isinstance(value, TokenArray) else value
    return (
        sequence
        if isinstance(sequence, Sequence) and not isinstance(sequence, str | bytes)
        else None
    )


def _plain(prompt: object) -> PlainPrompt | None:
    """Return one prompt; None: it is not one."""
    if isinstance(prompt, str | Infill):
        return prompt
    if isinstance(prompt, Mapping):
        if prompt.keys() == set(GAP):
            prefix, suffix = (prompt[key] for key in GAP)
            if not (isinstance(prefix, str) and isinstance(suffix, str) and prefix + suffix):
                raise ParamError("suffix", "needs a text as prompt, and not both empty")
            return Infill(prefix, suffix)
        if len(prompt) != 1 or not prompt.keys() <= set(MAPPED):
            keys = shown(", ".join(map(str, prompt)))
            allowed = f"one key, {' or '.join(MAPPED)}, or {' and '.join(GAP)}"
            raise ParamError("prompt", f"a mapping must have {allowed}, not {keys}")
        (prompt,) = prompt.values()
        return None if isinstance(prompt, Mapping) else _plain(prompt)
    ids = _listed(prompt)
    if ids is None:
        return None
    if set(map(type, ids)) <= {int, bool}:  # the engine refuses a bool, and says which
        return list(ids)  # type: ignore[arg-type]
    try:
        return [index(item) for item in ids]  # type: ignore[arg-type]
    except TypeError:
        return None
