"""How a GGUF file stores its matrices, in the words of other quantised checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod

from kvik.config.stored_quantization import Rule, StoredQuantization, StoredScheme
from kvik.gguf.names import hf_name
from kvik.gguf.reader import GgufFile

METHOD = "gguf"
WEIGHT = ".weight"

# By the type of blocks: bits of a code, weights that share a scale, and what a code of 0 means.
SCHEMES: Mapping[str, StoredScheme] = {
    scheme.layout: scheme
    for scheme in (
        StoredScheme("Q8_0", 8, 32),
        StoredScheme("Q4_0", 4, 32),
        StoredScheme("Q4_1", 4, 32, symmetric=False, minima=True),
        StoredScheme("Q5_0", 5, 32),
        StoredScheme("Q5_1", 5, 32, symmetric=False, minima=True),
        StoredScheme("Q2_K", 2, 16, symmetric=False, minima=True),
        StoredScheme("Q3_K", 3, 16),
        StoredScheme("Q4_K", 4, 32, symmetric=False, minima=True),
        StoredScheme("Q5_K", 5, 32, symmetric=False, minima=True),
        StoredScheme("Q6_K", 6, 16),
    )
}


def stored_quantization(file: GgufFile) -> StoredQuantization | None:
    """By the types of the tensors; None: all are floats."""
    named: dict[str, set[str]] = {}
    for tensor in file.tensors:
        name = hf_name(tensor.name)
        if name is not None and tensor.type.name in SCHEMES:
            named.setdefault(tensor.type.name, set()).add(name.removesuffix(WEIGHT))
    if not named:
        return None
    rules = tuple(Rule(SCHEMES[type], frozenset(layers)) for type, layers in named.items())
    return StoredQuantization(METHOD, rules, embeddings=True)


def usual_bits(file: GgufFile) -> int | None:
    """Of a code in the type that most weights of matrices are stored in; None: floats."""
    weights = Counter[str]()
    for tensor in file.tensors:
        if len(tensor.shape) > 1:
            weights[tensor.type.name] += prod(tensor.shape)
    scheme = SCHEMES.get(max(weights, key=weights.__getitem__, default=""))
    return scheme.bits if scheme else None
