"""Compare sampling defaults for the bundled model: made-up words and repetition, by measure.

    python tools/choose_sampling.py --work WORK

WORK is the folder of `train_bundled.py`; a word that its texts never hold counts as made up.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kvik import LLM, SamplingParams

PROMPT = "Once upon a time"
CANDIDATES = (
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1},
)


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    known = set(words_of((args.work / "stories.jsonl").read_text(encoding="utf-8")))
    with LLM() as llm:
        for candidate in CANDIDATES:
            params = [
                SamplingParams(seed=seed, max_tokens=args.tokens, **candidate)
                for seed in range(args.texts)
            ]
            total = made_up = triples = repeated = 0
            for output in llm.generate([PROMPT] * args.texts, params, progress=False):
                words = words_of(output.text)[:-1]  # the last one may be cut
                total += len(words)
                made_up += sum(word not in known for word in words)
                each = list(zip(words, words[1:], words[2:], strict=False))
                triples += len(each)
                repeated += len(each) - len(set(each))
            print(
                f"{candidate}: {made_up / total:.2%} made-up words, "
                f"{repeated / triples:.1%} repeated triples of words ({total} words)"
            )


if __name__ == "__main__":
    main()
