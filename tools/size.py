"""Print how large each folder of kvik is beside its budget: `make check` does, to inform.

    python tools/size.py

A folder may outgrow its budget for a reason; then the budget is raised here, in a commit of its own
that says why.
"""

from __future__ import annotations

import statistics
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "kvik"
# Lines of Python, comments and docstrings included. "": the files beside the folders.
BUDGETS = {
    "attention": 1100,
    "cli": 3800,
    "config": 3200,
    "core": 3700,
    "engine": 3900,
    "evaluate": 700,
    "lang": 650,
    "gguf": 1700,
    "kernels": 6800,
    "models": 800,
    "nn": 3500,
    "planner": 5700,
    "quantize": 3500,
    "server": 7500,
    "spec": 2200,
    "text": 2400,
    "training": 700,
    "worker": 7700,
    "": 1800,
}


def main() -> None:
    sizes: dict[str, list[int]] = {}
    for path in SOURCE.rglob("*.py"):
        folder, *inner = path.relative_to(SOURCE).parts
        lines = len(path.read_text(encoding="utf-8").splitlines())
        sizes.setdefault(folder if inner else "", []).append(lines)
    print(f"{'folder':12}{'files':>7}{'lines':>8}{'budget':>8}{'median':>8}")
    for folder, files in sorted(sizes.items(), key=lambda item: -sum(item[1])):
        budget = BUDGETS.get(folder, 0)
        over = "  over its budget" if sum(files) > budget else ""
        median = round(statistics.median(files))
        print(f"{folder or '(top)':12}{len(files):7}{sum(files):8}{budget:8}{median:8}{over}")
    every = [size for files in sizes.values() for size in files]
    total, median = sum(every), round(statistics.median(every))
    print(f"{'all':12}{len(every):7}{total:8}{sum(BUDGETS.values()):8}{median:8}")


if __name__ == "__main__":
    main()
