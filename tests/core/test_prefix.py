from __future__ import annotations

from kvik.core.block_pool import HASH_BYTES, block_hash, extend_hashes, root_hash


def hashes(tokens: list[int], salt: str = "", block_size: int = 2) -> list[bytes]:
    found: list[bytes] = []
    extend_hashes(found, tokens, block_size, salt, len(tokens) // block_size)
    return found


def test_a_block_after_another_prefix_has_another_hash() -> None:
    first, second = hashes([1, 2, 5, 6]), hashes([3, 4, 5, 6])
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_equal_prefixes_have_equal_hashes() -> None:
    assert hashes([1, 2, 3, 4, 9])[:2] == hashes([1, 2, 3, 4, 5, 6])[:2]


def test_salts_separate_tenants() -> None:
    assert not set(hashes([1, 2, 3, 4], "a")) & set(hashes([1, 2, 3, 4], "b"))
    assert root_hash("") != root_hash("\ud800")  # any string is a salt


def test_token_borders_count() -> None:
    root = root_hash("")
    assert block_hash(root, [1, 256]) != block_hash(root, [256, 1])
    assert block_hash(root, [2**31]) != block_hash(root, [2**31 - 1])
    assert len(block_hash(root, [0])) == HASH_BYTES


def test_hashes_are_extended_in_place_from_what_is_there() -> None:
    tokens = list(range(10))
    found = hashes(tokens[:4])
    before = found[:]
    extend_hashes(found, tokens, 2, "", 5)
    assert found[:2] == before
    assert found == hashes(tokens)
    extend_hashes(found, tokens, 2, "", 3)
    assert len(found) == 5
