"""What hostile schemas and grammars cost other clients: gaps of a stream, and memory afterwards.

    python benchmarks/hostile.py [--rounds 3] [-- MODEL and flags of kvik serve]

A server answers one stream of tokens without a pause. The gaps between tokens are measured first
alone, then while another client sends every constraint of a hostile corpus, one after another, each
under a new name so that none is cached. Prints the answer and the time of each constraint, the p50
and p99 of the gaps in both halves, and the resident memory of all server processes before and
after.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

from kvik.child_process import python_command
from kvik_bench.scripts import children, kibibytes, serving

QUIET_SECONDS = 10.0
SETTLE_SECONDS = 3.0


def corpus(tag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield constraints that would take long, or too much memory or stack, each with its name."""
    last = {f"{tag}{i}": {"items": {"$ref": f"#/$defs/{tag}{i + 1}"}} for i in range(2000)}
    chain = {"$defs": {**last, f"{tag}2000": {}}, "$ref": f"#/$defs/{tag}0"}
    yield "chain of 2,000 $refs", {"guided_json": chain}
    names = {f"{tag} {i}": {"type": "string"} for i in range(5000)}
    yield "5,000 optional properties", {"guided_json": {"type": "object", "properties": names}}
    nested: object = {"const": tag}
    for _ in range(11):
        nested = {"oneOf": [{"type": "object", "properties": {"k": nested}}, nested]}
    yield "nested oneOf", {"guided_json": nested}
    yield "enum of 20,000 texts", {"guided_json": {"enum": [f"{tag}{i}" for i in range(20_000)]}}
    yield "repetitions of repetitions", {"guided_regex": f"{tag}(a{{1,1000}}){{1,1000}}"}
    yield "(a|b)*a(a|b){60}", {"guided_regex": f"{tag}(a|b)*a(a|b){{60}}"}
    yield "deep groups", {"guided_regex": tag + "(" * 5000 + "a" + ")" * 5000}
    yield "deep grammar", {"guided_grammar": f'start: "{tag}" ' + "(" * 5000 + '"a"' + ")" * 5000}
    yield "remote $ref", {"guided_json": {"$ref": f"http://{tag}.example.org"}}


def post(port: int, body: dict[str, Any]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    head = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), head)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


class Stream(threading.Thread):
    """Reads tokens without a pause until `ended`; notes the gaps between them, in milliseconds."""

    def __init__(self, port: int, tokens: int) -> None:
        super().__init__(daemon=True)
        self._port, self._tokens = port, tokens
        self.gaps: list[float] = []
        self.ended = False
        self.error = ""

    def run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": self._tokens, "ignore_eos": True}
        while not self.ended and not self.error:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
            head = {"content-type": "application/json"}
            text = json.dumps({**body, "stream": True})
            connection.request("POST", "/v1/completions", text, head)
            answer, before = connection.getresponse(), 0.0
            if answer.status != 200:
                self.error = answer.read().decode()
            while not self.ended and (line := answer.readline()):
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if before:
                        self.gaps.append((now - before) * 1e3)
                    before = now
            connection.close()

    def taken(self) -> list[float]:
        """Return the gaps since the last call."""
        found, self.gaps = self.gaps, []
        return found


def memory(pid: int) -> float:
    """Return the resident MiB of a process and all its descendants."""
    return kibibytes(pid, "VmRSS") / 1024 + sum(map(memory, children(pid)))


def shown(gaps: list[float]) -> str:
    cuts = statistics.quantiles(gaps, n=100)
    return (
        f"p50 {cuts[49]:.2f} ms, p99 {cuts[98]:.2f} ms, most {max(gaps):.1f} ms, {len(gaps)} gaps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each streamed answer")
    parser.add_argument("words", nargs="*", help="arguments of kvik serve, after --")
    options = parser.parse_args()
    words = ["--port", "0", *options.words, "--log-level", "warning"]
    with serving(*python_command("kvik", "serve", *words)) as (pid, port):
        measure(pid, port, options.rounds, options.tokens)


def measure(pid: int, port: int, rounds: int, tokens: int) -> None:
    for _, asked in corpus("warm"):  # warm up lazy initialisation and the checking process
        post(port, {"prompt": "a", "max_tokens": 4, **asked})
    time.sleep(SETTLE_SECONDS)
    base = memory(pid)
    stream = Stream(port, tokens)
    stream.start()
    quiet: list[float] = []
    loud: list[float] = []
    slowest: dict[str, float] = {}
    answers: dict[str, str] = {}
    for round_ in range(rounds):
        stream.taken()
        time.sleep(QUIET_SECONDS)
        quiet += stream.taken()
        for name, asked in corpus(f"r{round_}"):
            started = time.perf_counter()
            status, answer = post(port, {"prompt": "Once", "max_tokens": 100, **asked})
            slowest[name] = max(slowest.get(name, 0.0), time.perf_counter() - started)
            if status == 200:
                answers[name] = f"200, {answer['choices'][0]['finish_reason']}"
            else:
                answers[name] = f"{status}, {answer['error']['code'] or answer['error']['param']}"
        loud += stream.taken()
    stream.ended = True
    stream.join(10)
    if stream.error:
        raise SystemExit(f"the stream failed: {stream.error}")
    time.sleep(SETTLE_SECONDS)
    for name, seconds in slowest.items():
        print(f"{name}: {answers[name]}; {seconds:.2f} s at most")
    print(f"the stream alone: {shown(quiet)}")
    print(f"the stream with them: {shown(loud)}")
    ratio = statistics.quantiles(loud, n=100)[98] / statistics.quantiles(quiet, n=100)[98]
    print(f"p99 with them / alone: {ratio:.2f}")
    print(f"memory: {base:.0f} MiB before, {memory(pid):.0f} MiB after")


if __name__ == "__main__":
    main()
