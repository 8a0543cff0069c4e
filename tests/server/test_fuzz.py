"""Bodies drawn from `/openapi.json`, and bodies that it forbids: no 5xx, no leak, and whatever the
schema forbids is refused by name.

`pytest tests/server/test_fuzz.py --fuzz-seconds 300` runs for five minutes.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections import Counter
from typing import Any

import pytest
from helpers.schema_values import SchemaValues
from helpers.server_process import POOLED, ServerProcess, server_process

pytestmark = pytest.mark.usefixtures("forked")
MIB = 1 << 20
ANTHROPIC = "/v1/messages"
NO_ROOM = {429, 503, 504}


class Fuzzer:
    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        schema = json.loads(server.get("/openapi.json")[1])
        self.components = schema["components"]["schemas"]
        self.bodies = {
            path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, methods in schema["paths"].items()
            if "post" in methods
        }
        self.statuses: Counter[int] = Counter()

    def one(self, seed: int) -> None:
        dice = random.Random(seed)
        values = SchemaValues(self.components, dice)
        path = dice.choice(list(self.bodies))
        schema = values.resolved(self.bodies[path])
        body = values.allowed(schema)
        self._tame(body, dice)
        spoilt = None
        if dice.random() < 0.4:
            name = dice.choice(list(schema["properties"]))
            if forbidden := values.forbidden(schema["properties"][name]):
                spoilt, body[name] = name, dice.choice(forbidden)
        status, answer = self._post(path, json.dumps(body).encode(), seed)
        if spoilt is not None:
            assert status in (400, 404, *NO_ROOM), (seed, path, spoilt, body, answer[:300])
        if status >= 400:
            self._check_error(path, status, answer, seed)

    def _tame(self, body: dict[str, Any], dice: random.Random) -> None:
        """Change values that would prevent the body from reaching the engine, or keep it there for
        long."""
        if "model" in body and dice.random() < 0.9:
            body["model"] = "stories"
        if "max_tokens" in body and dice.random() < 0.9:
            body["max_tokens"] = dice.randint(1, 12)
        if body.get("n"):
            body["n"] = dice.randint(1, 4)
        if "messages" in body and dice.random() < 0.7:
            body["messages"] = [{"role": "user", "content": "A story about a fox"}]
        if "prompt" in body and dice.random() < 0.7:
            body["prompt"] = dice.choice(["The fox", [5, 6, 7], ["a", "b"], [[3, 4], [5]]])

    def _post(self, path: str, data: bytes, seed: int) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            connection.request("POST", path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        self.statuses[answer.status] += 1
        context = (seed, path, data[:2000], answer.status, text[:500])
        assert answer.status < 500 or answer.status in NO_ROOM, context
        assert answer.status not in NO_ROOM or answer.status == 504 or answer.headers["Retry-After"]
        return answer.status, text

    @staticmethod
    def _check_error(path: str, status: int, answer: bytes, seed: int) -> None:
        found = json.loads(answer)
        if path.startswith(ANTHROPIC):
            assert found["type"] == "error", seed
            assert set(found["error"]) - {"details"} == {"type", "message"}, seed
        else:
            assert set(found) == {"error"}, seed
            assert set(found["error"]) == {"message", "type", "param", "code"}, seed
        assert isinstance(found["error"]["message"], str) and found["error"]["message"], seed


@pytest.mark.full
@pytest.mark.timeout(3600)  # `--fuzz-seconds` may be large
def test_drawn_bodies_are_answered_or_refused(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVIK_STORED_RESPONSE_BYTES", "1m")
    seconds = float(request.config.getoption("--fuzz-seconds"))
    small = ("--max-num-seqs", "16", "--max-model-len", "256", "--threads", "1")
    with server_process(*small) as server:
        fuzzer = Fuzzer(server)
        for seed in range(100):
            fuzzer.one(-1 - seed)
        base = server.resources()
        deadline, seed = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            fuzzer.one(seed)
            seed += 1
        assert fuzzer.statuses[200] > 0.1 * seed and fuzzer.statuses[400] > 0.1 * seed
        print(f"{seed} requests in {seconds:g} s, by status: {dict(fuzzer.statuses)}")
        found = server.metrics()
        assert found["num_requests_running"] == found["num_requests_waiting"] == 0
        assert found["kv_cache_usage_perc"] == 0.0
        for then, now in zip(base, server.resources(), strict=True):
            assert now.threads <= then.threads + POOLED
            assert now.files <= then.files + 4
            assert now.memory <= then.memory + 32 * MIB
