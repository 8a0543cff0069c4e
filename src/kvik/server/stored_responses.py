"""Responses that a server keeps in memory, for `previous_response_id` and `/v1/responses/{id}`.

A response has its own input and output, and a reference to the response that it continues: a
conversation of N turns takes the memory of N turns. A use counts for all responses before it, just
after its own. So the least recently used one of a key is never continued by another that is kept,
and evicting it frees its memory; a conversation is evicted from its end.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

OVERHEAD = 512  # bytes of a stored response in addition to its JSON
# An id of a response: the name of its store, and a number. Ids of the items of its output continue
# it with their index.
_ID = re.compile(r"[a-z]+_(([0-9a-f]{8})[0-9a-f]{32})(?:[0-9a-f]{4})?")


def store_of(stored_id: str) -> str:
    """Return the name of the store that made the id of a response or of an item of its output; ""
    for an id of another form."""
    match = _ID.fullmatch(stored_id)
    return match[2] if match else ""


def item_id(prefix: str, response_id: str, index: int) -> str:
    """Return the id of an item of a response's output."""
    return f"{prefix}_{response_id.partition('_')[2]}{index:04x}"


def response_of(item_id: str) -> str:
    """Return the id of the response in whose output an item is; "" for an id of another form."""
    match = _ID.fullmatch(item_id)
    return f"resp_{match[1]}" if match else ""


class _Output(msgspec.Struct):
    output: list[msgspec.Raw]


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response and what it continues. It does not change once it is in a store."""

    id: str
    previous: StoredResponse | None
    input_items: bytes = b""  # the items of its own request, a JSON list
    response: bytes = b""  # the response object, as JSON
    deleted: bool = False  # it has no id any more, and is kept for those that continue it
    num_next: int = 0  # number of kept responses that continue it directly

    @property
    def size(self) -> int:
        """Bytes that it takes itself."""
        return len(self.input_items) + len(self.response) + OVERHEAD

    @property
    def total_size(self) -> int:
        """Bytes of its whole conversation."""
        return sum(response.size for response in self.chain())

    def chain(self) -> Iterator[StoredResponse]:
        """Yield it and all that it continues, the newest first."""
        response: StoredResponse | None = self
        while response is not None:
            yield response
            response = response.previous

    def context(self) -> list[msgspec.Raw]:
        """Return the items of its whole conversation before its output, each as JSON."""
        items = list[msgspec.Raw]()
        for response in reversed([*self.chain()]):
            items += msgspec.json.decode(response.input_items, type=list[msgspec.Raw])
            if response is not self:
                items += response.output()
        return items

    def output(self) -> list[msgspec.Raw]:
        """Return the items of its output, each as JSON."""
        return msgspec.json.decode(self.response, type=_Output).output


class ResponseStore:
    """The stored responses of all keys.

    If they exceed the limit, the key with the most bytes loses its least recently used ones.

    Args:
        max_bytes: of all responses; 0: none is kept.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        # Random; ids of responses begin with it, so that `kvik route` finds their server.
        self.name = secrets.token_hex(4)
        self._responses: dict[str, OrderedDict[str, StoredResponse]] = {}  # by tenant
        self._num_bytes = Counter[str]()  # by tenant

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total()

    @property
    def num_responses(self) -> int:
        return sum(map(len, self._responses.values()))

    def new_id(self) -> str:
        return f"resp_{self.name}{secrets.token_hex(16)}"

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response of a tenant, which counts as a use; None if it is not kept."""
        response = self._responses.get(tenant, OrderedDict()).get(response_id)
        if response is None or response.deleted:
            return None
        self._use(tenant, response)
        return response

    def add(self, tenant: str, response: StoredResponse) -> None:
        """Keep a response, and what it continues, even if that was evicted meanwhile."""
        if response.total_size > self.max_bytes:
            return
        self._use(tenant, response)
        while self.num_bytes > self.max_bytes:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            self._drop(largest, next(iter(self._responses[largest].values())))

    def delete(self, tenant: str, response: StoredResponse) -> None:
        """Forget the id of a response, and its content once no kept response continues it."""
        response.deleted = True
        if not response.num_next:
            self._drop(tenant, response)

    def _use(self, tenant: str, response: StoredResponse) -> None:
        responses = self._responses.setdefault(tenant, OrderedDict())
        for turn in response.chain():
            if turn.id not in responses:
                responses[turn.id] = turn
                self._num_bytes[tenant] += turn.size
                if turn.previous is not None:
                    turn.previous.num_next += 1
            responses.move_to_end(turn.id)

    def _drop(self, tenant: str, response: StoredResponse) -> None:
        """Drop a response that no other continues, and deleted ones that only it continued."""
        for turn in response.chain():
            del self._responses[tenant][turn.id]
            self._num_bytes[tenant] -= turn.size
            if turn.previous is None:
                return
            turn.previous.num_next -= 1
            if turn.previous.num_next or not turn.previous.deleted:
                return
