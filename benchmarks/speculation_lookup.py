"""What drafting by lookup in the text gains where answers repeat the prompt: edits and summaries.

    python benchmarks/speculation_lookup.py [MODEL] [--quantization none] [--batches 1 8]
        [--rounds 5] [--methods ngram suffix]

No small model edits or summarises well, so the answers are written beforehand: each prompt is a
piece of a story, and the answer is that piece with some names and words changed ("edit"), or its
first sentence and every third one after it with a few new words ("summary"). The model computes
every step in full, and its sampled tokens are replaced by those of the answer; all else, the drafts
and their acceptance above all, is as if the model had sampled them itself. "whole" includes the
time of the prompts, the other speed-up is of decoding only; medians of the rounds.
"""

from __future__ import annotations

import contextlib
import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from kvik.config.config import EngineConfig
from kvik.config.model_source import find_model
from kvik.evaluate.windows import held_out_texts
from kvik.launch import resolve_config
from kvik.text.tokenizer import Tokenizer
from kvik.worker import worker
from kvik.worker.output_tokens import LaunchedTokens, OutputTokens
from kvik.worker.step_inputs import AtOnce
from kvik_bench.inprocess.inproc import BenchRequest, loaded, run_jobs
from kvik_bench.inprocess.measures import DECODE
from kvik_bench.inprocess.speculation import Pair
from kvik_bench.load.metrics import OUTPUT, RunMeasure
from kvik_bench.scripts import spread

PIECE = 1400  # characters of a story
ROOM = 1024  # tokens of a prompt and its answer
CHANGES = (
    (r"\bthe\b", "this", 9),  # every ninth occurrence
    (r"\bsaid\b", "whispered", 2),
    (r"\band\b", "&", 11),
    (r"\bold\b", "ancient", 1),
    (r"\bhe\b", "she", 3),
)


class WrittenAnswers:
    """Token ids [requests, positions]; a prompt's first token is the number of its request."""

    def __init__(self) -> None:
        self.tokens = np.zeros((0, ROOM), np.int64)

    def write(self, texts: Sequence[Sequence[int]]) -> None:
        self.tokens = np.zeros((len(texts), ROOM), np.int64)
        for row, text in zip(self.tokens, texts, strict=True):
            row[: len(text)] = text


ANSWERS = WrittenAnswers()


class WrittenTokens(OutputTokens):
    """Outputs the written tokens, whatever the model samples."""

    def __init__(self, *parts) -> None:
        super().__init__(*parts)

        def written(output, slots, positions, *more) -> LaunchedTokens:
            requests = self.table.token_ids[slots, 0]
            token_ids = torch.from_numpy(ANSWERS.tokens[requests, positions].astype(np.int64))
            return LaunchedTokens(token_ids, {}, [], AtOnce().start([token_ids]))

        self.sampler.launch = written


def edited(text: str) -> str:
    for pattern, other, every in CHANGES:
        count = 0

        def change(match: re.Match[str], other: str = other, every: int = every) -> str:
            nonlocal count
            count += 1
            return other if count % every == 0 else match[0]

        text = re.sub(pattern, change, text)
    return text


def summary(text: str) -> str:
    sentences = re.split(r"(?<=[.!?]) ", text)
    return "In short: " + " Later, ".join(sentences[::3])


def jobs(kind: str, number: int, batch: int, tokenizer: Tokenizer) -> list[BenchRequest]:
    """Return the requests of one round, and write down their answers."""
    (story,) = held_out_texts()
    draw = np.random.default_rng((number + 100, batch))
    made, texts = [], []
    for i in range(batch):
        start = int(draw.integers(0, len(story) - PIECE))
        piece = story[start : start + PIECE]
        answer = edited(piece) if kind == "edit" else summary(piece)
        prompt = [i, *tokenizer.encode(f"{piece}\n\n", add_special_tokens=False)]
        said = tokenizer.encode(answer, add_special_tokens=False)[: ROOM - len(prompt)]
        made.append(BenchRequest(prompt, len(said)))
        texts.append([*prompt, *said])
    ANSWERS.write(texts)
    return made


def gains(measure: RunMeasure, pairs: Sequence[Pair]) -> list[float]:
    return [measure.of(pair.guessing) / measure.of(pair.plain) for pair in pairs]


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--kinds", nargs="+", default=["edit", "summary"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    worker.OutputTokens = WrittenTokens
    tokenizer = Tokenizer.load(find_model(""))  # the bundled model's ids are valid in any model
    config = EngineConfig(
        model=args.model,
        quantization=args.quantization,
        max_model_len=ROOM,
        max_num_seqs=max(args.batches),
        enable_prefix_caching=False,
    )
    pairs: dict[tuple[str, int, str], list[Pair]] = {}
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(loaded(resolve_config(config)))
        engines = {
            method: stack.enter_context(loaded(resolve_config(replace(config, spec_method=method))))
            for method in args.methods
        }
        for number in range(-1, args.rounds):
            for kind in args.kinds:
                for batch in args.batches:
                    requests = jobs(kind, number, batch, tokenizer)
                    without = run_jobs(plain, requests)
                    for method, engine in engines.items():
                        pair = Pair(without, run_jobs(engine, requests), trees=False)
                        if number >= 0:
                            pairs.setdefault((kind, batch, method), []).append(pair)
    for (kind, batch, method), found in pairs.items():
        decode, whole = gains(DECODE, found), gains(OUTPUT, found)
        print(
            f"{kind:8} batch {batch}, {method:7} {spread(decode)}, whole {median(whole):.2f}; "
            f"acceptance {median(p.acceptance for p in found):.2f}, "
            f"K {median(p.depth for p in found):.1f}, "
            f"steps with drafts {median(p.share for p in found):.2f}, "
            f"cost of a step {median(p.step_cost for p in found):.2f}, "
            f"plain {median(DECODE.of(p.plain) for p in found):.0f} tokens/s, "
            f"equal tokens {min(p.equal for p in found):.2f}"
        )


if __name__ == "__main__":
    main()
