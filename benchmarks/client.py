"""What the client of `kvik bench serve` costs: processor seconds for each request and each token.

    python benchmarks/client.py [--rate 200] [--tokens 10] [--seconds 15]

A server in another process streams one token at a time, at 200 requests and 2,000 tokens a second,
once with one token per request and once with ten: the difference is the cost of the tokens. It
measures processor time, not wall time, so a busy machine matters little.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection

from kvik_bench.load.drive import Budget, OpenLoop, RunLog, drive
from kvik_bench.load.metrics import output_tokens
from kvik_bench.load.openai_target import OpenAITarget, TargetServer, connected
from kvik_bench.load.serve import MAX_CPU_SHARE, SEND_LAG
from kvik_bench.load.workload import DrawnLengths, Length, RandomWorkload, WordFiller, poisson

GAP = 0.02  # seconds between the tokens of an answer
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = (
    b'data: {"id":"cmpl-3f2a7c1be0d94c6fa3","object":"text_completion","created":1731780000,'
    b'"model":"some/model-1b","choices":[{"index":0,"text":" word","logprobs":null,'
    b'"finish_reason":%s,"stop_reason":null}],"usage":{"prompt_tokens":128,"total_tokens":160,'
    b'"completion_tokens":%d}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def serve(pipe: Connection, tokens: int) -> None:
    """Answer every POST with `tokens` tokens; sends its port through the pipe."""

    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(data), data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().split(b"content-length:")[1].split(b"\r\n")[0]
                await reader.readexactly(int(length))
                writer.write(HEAD)
                for i in range(tokens):
                    await asyncio.sleep(GAP)
                    reason = b'"length"' if i == tokens - 1 else b"null"
                    writer.write(chunk(TOKEN % (reason, i + 1)))
                writer.write(chunk(DONE) + b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


@dataclass(frozen=True)
class Cost:
    """The cost of one run of the client."""

    requests: int
    tokens: int
    chunks: int
    cpu: float  # seconds
    share: float  # of a core
    lag: float  # milliseconds, 99th percentile


async def load(url: str, tokens: int, prompt_tokens: int, rate: float, seconds: float) -> Cost:
    server = TargetServer(url, "completions", "some/model-1b")
    lengths = DrawnLengths(Length("fixed", prompt_tokens), Length("fixed", tokens), "0")
    workload = RandomWorkload(lengths, WordFiller(), "0")
    log = RunLog()
    async with connected(server) as session:
        target = OpenAITarget(server, session)
        await drive(OpenLoop(poisson(rate, "warm"), 512), target, workload, Budget(50), RunLog())
        gc.collect()
        budget = Budget(duration=seconds)
        await drive(OpenLoop(poisson(rate, "0"), 512), target, workload, budget, log)
    lag = SEND_LAG.of(log)
    assert not log.failed and lag is not None, next(r.detail for r in log.records if r.error)
    chunks = sum(len(record.times) for record in log.records)
    tokens = output_tokens(log)
    return Cost(len(log.records), tokens, chunks, log.cpu_seconds, log.cpu_share, lag)


def measure(tokens: int, prompt_tokens: int, rate: float, seconds: float) -> Cost:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(theirs, tokens), daemon=True)
    process.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}"
        run: Coroutine[None, None, Cost] = load(url, tokens, prompt_tokens, rate, seconds)
        return asyncio.run(run)
    finally:
        process.terminate()
        process.join()


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second (200)")
    parser.add_argument("--tokens", type=int, default=10, help="of an answer (10)")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run (15)")
    args = parser.parse_args()
    print("prompt  output  requests  tokens   chunks  CPU, s  of a core  send lag p99, ms")
    for prompt_tokens in args.prompt_tokens:
        costs = []
        for tokens in (1, args.tokens):
            cost = measure(tokens, prompt_tokens, args.rate, args.seconds)
            costs.append(cost)
            print(
                f"{prompt_tokens:6}{tokens:8}{cost.requests:10}{cost.tokens:8}{cost.chunks:9}"
                f"{cost.cpu:8.2f}{cost.share:11.1%}{cost.lag:18.2f}"
            )
        one, many = costs
        token = (many.cpu - one.cpu * many.requests / one.requests) / (many.tokens - many.requests)
        request = one.cpu / one.requests - token
        share = args.rate * (request + args.tokens * token)
        verdict = "is the bottleneck" if share > MAX_CPU_SHARE else "is not the bottleneck"
        print(
            f"{request * 1e6:.0f} us for a request with {prompt_tokens} words, "
            f"{token * 1e6:.0f} us for a token: {args.rate:.0f} requests and "
            f"{args.rate * args.tokens:.0f} tokens a second take {share:.0%} of a core; "
            f"the client {verdict}\n"
        )


if __name__ == "__main__":
    main()
