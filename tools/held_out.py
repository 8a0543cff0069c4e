"""Write the stories and sections of books that the bundled models were not trained on.

The output is JSON lines for `kvik eval --data`. Texts that share a passage with the builtin
calibration text are left out.

    python tools/held_out.py --data DATA [--longest CHARACTERS] held_out.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from story_data import load_stories, shingles

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "kvik"
CALIBRATION = PACKAGE / "bundled" / "calibration" / "text.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with the two .tar.xz files of text"
    )
    parser.add_argument("--longest", type=int, default=1 << 30, help="characters of a text")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    stories = [story for story in load_stories(options.data) if story.held_out]
    calibrated = shingles(CALIBRATION.read_text(encoding="utf-8"))
    stories = [
        story
        for story in stories
        if len(story.text) <= options.longest and not shingles(story.text) & calibrated
    ]
    lines = [
        json.dumps({"text": story.text, "title": story.title, "source": story.source})
        for story in stories
    ]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(stories)} texts, {sum(len(story.text) for story in stories):,} characters")


if __name__ == "__main__":
    main()
