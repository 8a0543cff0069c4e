"""Number of tokens that each layer keeps in the KV cache: computed by `kvik kv-budget`, and read
from its file.

Layers whose attention is spread over many keys lose more with a small cache than those that attend
to a few ("entropy-guided KV caching", Kim and Jung, Mathematics 2025, 13(15), 2366). So each layer
gets tokens in proportion to the entropy of its attention. Two baselines use the same bytes: an
equal number for all layers, and a decreasing number from layer to layer (PyramidKV, Cai et al.
2024, arXiv 2406.02069).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from kvik.errors import ConfigError, shown
from kvik.files import write_whole
from kvik.options import Integer, Number, OneOf, option
from kvik.spec.visible_keys import Budget

if TYPE_CHECKING:
    from kvik.models.model_spec import ModelSpec

ENTROPY, UNIFORM, PYRAMID = "entropy", "uniform", "pyramid"
FIELD = "kv_budget"  # of errors
VERSION = 1  # of the file
MAX_BYTES = 1 << 22  # of the file
MAX_CLASSES = 4  # classes of layers with equal budgets
ROUND = 16  # budgets are multiples of this, like blocks
MIN_TOKENS = Budget(0).min_tokens
LEAST = -(-MIN_TOKENS // ROUND) * ROUND
BETA = 20  # PyramidKV: ratio of the average budget to that of the last layer
MAX_CONTEXT = 1 << 24
USUAL_CONTEXT = 16_384


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """Options of `kvik kv-budget`."""

    bytes: float = option(
        0.25, Number(0, 1, above=True), "budget as a share of the bytes of all tokens of a context"
    )
    context: int | None = option(
        None,
        Integer(LEAST, MAX_CONTEXT),
        f"tokens of that context; None: the model's, up to {USUAL_CONTEXT}",
    )
    by: str = option(
        ENTROPY,
        OneOf((ENTROPY, UNIFORM, PYRAMID)),
        "entropy: in proportion to how widely a layer's attention is spread; uniform: the same "
        "for all; pyramid: decreasing from layer to layer",
    )


@dataclass(frozen=True, slots=True)
class KVBudgets:
    """The contents of a budget file."""

    architecture: str  # of the model
    fingerprint: str  # of the model; see `fingerprint_of`
    by: str  # the option used, as `bytes` and `context`; see `BudgetOptions`
    bytes: float
    context: int
    data: str  # the text used for measuring; "" without one
    tokens: int  # length of that text; 0 without one
    # Of each layer the value that its tokens are proportional to, and how many it keeps; None: its
    # queries do not see all keys, so it has no budget.
    scores: tuple[float | None, ...]
    budgets: tuple[int | None, ...]


def fingerprint_of(spec: ModelSpec) -> str:
    """Return a hash of the model's shape. Models that differ only in their weights, such as a model
    and its quantised version, have the same one."""
    ropes = [(layer.rope.theta if layer.rope else 0) for layer in spec.layers]
    shape = (
        *(spec.architecture, spec.vocab_size, spec.hidden_size, spec.num_heads),
        *((spec.heads(layer), base) for layer, base in zip(spec.layers, ropes, strict=True)),
    )
    return blake2b(repr(shape).encode(), digest_size=16).hexdigest()


def check_model(spec: ModelSpec, field: str = FIELD) -> None:
    """Raise ConfigError if the model does not support budgets."""
    for wrong, reason in (
        (spec.encoder, "is an encoder, which keeps nothing"),
        (spec.fallback is not None, "runs through transformers, which has a cache of its own"),
        (spec.latent is not None, "attends over latent vectors"),
        (spec.indexed > 0, "has layers that choose keys"),
        (spec.compressed, "keeps entries that sum up tokens"),
        (any(layer.kv_from is not None for layer in spec.layers), "has layers that share keys"),
        (not spec.full_layers, "has no layers that see all keys"),
        # keys that were moved together would have other distances
        (any(layer.slopes for layer in spec.layers), "adds the distance of keys to scores (ALiBi)"),
    ):
        if wrong:
            verdict = "must be left out" if field == FIELD else "cannot have budgets"
            raise ConfigError(field, f"{verdict}: {spec.architecture} {reason}")


def scores_of(by: str, entropies: Sequence[float], layers: int) -> tuple[float, ...]:
    """Return the value of each layer that its tokens are proportional to.

    Args:
        entropies: entropy of each layer; used only for "entropy".
    """
    if by == ENTROPY:
        return tuple(entropies)
    if by == UNIFORM or layers == 1:
        return (1.0,) * layers
    lowest = 1 / BETA
    highest = 2 - lowest
    return tuple(highest - (highest - lowest) * i / (layers - 1) for i in range(layers))


def allot(
    scores: Sequence[float], sizes: Sequence[int], share: float, context: int
) -> tuple[int, ...]:
    """Return the tokens of each layer: proportional to the scores within `LEAST` and the context,
    and in total at most `share` of the bytes of all tokens of the context. There are at most
    `MAX_CLASSES` different numbers.

    Args:
        sizes: bytes of a token in each layer.

    Raises:
        ConfigError: the share is too small.
    """
    cap = share * context * sum(sizes)
    if cap < LEAST * sum(sizes):
        min_share = LEAST / context
        raise ConfigError(
            "bytes", f"must be at least {min_share:.3g}, {LEAST} of {context} tokens, not {share:g}"
        )
    classes = _classes(scores)
    weights = [sum(sizes[i] for i in layers) for layers in classes]
    means = [sum(scores[i] for i in layers) / len(layers) for layers in classes]
    exact = _filled(means, weights, cap, context)
    tokens_of_class = [int(tokens) // ROUND * ROUND for tokens in exact]
    spare = cap - sum(a * b for a, b in zip(tokens_of_class, weights, strict=True))
    # Bytes left by rounding go to the classes that lost most by it.
    for c in sorted(range(len(classes)), key=lambda c: tokens_of_class[c] - exact[c]):
        if ROUND * weights[c] <= spare and tokens_of_class[c] + ROUND <= context:
            tokens_of_class[c] += ROUND
            spare -= ROUND * weights[c]
    budgets = dict(zip(classes, tokens_of_class, strict=True))
    return tuple(next(n for layers, n in budgets.items() if i in layers) for i in range(len(sizes)))


def _classes(scores: Sequence[float]) -> list[tuple[int, ...]]:
    """Return the layers in classes of similar scores, of equal size if possible, because a block
    has room for the layers of the largest class."""
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    if len(set(scores)) == 1:
        return [tuple(order)]
    counts = [n for n in range(MAX_CLASSES, 1, -1) if len(order) % n == 0]
    count = counts[0] if counts else min(MAX_CLASSES, len(order))
    ends = [len(order) * i // count for i in range(count + 1)]
    return [tuple(order[a:b]) for a, b in pairwise(ends)]


def _filled(
    scores: Sequence[float], weights: Sequence[int], cap: float, limit: int
) -> Sequence[float]:
    """Return tokens proportional to scores, within `LEAST` and `limit`, that take `cap` bytes."""

    def at(level: float) -> list[float]:
        return [min(max(level * score, LEAST), limit) for score in scores]

    low, high = 0.0, limit / max(min(scores), 1e-9)
    for _ in range(200):
        middle = (low + high) / 2
        num_bytes = sum(a * b for a, b in zip(at(middle), weights, strict=True))
        low, high = (middle, high) if num_bytes <= cap else (low, middle)
    return at(low)


def save_budgets(budgets: KVBudgets, path: Path) -> None:
    """Write the file; raise OSError if that fails."""
    text = json.dumps({"kv_budget": VERSION, **asdict(budgets)}, indent=1)
    write_whole(path, (text + "\n").encode())


def asked_budgets(file: str | None, spec: ModelSpec) -> KVBudgets | None:
    """Return the budgets of the file in the options; None without a file. Raises as `read_budgets`
    and `check_model`."""
    if file is None:
        return None
    check_model(spec)
    return read_budgets(Path(file), spec)


def read_budgets(path: Path, spec: ModelSpec) -> KVBudgets:
    """Read a budget file for a model.

    Raises:
        ConfigError: with field `kv_budget`: the file cannot be read, is for another model, or has
            invalid values.
    """
    import msgspec  # a start without a file does not need it

    values = _read(path)
    if values.pop("kv_budget", None) != VERSION:
        raise ConfigError(FIELD, f"must be a file of `kvik kv-budget`, not {shown(str(path))}")
    try:
        budgets = msgspec.convert(values, KVBudgets)
    except msgspec.ValidationError as error:
        raise ConfigError(FIELD, f"{shown(str(path))} is wrong: {error}") from None
    if budgets.fingerprint != fingerprint_of(spec):
        raise ConfigError(
            FIELD,
            f"must be made for {spec.architecture} of this shape; {shown(str(path))} is of another "
            f"model ({shown(budgets.architecture)})",
        )
    lists: dict[str, tuple[Sequence[float | None], int]] = {
        "scores": (budgets.scores, 0),
        "budgets": (budgets.budgets, MIN_TOKENS),
    }
    full = spec.full_layers
    for name, (values_of, minimum) in lists.items():
        numbers = [n for n in values_of if n is not None]
        if (
            len(values_of) != spec.num_layers
            or [i for i, n in enumerate(values_of) if n is not None] != full
        ):
            where = (
                "" if len(full) == spec.num_layers else ", null for those with a window or state"
            )
            text = f"{name} must be a number for each of {spec.num_layers} layers{where}"
            raise ConfigError(FIELD, f"{text}, in {shown(str(path))}")
        if any(not minimum <= n <= MAX_CONTEXT for n in numbers):
            text = f"{name} must be {minimum} to {MAX_CONTEXT} each, not {min(numbers)}"
            raise ConfigError(FIELD, text)
    different = len(set(budgets.budgets) - {None})
    if different > MAX_CLASSES:
        text = f"budgets must be at most {MAX_CLASSES} different ones, not {different}"
        raise ConfigError(FIELD, text)
    return budgets


def _read(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(FIELD, f"{shown(str(path))} cannot be read ({error.strerror})") from None
    try:
        values = json.loads(content) if len(content) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError(FIELD, f"must be a file of `kvik kv-budget`, not {shown(str(path))}")
    return values
