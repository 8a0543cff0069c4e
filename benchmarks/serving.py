"""What the server adds to the engine: throughput, time to the first token, processor time.

    python benchmarks/serving.py [--rounds 7] [--streams 32] [--tokens 384] [--seconds 10]
    python benchmarks/serving.py --only cost       # steps are paced: it suits a busy machine

throughput: 32 concurrent streams of `kvik serve`, compared with `LLM.generate` in a separate
    process, on the same prompts and with the model's defaults; tokens/s, and the ratio per round.
ttft: one request at a time, of one token: sent -> first text, compared with `LLM.stream`.
cost: 32 streams of 2,000 tokens/s in all, as each engine step is made to take 16 ms; processor
    seconds of the HTTP process per second.

Rounds alternate between the two sides, which do not run at the same time; medians are printed with
the smallest and the largest round. The client is this process: bare sockets that only count.
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvik.child_process import python_command
from kvik_bench.scripts import cpu_seconds, serving

PROMPT = "Once upon a time there was a little fox who lived by the river with her mother."
END = b"0\r\n\r\n"  # of a chunked body
USAGE = re.compile(rb'"completion_tokens":(\d+)')
PACED_STEP = 0.016  # seconds: 32 streams of one token each are 2,000 tokens/s
ENGINE_OPTIONS: dict[str, Any] = {"max_num_seqs": 32, "enable_prefix_caching": False}


def body(prompt: str, tokens: int) -> dict[str, object]:
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def prompts(count: int, round_: int) -> list[str]:
    return [f"{round_} {i} {PROMPT}" for i in range(count)]


# The client


@dataclass
class Streamed:
    """The outcome of several streams that started together."""

    seconds: float
    first: float  # seconds to the first text of any
    tokens: int
    events: int


def stream(port: int, bodies: Sequence[dict[str, object]]) -> Streamed:
    """Send each request on its own connection, all at once, and read the answers."""
    selector = selectors.DefaultSelector()
    requests = [_request(one) for one in bodies]
    came: dict[socket.socket, bytearray] = {}
    for _ in bodies:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(sock, selectors.EVENT_READ)
        came[sock] = bytearray()
    first = 0.0
    began = time.perf_counter()
    for sock, data in zip(came, requests, strict=True):
        sock.sendall(data)
    left = len(came)
    while left:
        for key, _ in selector.select():
            readable = key.fileobj
            assert isinstance(readable, socket.socket)
            data = readable.recv(1 << 16)
            if not data:
                raise SystemExit(f"the server hung up after {bytes(came[readable][-500:])!r}")
            came[readable] += data
            if not first and b'"text":"' in data:
                first = time.perf_counter() - began
            if data.endswith(END):
                selector.unregister(readable)
                left -= 1
    seconds = time.perf_counter() - began
    tokens = events = 0
    for sock, answer in came.items():
        sock.close()
        found = USAGE.findall(answer)
        if not found:
            raise SystemExit(f"the server answered {bytes(answer[:500])!r}")
        tokens += int(found[-1])
        events += answer.count(b"data: ")
    return Streamed(seconds, first, tokens, events)


def _request(content: dict[str, object]) -> bytes:
    data = json.dumps(content).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


# The two sides


class InProcess:
    """`LLM` in a process that runs one command for each line it is sent."""

    def __init__(self, options: Sequence[str]) -> None:
        command = [sys.executable, __file__, "--role", "inprocess", *options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str, texts: Sequence[str], tokens: int) -> float:
        self._process.stdin.write(json.dumps([what, texts, tokens]) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def serve_in_process(model: str) -> None:
    from kvik import LLM

    with LLM(model, **ENGINE_OPTIONS) as llm:
        for line in sys.stdin:
            what, texts, tokens = json.loads(line)
            params = llm.default_params.with_changes(
                temperature=0.0, max_tokens=tokens, ignore_eos=True
            )
            began = time.perf_counter()
            if what == "generate":
                llm.generate(texts, params, progress=False)
            else:
                next(llm.stream(texts[0], params))
            print(time.perf_counter() - began, flush=True)


def serve_paced(model: str) -> None:
    """Run `kvik serve` with an engine whose steps are paced."""
    import uvloop

    from kvik.config.config import EngineConfig
    from kvik.config.server_config import ServerConfig
    from kvik.engine.client import EngineClient
    from kvik.engine.sources import Supervisor, restart_policy
    from kvik.engine.wire import EngineStart
    from kvik.launch import load_tokenizer, resolve_config
    from kvik.model_files import model_files
    from kvik.server.access import Keys
    from kvik.server.app import all_routes, make_app
    from kvik.server.metrics import RequestMetricsObserver
    from kvik.server.run import Port, bind, serve
    from kvik.server.server import assemble
    from kvik.server.texts import Texts

    resolved = resolve_config(EngineConfig(model=model, **ENGINE_OPTIONS))
    command = (sys.executable, __file__, "--role", "engine")
    supervisor = Supervisor(command, EngineStart(resolved), restart_policy(resolved), _show_error)
    requests = RequestMetricsObserver()
    parts = assemble(
        ServerConfig(),
        EngineClient(resolved, [supervisor]),
        Texts(load_tokenizer(resolved), resolved.scheduler.max_model_len),
        model_files(Path(resolved.runner.model_path)).default_params(),
        Keys(),
        ("paced",),
        [requests],
    )
    listening = bind("127.0.0.1", 0)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    port = Port(make_app(parts, all_routes(parts, requests)), listening)
    uvloop.run(serve(parts, [port], lambda line: print(line, flush=True)))


def _show_error(text: str) -> None:
    sys.stderr.write(text)


# What is measured


def throughput(args: argparse.Namespace, inside: InProcess, port: int) -> None:
    ratios: list[float] = []
    served: list[float] = []
    direct: list[float] = []
    events: list[float] = []
    for round_ in range(-2, args.rounds):
        texts = prompts(args.streams, round_)
        total = args.streams * args.tokens
        rate = total / inside.ask("generate", texts, args.tokens)
        streamed = stream(port, [body(text, args.tokens) for text in texts])
        assert streamed.tokens == total
        if round_ >= 0:  # earlier rounds warm up
            direct.append(rate)
            served.append(total / streamed.seconds)
            ratios.append(served[-1] / rate)
            events.append(streamed.events / total)
    show("LLM.generate, tokens/s", direct, "{:,.0f}")
    show("kvik serve, tokens/s", served, "{:,.0f}")
    show("events for each token", events, "{:.2f}")
    show("ratio (at least 0.85 is wanted)", ratios, "{:.3f}")


def ttft(args: argparse.Namespace, inside: InProcess, port: int) -> None:
    direct: list[float] = []
    served: list[float] = []
    for i in range(args.requests):
        (text,) = prompts(1, i)
        direct.append(inside.ask("stream", [text], 8) * 1e3)
        served.append(stream(port, [body(text, 8)]).first * 1e3)
    show("LLM.stream, ms", direct[5:], "{:.2f}")
    show("kvik serve, ms", served[5:], "{:.2f}")
    added = statistics.median(served[5:]) - statistics.median(direct[5:])
    print(f"  {'added (at most 15 ms are wanted)':36}{added:.2f}")


def cost(args: argparse.Namespace, pid: int, port: int) -> None:
    tokens = 192
    shares: list[float] = []
    rates: list[float] = []
    events: list[float] = []
    until = time.perf_counter() + args.seconds
    stream(port, [body(text, 16) for text in prompts(args.streams, 0)])
    while time.perf_counter() < until or not shares:
        before = cpu_seconds(pid)  # of the HTTP process alone
        streamed = stream(port, [body(text, tokens) for text in prompts(args.streams, 1)])
        used = cpu_seconds(pid) - before
        rates.append(streamed.tokens / streamed.seconds)
        events.append(streamed.events / streamed.tokens)
        shares.append(used / streamed.tokens * 2000)
    show("tokens/s", rates, "{:,.0f}")
    show("events for each token", events, "{:.2f}")
    show("cores at 2,000 tokens/s (below 0.5)", shares, "{:.3f}")


def show(name: str, values: Sequence[float], form: str) -> None:
    middle, low, high = (form.format(f(values)) for f in (statistics.median, min, max))
    print(f"  {name:36}{middle}  ({low} to {high})", flush=True)


def run_engine(number: int, beats: int) -> None:
    """Run the engine's process, paced."""
    from kvik.core.plan import SchedulerOutput
    from kvik.engine.host import EngineHost
    from kvik.engine.wire import HostSocket, to_start
    from kvik.engine_process import beat
    from kvik.launch import load_loop

    line = HostSocket(socket.socket(fileno=number))
    _beating = beat(beats)
    while not (bodies := line.receive(None)):
        pass
    loop = load_loop(to_start.decode(bodies[0]).config, None)
    submit, due = loop.executor.submit, 0.0

    def submit_paced(plan: SchedulerOutput) -> object:
        nonlocal due
        time.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + PACED_STEP
        return submit(plan)

    loop.executor.submit = submit_paced
    EngineHost(loop, line).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="folder; the bundled model if left out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=384, help="output tokens of each stream")
    parser.add_argument("--requests", type=int, default=45, help="one at a time, for ttft")
    parser.add_argument("--seconds", type=float, default=10.0, help="of paced streaming")
    parser.add_argument("--only", choices=["throughput", "ttft", "cost"])
    parser.add_argument("--role", choices=["inprocess", "paced", "engine"], help=argparse.SUPPRESS)
    parser.add_argument("numbers", nargs="*", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = ["--model", args.model] if args.model else []
    match args.role:
        case "inprocess":
            serve_in_process(args.model)
        case "paced":
            serve_paced(args.model)
        case "engine":
            run_engine(*args.numbers)
        case None:
            measure(args, model)


def measure(args: argparse.Namespace, model: Sequence[str]) -> None:
    if args.only != "cost":
        flags = ["--max-num-seqs", "32", "--no-enable-prefix-caching", "--log-level", "error"]
        inside = InProcess(model)
        parts: dict[str, Callable[..., None]] = {"throughput": throughput, "ttft": ttft}
        command = python_command("kvik", "serve", *model[1:], "--port", "0", *flags)
        with serving(*command) as (_, port):
            for name, part in parts.items():
                if args.only in (None, name):
                    print(name)
                    part(args, inside, port)
        inside.close()
    if args.only in (None, "cost"):
        print("cost")
        with serving(sys.executable, __file__, "--role", "paced", *model) as (pid, port):
            cost(args, pid, port)


if __name__ == "__main__":
    main()
