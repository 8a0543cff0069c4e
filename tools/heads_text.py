"""Write the text that the bundled model's draft heads are trained on.

It consists of beginnings of stories that the model continues, greedily or sampled, and of a few
stories, as JSON lines for `kvik train-heads --data`.

    python tools/heads_text.py --data DATA heads_text.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from story_data import Story, load_stories

from kvik import LLM, SamplingParams

BEGINNING = 60, 240  # characters of a story that the model continues
OUTPUT = 320  # tokens
STORY = 6000  # characters of a story at most


def beginnings(stories: list[Story], count: int, draw: random.Random) -> list[str]:
    """Return beginnings of stories, or of paragraphs within them, that end between two words."""
    found = []
    while len(found) < count:
        text = draw.choice(stories).text
        starts = [0] + [i + 2 for i in range(len(text)) if text.startswith("\n\n", i)]
        start = draw.choice(starts)
        part = text[start : start + draw.randint(*BEGINNING)].rpartition(" ")[0]
        if part:
            found.append(part)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with the two .tar.xz files of text"
    )
    parser.add_argument("--greedy", type=int, default=448, help="texts of the model")
    parser.add_argument("--sampled", type=int, default=220, help="texts of the model")
    parser.add_argument("--stories", type=int, default=40, help="taken as they are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    stories = [story for story in load_stories(options.data) if not story.held_out]
    texts = [story.text[:STORY] for story in draw.sample(stories, options.stories)]
    llm = LLM(max_num_seqs=32)
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
    sampled = SamplingParams(temperature=0.7, top_p=0.95, min_p=0.05, max_tokens=OUTPUT, seed=1)
    for way, count in ((greedy, options.greedy), (sampled, options.sampled)):
        prompts = beginnings(stories, count, draw)
        for prompt, output in zip(prompts, llm.generate(prompts, way), strict=True):
            texts.append(prompt + output.text)
    draw.shuffle(texts)
    lines = [json.dumps({"text": text}) for text in texts]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} texts, {sum(map(len, texts)):,} characters")


if __name__ == "__main__":
    main()
