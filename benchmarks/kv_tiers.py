"""What tiers of the KV cache gain and cost.

    python benchmarks/kv_tiers.py first [--model FOLDER] [--tokens 4096] [--repeats 3]
    python benchmarks/kv_tiers.py unique [--model FOLDER] [--repeats 5]
    python benchmarks/kv_tiers.py lengths [--model FOLDER] [--tokens 16384] [--repeats 3]
    python benchmarks/kv_tiers.py load [--model FOLDER] [--repeats 3]
    python benchmarks/kv_tiers.py peer [--model FOLDER] [--tokens 8192] [--repeats 9]

"first": time to the first token of a prompt that is computed, and of an evicted one that is loaded
from memory, from the disk, and from the disk after the engine was killed. "unique": tokens per
second of prompts that share nothing, with and without tiers. "lengths": the same prompt computed,
and as the engine chose. "load": tokens per second with twice as many requests as fit, swapping
against recomputing; and the most that swapping could gain there if it took no time. "peer": bytes
per second of a prompt's pages lent by another process, once checked only and once also copied into
the KV cache; of the same number of bytes sent over a plain TCP socket into one buffer; and how much
of a prompt an engine computes when another one has its pages.

Alternatives are measured alternately, in one run; ratios are of neighbouring samples, with their
spread. FOLDER needs only a config.json: weights are random. Without it the bundled model runs.
`--tp 2` and `--pp 2` divide the model.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvik import LLM
from kvik.config.config import EngineConfig
from kvik.core.block_pool import extend_hashes
from kvik.core.config import CacheConfig
from kvik.core.plan import PageKey
from kvik.core.types import EngineRequest, PageSource, RequestDelta
from kvik.engine.loop import EngineLoop
from kvik.launch import load_loop, resolve_config
from kvik.worker.page_mover import JOB_PAGES, THREADS
from kvik.worker.peer_tier import PeerPages
from kvik.worker.worker import cache_fingerprint
from kvik_bench.scripts import greedy, random_prompts, seconds_of, spread

ONE = greedy(1)
BLOCK = 16
PAGE = 1 << 21  # bytes, more than any page here


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", choices=("first", "unique", "lengths", "load", "peer", "child", "lender")
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="of the disk tier; none: a temporary one")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt under load")
    parser.add_argument("--output", type=int, default=512, help="tokens of an answer under load")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--only", help="one of the tiers of unique")
    parser.add_argument("--tp", type=int, default=1, help="tensor_parallel_size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline_parallel_size")
    options = parser.parse_args()
    ways = {"first": first, "unique": unique, "lengths": lengths, "load": load, "child": child}
    ways |= {"peer": peer, "lender": lender}
    with tempfile.TemporaryDirectory() as folder:
        options.folder = options.folder or Path(folder) / "kv"
        ways[options.what](options)


def engine(options: Namespace, blocks: int, context: int, **more: Any) -> LLM:
    common: dict[str, Any] = {"device": "cpu", "num_blocks": blocks, "max_model_len": context}
    common |= {"tensor_parallel_size": options.tp, "pipeline_parallel_size": options.pp}
    if options.model:
        common |= {"load_format": "random", "seed": 1, "quantization": options.quantization}
    return LLM(options.model, **common, **more)


def prompt(tokens: int, seed: int) -> list[int]:
    return random_prompts(1, tokens, seed)[0]


def seconds_to_first(llm: LLM, tokens: Sequence[int], cached: int | None = None) -> float:
    """Return the time to the first token; `cached`: tokens that must be cache hits or loaded."""
    (output,) = llm.generate([list(tokens)], ONE)
    assert cached is None or output.num_cached_tokens == cached, output.num_cached_tokens
    return output.metrics.first_token - output.metrics.arrival


def tell(name: str, ratios: Sequence[float], **more: object) -> None:
    print(f"{name}: {spread(ratios, '.3g')}", json.dumps(more), flush=True)


def first(options: Namespace) -> None:
    tokens = options.tokens or 4096
    found = (tokens - 1) // BLOCK * BLOCK
    blocks = tokens // BLOCK + 8  # one prompt fits
    disk = f"disk:{options.folder}:8GiB"
    for name, tiers in (("memory", "memory:1GiB"), ("disk", disk)):
        cold, warm = [], []
        with engine(options, blocks, tokens + 16, kv_tiers=tiers, max_num_seqs=1) as llm:
            seconds_to_first(llm, prompt(tokens // 4, 99))
            seconds_to_first(llm, prompt(tokens, 0), 0)
            for i in range(1, options.repeats + 1):
                cold.append(seconds_to_first(llm, prompt(tokens, i), 0))
                warm.append(seconds_to_first(llm, prompt(tokens, i - 1), found))
        ratios = [c / w for c, w in zip(cold, warm, strict=True)]
        tell(f"{name}, cold over loaded", ratios, cold=cold, loaded=warm)
    ratios, cold, warm = [], [], []
    for i in range(options.repeats):
        words = [sys.executable, __file__, "child", "--model", options.model]
        words += ["--quantization", options.quantization, "--tokens", str(tokens)]
        words += ["--folder", str(options.folder), "--repeats", str(1000 + i)]
        words += ["--tp", str(options.tp), "--pp", str(options.pp)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            cold.append(float(process.stdout.readline()))
            time.sleep(1.0)
            process.kill()
        with engine(options, blocks, tokens + 16, kv_tiers=disk) as llm:
            seconds_to_first(llm, prompt(64, 99))
            warm.append(seconds_to_first(llm, prompt(tokens, 1000 + i), found))
        ratios.append(cold[-1] / warm[-1])
    tell("disk after a kill, cold over loaded", ratios, cold=cold, loaded=warm)


def child(options: Namespace) -> None:
    """Run an engine until this process is killed."""
    tokens = options.tokens
    tiers = f"disk:{options.folder}:8GiB"
    with engine(options, tokens // BLOCK + 8, tokens + 16, kv_tiers=tiers) as llm:
        seconds_to_first(llm, prompt(tokens // 4, 99))
        print(seconds_to_first(llm, prompt(tokens, options.repeats)), flush=True)
        while True:
            time.sleep(1.0)


def unique(options: Namespace) -> None:
    tiers = {
        "none": None,  # any difference here is noise
        "memory": "memory:1GiB",
        "disk": f"disk:{options.folder}:4GiB",
        "memory and disk": f"memory:1GiB,disk:{options.folder}:4GiB",
    }
    for name, how in tiers.items():
        if options.only not in (None, name):
            continue
        with ExitStack() as stack:
            sides = [
                stack.enter_context(engine(options, 4 * 36 + 8, 1024, kv_tiers=each))
                for each in (None, how)
            ]
            seed, ratios = 0, []
            for i in range(options.repeats + 1):
                seconds = [0.0, 0.0]
                for side in (0, 1) if i % 2 else (1, 0):
                    asked = [prompt(512, (seed := seed + 1)) for _ in range(4)]
                    seconds[side] = seconds_of(sides[side], asked, 32)
                if i:  # the first round warms up
                    ratios.append(seconds[0] / seconds[1])
        tell(f"unique prompts with {name}, throughput over none", ratios)


def lengths(options: Namespace) -> None:
    most = options.tokens or 16384
    length = 64
    while length <= most:
        repeats = options.repeats if length < most else 1
        # Only one prompt fits, so each evicts the one before.
        with engine(options, length // BLOCK + 1, length + 16, kv_tiers="memory:2GiB") as llm:
            seconds_to_first(llm, prompt(64, 99))
            seconds_to_first(llm, prompt(length + 1, 0), 0)
            computed, chosen = [], []
            for i in range(1, repeats + 1):
                computed.append(seconds_to_first(llm, prompt(length + 1, i), 0))
                chosen.append(seconds_to_first(llm, prompt(length + 1, i - 1)))
            totals = llm.stats().moves.totals
        tell(
            f"{length} tokens, computed over chosen",
            [a / b for a, b in zip(computed, chosen, strict=True)],
            chosen=chosen,
            loaded=totals.load_choices,
            not_loaded=totals.compute_choices,
        )
        length *= 4


def load(options: Namespace) -> None:
    half, rng = options.prompt // 2, random.Random(0)
    drawn = [rng.randrange(half, 3 * half) for _ in range(options.requests)]  # for both sides
    blocks = sum(-(-(tokens + options.output) // BLOCK) for tokens in drawn) // 2
    with ExitStack() as stack:
        sides = [
            stack.enter_context(
                engine(options, blocks, 3 * half + options.output + 16, kv_tiers=tiers)
            )
            for tiers in (None, "memory:2GiB")
        ]
        ratios, seconds, seed, ceilings = [], [], 0, []
        again, at = 0, 0.0  # tokens recomputed so far; seconds per prompt token
        for i in range(options.repeats):
            # As long as a preempted request is on average.
            once = prompt(options.prompt + options.output // 2, 10**6 + i)
            at = seconds_to_first(sides[0], once, 0) / len(once)
            pair = [0.0, 0.0]
            for side in (0, 1) if i % 2 else (1, 0):
                seed += 1
                asked = [prompt(each, 100 * seed + j) for j, each in enumerate(drawn)]
                pair[side] = seconds_of(sides[side], asked, options.output)
            seconds.append(pair)
            ratios.append(pair[0] / pair[1])
            before, again = again, sides[0].stats().work.recomputed_tokens
            ceilings.append(pair[0] / (pair[0] - (again - before) * at))
        stats = [side.stats() for side in sides]
        tell(
            "twice the load that fits, goodput over recomputing",
            ratios,
            seconds=seconds,
            most=[round(each, 3) for each in ceilings],
            preemptions=[each.preemptions for each in stats],
            recomputed_tokens=[each.work.recomputed_tokens for each in stats],
        )


TOKEN = b"of this benchmark"


def side(options: Namespace, role: str, tokens: int) -> EngineLoop:
    """Return an engine with a role, as a server runs it in a separate process."""
    asked: dict[str, Any] = {"model": options.model, "device": "cpu", "role": role}
    if options.model:
        asked |= {"load_format": "random", "seed": 1, "quantization": options.quantization}
    if role == "prefill":
        asked["kv_tiers"] = "memory:1GiB"
    config = EngineConfig(**asked, num_blocks=tokens // BLOCK + 8, max_model_len=tokens + 16)
    return load_loop(resolve_config(config), token=TOKEN)


def until_done(loop: EngineLoop) -> RequestDelta:
    """Step until the one request of an engine has ended; returns its last delta."""
    last: RequestDelta | None = None
    while last is None or last.finish_reason is None:
        last = next(reversed(loop.step()), last)
    return last


def lender(options: Namespace) -> None:
    """Run the other process: for each line of input, lend a prompt or send bytes."""
    loop, tokens = side(options, "prefill", options.tokens), prompt(options.tokens, 0)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    for number, line in enumerate(sys.stdin):
        if line.strip() != "lend":
            data = memoryview(np.ones(int(line), np.uint8))
            print("ready", flush=True)
            with listening.accept()[0] as peer:
                peer.sendall(data)
            continue
        loop.add(EngineRequest(f"{number}", tokens, ONE, lends=True))
        last = until_done(loop)
        loop.step()  # the lease begins
        print(json.dumps(asdict(last.page_source)), flush=True)


def peer(options: Namespace) -> None:
    tokens = options.tokens or 8192
    words = [sys.executable, __file__, "lender", "--model", options.model, "--tokens", str(tokens)]
    words += ["--quantization", options.quantization]
    ratios, loaded_ratios, computed = [], [], []
    rates: dict[str, list[float]] = {"fetched": [], "loaded": [], "plain": []}
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        loop = side(options, "decode", tokens)
        port, moves = int(process.stdout.readline()), loop.core.scheduler.moves
        counters, cache = moves.index.tiers["peer"].counters, loop.core.config.cache
        page_bytes = moves.index.sizes.page_bytes
        hashes: list[bytes] = []
        extend_hashes(hashes, prompt(tokens, 0), BLOCK, cache.salt, (tokens - 1) // BLOCK)
        keys = [(group, key) for key in hashes for group in range(len(cache.groups))]
        peers = PeerPages(TOKEN, cache_fingerprint(loop.core.config))
        for i in range(options.repeats + 1):
            fetched_seconds = seconds_to_fetch(peers, lent(process), keys, cache)
            source = lent(process)
            loop.reset_prefix_cache()
            before, work = counters.loaded, loop.stats().work.prefill_tokens
            loop.add(EngineRequest(f"{i}", prompt(tokens, 0), ONE, source=source))
            began = time.monotonic()
            loop.step()
            while moves.loads:
                loop.step()
            pages_seconds = time.monotonic() - began
            size = (counters.loaded - before) * sum(page_bytes) // len(page_bytes)
            until_done(loop)
            computed.append(loop.stats().work.prefill_tokens - work)
            process.stdin.write(f"{size}\n")
            process.stdin.flush()
            target = memoryview(np.ones(size, np.uint8))  # already paged in, as the cache is
            assert process.stdout.readline() == "ready\n"
            began = time.monotonic()
            with socket.create_connection(("127.0.0.1", port)) as plain:
                while target:
                    target = target[plain.recv_into(target) :]
            plain_seconds = time.monotonic() - began
            if i:  # the first round warms up
                ratios.append(plain_seconds / fetched_seconds)
                loaded_ratios.append(plain_seconds / pages_seconds)
                seconds = (fetched_seconds, pages_seconds, plain_seconds)
                for name, each in zip(rates, seconds, strict=True):
                    rates[name].append(round(size / each / 1e9, 2))
        process.stdin.close()
        peers.close()
        loop.close()
    tell("pages of another engine, checked, over a plain socket copy", ratios, **rates)
    tell("the same and in the cache", loaded_ratios, MB=size // 10**6, computed=computed)


def lent(process: subprocess.Popen[str]) -> PageSource:
    process.stdin.write("lend\n")
    process.stdin.flush()
    return PageSource(**json.loads(process.stdout.readline()))


def seconds_to_fetch(
    peers: PeerPages, source: PageSource, keys: list[PageKey], cache: CacheConfig
) -> float:
    """Return the seconds of a fetch in two threads, as an engine does it."""
    sizes = cache.tiers.page_bytes

    def fetch(first: int) -> bool:
        pages = peers.fetch(source, keys[first : first + JOB_PAGES], sizes)
        return all(page is not None for page in pages)

    with ThreadPoolExecutor(THREADS) as pool:
        began = time.monotonic()
        assert all(pool.map(fetch, range(0, len(keys), JOB_PAGES)))
        return time.monotonic() - began


if __name__ == "__main__":
    main()
