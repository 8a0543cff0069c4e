"""What keys and values may be stored in, and what that takes.

A vector is K or V of one token and KV head: it is rounded by a scale of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AUTO = "auto"  # the model's dtype
SYNONYMS = {"fp8_e4m3": "fp8", "bfloat16": "bf16"}  # as other engines call them


@dataclass(frozen=True, slots=True)
class KVFacts:
    """A format of the KV cache.

    Attributes:
        name: as `EngineConfig.kv_cache_dtype` calls it.
        bits: of a number.
        scale_bytes: of a vector's scale, with its zero point where it has one.
        meaning: how keys and values are stored, in words.
    """

    name: str
    bits: int
    scale_bytes: int
    meaning: str

    def vector_bytes(self, head_dim: int) -> int:
        """Of K or V of one token and KV head, scale included."""
        return -(-head_dim * self.bits // 8) + self.scale_bytes


# From many bits to few; of equal ones the more exact first.
KV_FORMATS: Mapping[str, KVFacts] = {
    facts.name: facts
    for facts in (
        KVFacts("fp32", 32, 0, "as 32-bit floats"),
        KVFacts("bf16", 16, 0, "as bfloat16"),
        KVFacts("fp16", 16, 0, "as float16"),
        KVFacts("int8", 8, 2, "in 8 bits, a scale for each token and head"),
        KVFacts("fp8", 8, 2, "in 8 bits (E4M3), a scale for each token and head"),
        KVFacts("int4", 4, 2, "in 4 bits, a scale and a zero point for each token and head"),
    )
}
