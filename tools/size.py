"""Print the size and the budget of each folder of kvik, also as part of `make check`.

    python tools/size.py

A folder may outgrow its budget for a good reason: raise the budget in a separate commit that says
why.
"""

from __future__ import annotations

import statistics
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
# Lines of Python with comments and docstrings, of 2026-12-01. "": files outside folders.
BUDGETS = {
    "attention": 2730,
    "cli": 5270,
    "config": 5670,
    "core": 6520,
    "engine": 5630,
    "evaluate": 750,
    "gguf": 2740,
    "kernels": 12000,
    "kvik_bench": 9790,
    "lang": 660,
    "models": 11100,
    "nn": 7560,
    "planner": 5910,
    "quantize": 3280,
    "server": 12730,
    "spec": 5620,
    "text": 4420,
    "training": 640,
    "worker": 13010,
    "": 5100,
}


def main() -> None:
    sizes: dict[str, list[int]] = {}
    for path in SOURCES.rglob("*.py"):
        package, folder, *inner = path.relative_to(SOURCES).parts
        if package != "kvik":
            folder = package
        elif not inner:
            folder = ""
        lines = len(path.read_text(encoding="utf-8").splitlines())
        sizes.setdefault(folder, []).append(lines)
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
