"""Block hashes: what makes two prefixes equal.

The hash of a block covers its tokens and the hash of the block before it, so equal hashes mean
equal prefixes, and the blocks of all requests form a prefix tree without anyone building one. The
chain starts from a salt: requests under different salts never see each other's blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(salt: str) -> bytes:
    """Where the chain of a tenant's hashes starts."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block of `tokens` that follows the prefix hashed to `parent`."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=HASH_BYTES).digest()


def extend_hashes(
    hashes: list[bytes], tokens: Sequence[int], block_size: int, salt: str, num_blocks: int
) -> None:
    """Append the hashes of the full blocks of `tokens` that `hashes` lacks, up to `num_blocks`."""
    parent = hashes[-1] if hashes else root_hash(salt)
    for i in range(len(hashes), num_blocks):
        parent = block_hash(parent, tokens[i * block_size : (i + 1) * block_size])
        hashes.append(parent)
