"""Compare a model that kvik runs through transformers (`--fallback`) with transformers alone.

    python benchmarks/fallback.py [--family XGLM] [--prompt 128] [--output 64] [--batch 1 8]
        [--threads N] [--repeats 3]

Both have the same random weights: kvik and transformers' `generate` alternately answer the same
prompts of equal length, greedily. `generate` takes the whole batch in one call; "one by one" makes
one call per prompt. Tokens a second count outputs, over a time that includes the prompts; medians
of the repeats. The ratio is kvik's rate over the better of transformers' two.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from kvik import LLM
from kvik_bench.scripts import greedy, spread

# Shapes of about 100 million parameters, of architectures that kvik lacks.
FAMILIES: dict[str, dict[str, Any]] = {
    "XGLM": {
        **{"vocab_size": 32_000, "d_model": 768, "ffn_dim": 3072, "num_layers": 12},
        **{"attention_heads": 12, "max_position_embeddings": 2048},
    },
}
Answer = Callable[[list[list[int]]], list[list[int]]]


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="XGLM")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        save(Path(name), options.family)
        most = {"max_num_seqs": max(options.batch), "max_model_len": 2048}
        facts = {"device": "cpu", "dtype": "float32", "threads": options.threads, **most}
        with LLM(name, fallback="transformers", **facts) as llm:
            torch.set_num_threads(llm.resolved.runner.threads)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
            for batch in options.batch:
                compare(llm, model, batch, options)


def save(folder: Path, family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)


def compare(llm: LLM, model: Any, batch: int, options: Namespace) -> None:
    limits = {"min_new_tokens": options.output, "max_new_tokens": options.output}

    def kvik(prompts: list[list[int]]) -> list[list[int]]:
        found = llm.generate(prompts, greedy(options.output))
        return [list(one.outputs[0].token_ids) for one in found]

    def together(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **limits
            )
        return [row[options.prompt :] for row in found.tolist()]

    def one_by_one(prompts: list[list[int]]) -> list[list[int]]:
        return [row for prompt in prompts for row in together([prompt])]

    ways: dict[str, Answer] = {"kvik": kvik, "transformers": together}
    if batch > 1:
        ways["transformers, one by one"] = one_by_one
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(options.repeats + 1):
        generator = torch.Generator().manual_seed(turn)
        prompts = torch.randint(5, 32_000, (batch, options.prompt), generator=generator).tolist()
        answers = {}
        for way, answer in ways.items():
            began = time.perf_counter()
            answers[way] = answer(prompts)
            if turn:  # the first turn warms up
                rates[way].append(batch * options.output / (time.perf_counter() - began))
        assert all(len(row) == options.output for rows in answers.values() for row in rows)
        alone = answers.get("transformers, one by one", answers["transformers"])
        alike = sum(a == b for a, b in zip(answers["kvik"], alone, strict=True))
        if alike < batch:
            print(f"{batch - alike} of {batch} answers differ, where two tokens are equally likely")
    medians = {way: statistics.median(found) for way, found in rates.items()}
    best = max(rate for way, rate in medians.items() if way != "kvik")
    row = " | ".join(f"{way} {spread(found, '.1f')}" for way, found in rates.items())
    print(f"{options.family}, batch {batch} | {row} tokens/s | {medians['kvik'] / best:.2f}")


if __name__ == "__main__":
    main()
