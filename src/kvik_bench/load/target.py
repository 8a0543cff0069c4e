"""Where requests go, behind one protocol."""

from __future__ import annotations

from typing import Protocol

from kvik_bench.load.records import RequestRecord
from kvik_bench.load.workload import LoadRequest


class Target(Protocol):
    """Something that answers requests."""

    async def send(self, request: LoadRequest, record: RequestRecord) -> str | None:
        """Send one request, once, and fill the record while the answer comes.

        Stamps `sent` as late as it can. Never raises for what the server does: it notes that as the
        record's error and returns None. Else it returns the answer's text. When cancelled, it
        leaves the record as it is and raises `CancelledError`.
        """
