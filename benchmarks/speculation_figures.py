"""All figures of docs/speculation.md, one after the other, into one folder.

    python benchmarks/speculation_figures.py FOLDER [--model MODEL] [--half MODEL] [--only NAME ...]

FOLDER gets a file for each part, with its command, its output and how long it took. MODEL is a
folder with the Llama-3.2-1B shape and --half one with the Qwen2.5-0.5B shape, as
`benchmarks/cpu/peers/shapes.py` writes them; without them the parts that need them are left out.
Every ratio is of runs that take turns within seconds. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
METHODS = ("ngram", "suffix", "draft_model", "medusa")


def script(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(HERE / name), *arguments]


def commands(model: str, half: str, draft: str) -> dict[str, list[str]]:
    """What makes each part, by name."""
    methods, rounds = (*METHODS, "off"), ("--rounds", "40")
    found = {
        "outside": script("drafters.py"),
        "step": script("step_overhead.py", "--num-seqs", "8", "--contexts", "500", "--drafts", "5"),
        "draft-step": script(
            "step_overhead.py",
            *["--num-seqs", "8", "--contexts", "500", "--drafts", "5", "--method", "draft_model"],
        ),
        "plain-step": script("step_overhead.py", "--num-seqs", "8", "--contexts", "500"),
        "never-slower": script("speculation_workloads.py", "--methods", *methods, *rounds),
        "never-slower-processor": script(
            "speculation_workloads.py", "--methods", *methods, *rounds, "--processor-time"
        ),
        "lookup": script("speculation_lookup.py", "--rounds", "9"),
    }
    for method in METHODS:
        wish = ["--spec-method", method]
        if method == "draft_model":
            wish += ["--spec-model", draft]
        sizes = ["--repeats", "40", "--max-model-len", "512", "--max-num-seqs", "8"]
        found[f"pair-{method}"] = [sys.executable, "-m", "kvik", "spec-report", *sizes, *wish]
    if half:
        found["never-slower-half"] = script(
            "speculation_workloads.py", half, "--quantization", "int4", "--methods", "ngram",
            "off", "--rounds", "7", "--workloads", "latency, batch 1", "latency, batch 8",
            "story, batch 1",
        )  # fmt: skip
    if model:
        found["lookup-1b"] = script(
            "speculation_lookup.py", model, "--quantization", "int4", "--methods", "ngram",
            "--batches", "1", "--rounds", "2",
        )  # fmt: skip
        found["draft-1b"] = script("speculation.py", model, "--rounds", "4", "--tokens", "96")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="", help="the 1B shape")
    parser.add_argument("--half", default="", help="the 0.5B shape")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts")
    args = parser.parse_args()

    from kvik.config.model_source import find_model

    parts = commands(args.model, args.half, str(find_model("").parent / "stories-draft"))
    unknown = [name for name in args.only if name not in parts]
    if unknown:
        parser.error(f"--only: must be among {', '.join(parts)}, not {', '.join(unknown)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.only or parts:
        started = time.monotonic()
        run = subprocess.run(parts[name], capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
        text = f"$ {' '.join(parts[name])}\n{run.stdout}{run.stderr}\n{seconds:.0f} s\n"
        (args.folder / f"{name}.txt").write_text(text, "utf-8")
        print(text, flush=True)
        if run.returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
