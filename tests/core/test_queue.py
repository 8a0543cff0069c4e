from __future__ import annotations

import pytest

from kvik.core.queue import WaitingQueue
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import Request
from kvik.errors import CapacityError


def request(order: float, num_tokens: int = 3) -> Request:
    made = Request("r", 0, SamplingParams(), [1] * num_tokens, num_tokens, 9, frozenset(), 0, 0.0)
    made.order = (order, 0)
    return made


def test_requests_stand_in_the_order_of_their_keys() -> None:
    queue = WaitingQueue(10, 100)
    requests = [request(key) for key in (3.0, 1.0, 2.0)]
    for r in requests:
        queue.add(r)
    assert [r.order[0] for r in queue] == [1.0, 2.0, 3.0]
    queue.remove(requests[2])
    assert queue.snapshot() == [requests[1], requests[0]]
    assert queue.num_tokens == 6
    with pytest.raises(RuntimeError, match="not in the queue"):
        queue.remove(requests[2])


def test_a_full_queue_refuses() -> None:
    queue = WaitingQueue(2, 100)
    queue.check_room(2, 6)
    queue.add(request(1.0))
    with pytest.raises(CapacityError, match=r"max_queued_requests: .*1 of 2") as caught:
        queue.check_room(2, 6)
    assert caught.value.field == "max_queued_requests"


def test_too_many_tokens_are_refused_but_an_empty_queue_takes_anything() -> None:
    queue = WaitingQueue(10, 100)
    queue.check_room(1, 1000)
    queue.add(request(1.0, 60))
    queue.check_room(1, 40)
    with pytest.raises(CapacityError, match="60 of 100") as caught:
        queue.check_room(1, 41)
    assert caught.value.field == "max_queued_tokens"


def test_each_tenant_has_a_line_of_its_own() -> None:
    queue = WaitingQueue(10, 100)
    requests = [request(key) for key in (3.0, 1.0, 2.0)]
    for r, tenant in zip(requests, "aba", strict=True):
        r.tenant = tenant
        queue.add(r)
    assert queue.by_tenant == {"a": [requests[2], requests[0]], "b": [requests[1]]}
    queue.remove(requests[1])
    queue.remove(requests[2])
    assert queue.by_tenant == {"a": [requests[0]]}
