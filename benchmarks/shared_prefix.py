"""How long requests with a common prefix take when they all arrive at once.

    python benchmarks/shared_prefix.py [MODEL] [--prefix 1000] [--rest 16] [--requests 32]

The ratio is the time to all their first tokens, over the time of the prefix alone plus that of the
requests once the prefix is cached. Prompts are random, and new in every round.
"""

from __future__ import annotations

import argparse
import random

from kvik import LLM
from kvik_bench.scripts import seconds_of, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--load-format", default="safetensors", help="random: only config.json")
    parser.add_argument("--prefix", type=int, default=1000, help="tokens in common")
    parser.add_argument("--rest", type=int, default=16, help="tokens of each request's own")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    length = arguments.prefix + arguments.rest + 1
    draw = random.Random(0)
    with LLM(arguments.model, load_format=arguments.load_format, max_model_len=length) as llm:
        vocab_size = llm.resolved.model.vocab_size

        def tokens(count: int) -> list[int]:
            return [draw.randrange(vocab_size) for _ in range(count)]

        def with_rests(prefix: list[int]) -> list[list[int]]:
            return [prefix + tokens(arguments.rest) for _ in range(arguments.requests)]

        ratios = []
        for _ in range(arguments.rounds + 1):
            together = seconds_of(llm, with_rests(tokens(arguments.prefix)), 1)
            prefix = tokens(arguments.prefix)
            alone = seconds_of(llm, [prefix], 1)
            rests = seconds_of(llm, with_rests(prefix), 1)
            ratios.append(together / (alone + rests))
            print(
                f"together {together:.3f} s; prefix {alone:.3f} s, rests {rests:.3f} s; "
                f"ratio {ratios[-1]:.2f}"
            )
    print(f"ratio {spread(ratios[1:])}")  # without the first, a warm-up


if __name__ == "__main__":
    main()
