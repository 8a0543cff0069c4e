"""What `AsyncLLM` costs compared with `LLM`: many streams at once, alternately.

    python benchmarks/async_engine.py [MODEL] [--streams 32] [--tokens 200] [--rounds 7]

Output tokens per second, and the median of each round's ratio to `LLM.generate`, with its spread.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from kvik import LLM, AsyncLLM, SamplingParams
from kvik_bench.scripts import spread


async def seconds(engine: AsyncLLM, prompts: list[str], params: SamplingParams) -> float:
    async def read(prompt: str) -> None:
        async for _ in engine.generate(prompt, params):
            pass

    start = time.perf_counter()
    await asyncio.gather(*(read(prompt) for prompt in prompts))
    return time.perf_counter() - start


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    arguments = parser.parse_args()
    prompts = [f"Story number {i} begins" for i in range(arguments.streams)]
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, seed=1)
    model, length = arguments.model, arguments.tokens + 32
    options = {"threads": arguments.threads, "max_model_len": length}
    taken: dict[str, list[float]] = {"LLM": [], "process": [], "thread": []}
    with LLM(model, **options) as llm:
        async with (
            AsyncLLM(model, engine="process", **options) as apart,
            AsyncLLM(model, engine="thread", **options) as within,
        ):
            for _ in range(arguments.rounds + 1):
                start = time.perf_counter()
                llm.generate(prompts, params, progress=False)
                taken["LLM"].append(time.perf_counter() - start)
                taken["process"].append(await seconds(apart, prompts, params))
                taken["thread"].append(await seconds(within, prompts, params))
    tokens = arguments.streams * arguments.tokens
    for name, times in taken.items():
        rounds = zip(taken["LLM"][1:], times[1:], strict=True)  # the first one warms up
        ratios = [base / own for base, own in rounds]
        rate = tokens / statistics.median(times[1:])
        print(f"{name:8} {rate:8.0f} tokens/s   {spread(ratios)}")


if __name__ == "__main__":
    asyncio.run(main())
