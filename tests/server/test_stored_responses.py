"""The store of responses: its memory, and what it drops."""

from __future__ import annotations

import random

import pytest

from kvik.server.stored_responses import OVERHEAD, ResponseStore, StoredResponse, store_of

TENANTS = ("ada", "bob")
CONTENT = b'{"output":[]}'


def made(
    store: ResponseStore, previous: StoredResponse | None = None, size: int = 0
) -> StoredResponse:
    return StoredResponse(store.new_id(), previous, b"[" + b" " * size + b"]", CONTENT)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_uses_keeps_whole_conversations_within_the_limit(seed: int) -> None:
    dice = random.Random(seed)
    store, limit = ResponseStore(40 * OVERHEAD), 40 * OVERHEAD
    seen: dict[str, list[StoredResponse]] = {name: [] for name in TENANTS}
    for _ in range(400):
        tenant = dice.choices(TENANTS, (3, 1))[0]
        known = seen[tenant]
        some = dice.choice(known) if known else None
        match dice.randrange(4):
            case 0 if some is not None:
                store.find(tenant, some.id)
            case 1 if some is not None and store.find(tenant, some.id):
                store.delete(tenant, some)
                assert store.find(tenant, some.id) is None
            case _:  # its predecessor may have been dropped or deleted since it was begun
                new = made(
                    store, some if dice.random() < 0.7 else None, dice.randrange(3 * OVERHEAD)
                )
                known.append(new)
                store.add(tenant, new)
        sizes = [size for name in TENANTS for size in needed_sizes(store, name, seen[name])]
        assert store.num_responses == len(sizes) and store.num_bytes == sum(sizes) <= limit
    for name in TENANTS:
        for one in seen[name]:
            if store.find(name, one.id):
                store.delete(name, one)
    assert store.num_responses == store.num_bytes == 0


def needed_sizes(store: ResponseStore, tenant: str, seen: list[StoredResponse]) -> list[int]:
    """Return the sizes of the responses that can be found, and of those that they continue."""
    found = [response for response in seen if store.find(tenant, response.id)]
    return [*{turn.id: turn.size for response in found for turn in response.chain()}.values()]


def test_an_id_names_its_store() -> None:
    store = ResponseStore()
    assert store_of(store.new_id()) == store.name
    assert not any(map(store_of, ("", "resp_1", f"{store.new_id()}0", f"_{store.new_id()}")))


def test_a_very_long_conversation_is_dropped() -> None:
    store = ResponseStore(1 << 30)
    last = None
    for _ in range(3000):
        last = made(store, last)
    assert last is not None
    store.add("", last)
    assert store.num_responses == 3000
    for turn in [*last.chain()][::-1]:
        store.delete("", turn)
    assert store.num_responses == 0
