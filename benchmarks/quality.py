"""What each quantisation method costs in quality: quantise, load, run and compare each one.

    python benchmarks/quality.py --work FOLDER [MODEL] [--data FILE] [--window 512] [--threads N]
                                 [--only NAME...] [--json FILE]

Each recipe is a run of `kvik quantize` into a folder under FOLDER. That folder is kept, so a second
run only measures. Prints the table of `kvik compare`, as Markdown.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from kvik.cli.main import main as kvik

RECIPES = {
    "rtn-8": ("--method", "rtn", "--bits", "8", "--group-size", "-1"),
    "smoothquant": ("--method", "smoothquant"),
    "fp8": ("--method", "fp8"),
    "fp8-static": ("--method", "fp8", "--activation-scheme", "static"),
    "fp8-blocks": ("--method", "fp8", "--group-size", "128"),
    "fp8-e5m2": ("--method", "fp8", "--fp8-format", "e5m2"),
    "rtn-4": ("--method", "rtn"),
    "rtn-4-asym": ("--method", "rtn", "--asym"),
    "gptq-4": ("--method", "gptq"),
    "gptq-4-act-order": ("--method", "gptq", "--act-order"),
    "gptq-4-asym": ("--method", "gptq", "--asym"),
    "awq-4": ("--method", "awq"),
    "rtn-3": ("--method", "rtn", "--bits", "3"),
    "gptq-3": ("--method", "gptq", "--bits", "3"),
    "gptq-3-act-order": ("--method", "gptq", "--bits", "3", "--act-order"),
    "awq-3": ("--method", "awq", "--bits", "3"),
    "gptq-5": ("--method", "gptq", "--budget-bits", "5"),
}
AT_LOAD = "int8,int8-weight-only,fp8,int4"
CACHES = "fp8,int8,int4"


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folders = [_made(options.model, options.work, name) for name in options.only]
    words = ["compare", options.model, *map(str, folders), "--no-speed", "--markdown"]
    words += ["--quantizations", AT_LOAD, "--kv-cache-dtypes", CACHES]
    words += ["--window", str(options.window), "--threads", str(options.threads)]
    words += ["--data", str(options.data)] if options.data else []
    words += ["--json", str(options.json)] if options.json else []
    raise SystemExit(kvik(words))


def _made(model: str, work: Path, name: str) -> Path:
    """Return the folder of a recipe, made if it is missing."""
    folder = work / name
    if not (folder / "config.json").exists():
        words = ["quantize", model, "-o", str(folder), *RECIPES[name]]
        if kvik([*words, "--eval", "none", "--no-speed"]):
            raise SystemExit(f"{name} cannot be made")
    return folder


if __name__ == "__main__":
    main()
