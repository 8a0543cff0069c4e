"""Measure a window with attention sinks: perplexity beyond the window, time of a step, memory.

    python benchmarks/attention_sinks.py perplexity [--window 252] [--sinks 4] [--segments 21]
    python benchmarks/attention_sinks.py speed [--model FOLDER] [--window 252] [--tokens 200000]
    python benchmarks/attention_sinks.py speed --prompts 2048,16384 --random --model FOLDER ...
    python benchmarks/attention_sinks.py steps [--window 1020] [--repeats 3]
    python benchmarks/attention_sinks.py memory [--tokens 200000]

"perplexity" reads texts of several segments of sinks + window tokens as a prompt, with sinks, with
a plain window, and with all keys, beyond the trained length. "speed" decodes one request and prints
the median step time at several lengths; a prompt fills the context up to the lengths of --prompts,
and --random needs only a config.json. "steps" uses the shape of Llama-3.2-1B with random weights
and a random KV cache: a step of one request after contexts that were never computed, alternately
with sinks and with a plain window. "memory" prints the resident memory while it decodes.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kv_budget import ONE_BILLION, STEPS, WARM, draw_cache, loaded

from kvik import LLM, SamplingParams
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.model_source import BUNDLED
from kvik.core.plan import NewRequest, SchedulerOutput
from kvik.worker.worker import Worker
from kvik_bench.scripts import kibibytes

SEED = SamplingParams(temperature=0.8, seed=1, ignore_eos=True)
STARTED = 8192  # tokens after which lazily filled caches (token texts, for example) are full


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("perplexity", "speed", "steps", "memory"))
    parser.add_argument("--model", default="")
    parser.add_argument("--window", type=int, default=252)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--segments", type=int, default=21)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--prompts", default="", help="lengths of prompts, with commas")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--random", action="store_true", help="weights of a config.json alone")
    parser.add_argument("--data", type=Path, default=BUNDLED.parent / "calibration" / "text.txt")
    options = parser.parse_args()
    run = {"perplexity": perplexity, "speed": speed, "steps": steps, "memory": memory}
    run[options.what](options)


def ways(options: Namespace) -> dict[str, dict[str, Any]]:
    sinks, window = options.sinks, options.window
    return {
        f"{sinks} sinks + {window}": {"attention_sinks": sinks, "window": window},
        f"window of {sinks + window}": {"window": sinks + window},
    }


def common(options: Namespace) -> dict[str, Any]:
    found = {"device": "cpu", "threads": options.threads, "max_num_seqs": 1}
    return found | ({"load_format": "random"} if options.random else {})


@contextmanager
def with_context(model: str, tokens: int) -> Iterator[str]:
    """Yield a copy of the model folder with another trained length in its config.json."""
    folder = Path(model) if model else BUNDLED
    with tempfile.TemporaryDirectory() as name:
        for file in folder.iterdir():
            (Path(name) / file.name).symlink_to(file.resolve())
        config = json.loads((folder / "config.json").read_text())
        (Path(name) / "config.json").unlink()
        changed = {**config, "max_position_embeddings": tokens}
        (Path(name) / "config.json").write_text(json.dumps(changed))
        yield name


def perplexity(options: Namespace) -> None:
    size = options.sinks + options.window
    length = options.segments * size
    text = options.data.read_text(encoding="utf-8")
    runs = {name: (options.model, more) for name, more in ways(options).items()}
    with with_context(options.model, length + 1) as longer:
        runs["all keys"] = (longer, {})
        for name, (model, more) in runs.items():
            with LLM(model, **common(options), **more, max_model_len=length + 1) as llm:
                ids = llm.tokenizer.encode(text)
                texts = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
                sums = [0.0] * options.segments
                for each in texts:
                    scored = llm.generate(each, SamplingParams(max_tokens=0, prompt_logprobs=0))
                    logprobs = scored[0].prompt_logprobs or []
                    for i, one in enumerate(logprobs):
                        sums[i // size] += one.logprob if one is not None else 0.0
            by_segment = [math.exp(-total / len(texts) / size) for total in sums]
            shown = {n: by_segment[n - 1] for n in (1, 2, 4, 5, 8, 12, 16, 20, 21)}
            row = " | ".join(f"{n}: {value:.2f}" for n, value in shown.items())
            last = math.exp(sum(map(math.log, by_segment[-5:])) / 5)
            print(f"{name} | {len(texts)} texts | {row} | mean of the last five {last:.2f}")


def behind_prompts(options: Namespace) -> None:
    lengths = [int(word) for word in options.prompts.split(",")]
    with ExitStack() as stack:
        common_options = {**common(options), "enable_prefix_caching": False}
        engines = {
            name: stack.enter_context(
                LLM(options.model, **common_options, **more, max_model_len=2 * max(lengths))
            )
            for name, more in ways(options).items()
        }
        gaps: dict[tuple[str, int], list[float]] = {}
        for length in (*lengths, *lengths):  # each length twice, alternately
            for name, llm in engines.items():
                found = gaps.setdefault((name, length), [])
                prompt = [5 + i % 1000 for i in range(length)]
                last = None
                for _ in llm.stream(prompt, SEED.with_changes(max_tokens=48)):
                    now = time.perf_counter()
                    found += [] if last is None else [now - last]
                    last = now
    for (name, length), found in gaps.items():
        print(f"{name} | {length}: {statistics.median(found) * 1e3:.2f} ms", flush=True)


def speed(options: Namespace) -> None:
    if options.prompts:
        behind_prompts(options)
        return
    size = options.sinks + options.window
    marks = [n for n in (2 * size, 8 * size, 32_768, 100_000, 200_000) if n <= options.tokens]
    for name, more in ways(options).items():
        longest = {"max_model_len": options.tokens + 1024}
        with LLM(options.model, **common(options), **more, **longest) as llm:
            gaps: dict[int, list[float]] = {mark: [] for mark in marks}
            last = time.perf_counter()
            params = SEED.with_changes(max_tokens=options.tokens)
            count = 0
            for delta in llm.stream([1, 2, 3], params):
                now = time.perf_counter()
                count += len(delta.token_ids)
                for mark, found in gaps.items():
                    if mark - 256 <= count <= mark:
                        found.append(now - last)
                last = now
        row = " | ".join(f"{n}: {statistics.median(g) * 1e6:.0f} us" for n, g in gaps.items())
        print(f"{name} | {row}", flush=True)


def steps(options: Namespace) -> None:
    size = options.sinks + options.window
    contexts = [2 * size, 16 * size, 65_536, 200_000]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        (Path(name) / "config.json").write_text(json.dumps(ONE_BILLION))
        workers = {}
        for way, more in ways(options).items():
            facts = {"load_format": "random", "max_model_len": 262_144}
            facts |= {"max_num_batched_tokens": 64, "num_blocks": size // 16 + 16}
            config = EngineConfig(name, **common(options), **facts, **more)
            workers[way] = stack.enter_context(loaded(config))
            draw_cache(workers[way][1])
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(options.repeats):
            for context in contexts:
                for way, (resolved, worker) in workers.items():
                    again = any(key[0] == way for key in found)
                    seconds = decode_behind(resolved, worker, context, again)
                    found.setdefault((way, context), []).append(statistics.median(seconds))
    for way in workers:
        row = {context: statistics.median(found[way, context]) for context in contexts}
        shown = " | ".join(f"{n}: {seconds * 1e3:.1f} ms" for n, seconds in row.items())
        least = row[contexts[0]]
        print(
            f"{way} | {shown} | {max(abs(s / least - 1) for s in row.values()):.1%} from the first"
        )


def decode_behind(
    resolved: ResolvedConfig, worker: Worker, context: int, again: bool
) -> list[float]:
    """Return the seconds of each step of one request whose context is in the cache.

    Args:
        again: an earlier request has run and ended.
    """
    (group,), block = resolved.cache.groups, resolved.cache.block_size
    blocks = range(-(-(context + WARM + STEPS) // block))
    hidden = group.visible.hidden_blocks(context, block)
    free = iter(range(1, resolved.cache.pool_size))
    table = [0 if i in hidden else next(free) for i in blocks]
    text, seconds = [5 + i % 1000 for i in range(context)], []
    for step in range(WARM + STEPS):
        new = NewRequest(0, [*text, 7], context, context, [table], SEED, frozenset(), 0)
        plan = SchedulerOutput(
            *(step, [0], [1], [0], [True]),
            new_requests=[new] if step == 0 else [],
            freed_slots=[0] if step == 0 and again else [],
        )
        began = time.perf_counter()
        worker.result(worker.submit(plan))
        seconds.append(time.perf_counter() - began)
    return seconds[WARM:]


def memory(options: Namespace) -> None:
    (name, more), *_ = ways(options).items()
    with LLM(options.model, **common(options), **more, max_model_len=1_000_000) as llm:
        count, marks, first = 0, [STARTED * 2**i for i in range(6)], 0
        for delta in llm.stream([1, 2, 3], SEED.with_changes(max_tokens=options.tokens + 1)):
            count += len(delta.token_ids)
            if count in marks or count == options.tokens:
                resident = kibibytes("self", "VmRSS")
                first = first or resident
                print(
                    f"{name} | {count} tokens | {resident / 2**10:.1f} MiB | "
                    f"{resident / first - 1:+.2%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
