"""What routing costs: choosing a replica, and the proxy hop through `kvik route`.

    python benchmarks/routing.py [--blocks 100000] [--requests 2000]

Choosing: prompts of 64 to 4,096 blocks, half of which one replica has cached, among 8, 64 and 1,000
replicas. The hop: a POST of 2 KB to a server that answers at once, on one connection, alternately
direct and through `kvik route`; the difference of the medians is what the proxy adds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import tracemalloc
from http.client import HTTPConnection
from random import Random

from kvik.child_process import python_command
from kvik.core.block_pool import ContentChanges, extend_hashes
from kvik.core.routing import ReplicaReport, ReplicaRouter
from kvik_bench.scripts import serving

SERVER = """
import asyncio, uvloop
from kvik.server.run import Listener, bind

async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    body = b'{"object": "list"}'
    head = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})

async def main():
    listening = bind("127.0.0.1", 0)
    await Listener(app, listening).start()
    print(f"http://127.0.0.1:{listening.getsockname()[1]}\\nready", flush=True)
    await asyncio.Event().wait()

uvloop.run(main())
"""


def choices(replicas: int, blocks: int, rounds: int = 2000) -> tuple[float, float]:
    """Return the median and the 99th percentile of the seconds to choose a replica."""
    random = Random(0)
    router = ReplicaRouter([f"replica {i}" for i in range(replicas)], 16, 64)
    held = []
    for i in range(replicas):
        held.append([random.randbytes(16) for _ in range(blocks)])
        changes = ContentChanges(1, held[i], [], cleared=True)
        router.report(i, ReplicaReport(changes, random.random() / 2, 1000.0 + i))
        router.set_available(i, True)
    prompts = []
    for i in range(rounds):
        length = random.choice((64, 256, 1024, 4096))
        own = held[i % replicas]
        start = random.randrange(len(own) - length)
        fresh = [random.randbytes(16) for _ in range(length // 2)]
        prompts.append(own[start : start + length // 2] + fresh)
    seconds = []
    for i, prompt in enumerate(prompts):
        began = time.perf_counter()
        choice = router.choose(prompt, len(prompt) * 16, i * 0.001)
        seconds.append(time.perf_counter() - began)
        assert choice.hit in (0, len(prompt) // 2)
    seconds.sort()
    return seconds[rounds // 2], seconds[rounds * 99 // 100]


def work(blocks: int = 100_000) -> tuple[float, float]:
    """Return the seconds to hash a prompt of 64 blocks, and to apply the change of one block."""
    random, times = Random(0), []
    for _ in range(200):
        prompt = [random.randrange(1 << 15) for _ in range(1024)]
        began = time.perf_counter()
        extend_hashes([], prompt, 16, "", 64)
        times.append(time.perf_counter() - began)
    router = ReplicaRouter(["a"], 16, 64)
    pieces = [random.randbytes(16) for _ in range(blocks)]
    began = time.perf_counter()
    for i in range(0, blocks, 100):
        gone = pieces[i - 50_000 : i - 49_900] if i >= 50_000 else []
        changes = ContentChanges(1 + i // 100, pieces[i : i + 100], gone, cleared=i == 0)
        router.report(0, ReplicaReport(changes, 0.5, 1000.0))
    return statistics.median(times), (time.perf_counter() - began) / (blocks * 1.5)


def held(blocks: int = 100_000) -> int:
    """Return the bytes that a router keeps for a block of one replica."""
    random = Random(0)
    tracemalloc.start()
    router = ReplicaRouter(["a"], 16, 64)
    pieces = [random.randbytes(16) for _ in range(blocks)]
    router.report(0, ReplicaReport(ContentChanges(1, pieces, [], cleared=True), 0.0, 1.0))
    del pieces
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken // blocks


def way(requests: int) -> tuple[float, float]:
    """Return the median seconds of a request: direct, and through the proxy."""
    with serving(sys.executable, "-c", SERVER) as (_, direct):
        route = python_command("kvik", "route", f"http://127.0.0.1:{direct}", "--port", "0")
        with serving(*route, last="servers\n") as (_, front):
            body = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]}).encode()
            both = [HTTPConnection("127.0.0.1", port) for port in (direct, front)]
            found: list[list[float]] = [[], []]
            for i in range(2 * requests):
                connection = both[i % 2]
                began = time.perf_counter()
                connection.request("POST", "/v1/chat/completions", body)
                connection.getresponse().read()
                found[i % 2].append(time.perf_counter() - began)
    return statistics.median(found[0]), statistics.median(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=2000)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores")
    for replicas in (8, 64, 1000):
        blocks = max(5000, arguments.blocks * 8 // replicas)
        p50, p99 = choices(replicas, blocks)
        times = f"{p50 * 1e6:.1f} us, p99 {p99 * 1e6:.1f} us"
        print(f"a choice of {replicas} with {blocks} blocks each: {times}")
    hashed, applied = work()
    print(f"a prompt of 1,024 tokens is hashed in {hashed * 1e6:.0f} us")
    print(f"a stored or removed block takes a router {applied * 1e6:.2f} us, and memory {held()} B")
    direct, through = way(arguments.requests)
    print(f"a request directly {direct * 1e3:.3f} ms, through kvik route {through * 1e3:.3f} ms")
    print(f"added at the median: {(through - direct) * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
