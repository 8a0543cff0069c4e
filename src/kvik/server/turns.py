"""Who may use what there are only a few of: tenants take turns, so that a flood by one of them
holds up another by one piece of work at most."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvik.config.errors import OverloadError


class Turns:
    """Places for a piece of work each. Who waits for one gets it in the order of tenants, round and
    round, and within a tenant in the order of arrival."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        await self._take(tenant)
        try:
            yield
        finally:
            self._free += 1
            self._next()

    async def _take(self, tenant: str) -> None:
        if self._free:  # then nobody waits
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given, and is not wanted
                self._free += 1
                self._next()
            raise

    def _next(self) -> None:
        """Give a free place to who is next."""
        while self._free and self._waiting:
            tenant, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[tenant] = places  # behind the others
            if not place.done():  # nobody stopped waiting for it
                self._free -= 1
                place.set_result(None)


class Room:
    """Bounds what all tenants, and each of them, hold at the same time, in characters.

    Who holds nothing may bring any number, so that nothing is refused for ever.
    """

    def __init__(self, most: int, most_of_tenant: int) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._held: dict[str, int] = {}

    @contextmanager
    def hold(self, tenant: str, num_chars: int) -> Iterator[None]:
        """
        Raises:
            OverloadError: too much is held already, by this tenant or by all.
        """
        mine, all_held = self._held.get(tenant, 0), sum(self._held.values())
        if mine and mine + num_chars > self._most_of_tenant:
            raise OverloadError("queue", "too much of your text waits", 1.0, own=True)
        if all_held and all_held + num_chars > self._most:
            raise OverloadError("queue", "too much text waits to be tokenised", 1.0, own=False)
        self._held[tenant] = mine + num_chars
        try:
            yield
        finally:
            self._held[tenant] -= num_chars
            if not self._held[tenant]:
                del self._held[tenant]
