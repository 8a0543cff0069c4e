"""Break kvik on purpose, one fault at a time, and see whether the tests notice.

    python tools/mutants.py --check                     each fault's text occurs exactly once
    python tools/mutants.py --run --tier fast           apply each, run pytest, print who noticed
    python tools/mutants.py --run --tier full c07 s04   these faults only

`tests/mutants.toml` lists the faults. A run edits files of the working tree and restores each of
them, so use a clean tree for it. For a fault in `csrc/`, the kernels of one instruction set are
compiled in a separate folder, and replace the installed ones while its tests run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from helpers.building import build_extension  # noqa: E402

TABLE = ROOT / "tests" / "mutants.toml"
SOURCES = {".py", ".cpp", ".hpp"}
TIMED_OUT = 1800.0  # seconds; a fault may make a test hang


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault.

    Attributes:
        folder: folder or file with the text.
        old, new: the text, and its replacement.
        tests: files or folders that should notice, which run before all others.
        gap: why no test notices yet; "": one must.
    """

    id: str
    what: str
    folder: str
    old: str
    new: str
    tests: tuple[str, ...]
    gap: str = ""

    def places(self) -> list[Path]:
        """Return the file of each occurrence of the old text."""
        root = ROOT / self.folder
        files = [root] if root.is_file() else sorted(root.rglob("*"))
        return [
            path
            for path in files
            if path.suffix in SOURCES
            for _ in range(path.read_text(encoding="utf-8").count(self.old))
        ]


def load() -> list[Mutant]:
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def check(mutants: Sequence[Mutant]) -> int:
    """Return how many faults cannot be applied, and say which."""
    bad = [(m, places) for m in mutants if len(places := m.places()) != 1]
    for mutant, places in bad:
        print(f"{mutant.id} {mutant.what}: its text occurs {len(places)} times {places}")
    return len(bad)


def pytest(arguments: Sequence[str], tier: str) -> tuple[bool, str]:
    """Return whether a test failed, and the first that did."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", f"--tier={tier}"]
    try:
        done = subprocess.run(
            [*command, "--no-limits", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMED_OUT,
        )
    except subprocess.TimeoutExpired:
        return True, "timed out"
    if done.returncode not in (0, 1, 2):  # passed, failed, or could not be imported
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-500:]}")
    lines = done.stdout.splitlines()
    return done.returncode != 0, next((x for x in lines if x.startswith(("FAILED", "ERROR"))), "")


def run(mutants: Sequence[Mutant], tier: str, *, nearby: bool) -> int:
    """Apply one fault after the other; return how many went unnoticed, known gaps aside."""
    survivors = 0
    for mutant in mutants:
        (path,) = mutant.places()
        text, began = path.read_text(encoding="utf-8"), time.monotonic()
        native = path.is_relative_to(ROOT / "csrc")
        with contextlib.ExitStack() as stack:
            stack.callback(path.write_text, text, encoding="utf-8")
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
            if native:
                stack.enter_context(kernels_compiled_again())
            killed, by = pytest(mutant.tests, tier)
            if not killed and not nearby:
                killed, by = pytest([], tier)
        survivors += not killed and not mutant.gap
        facts = {"mutant": mutant.id, "killed": killed, "by": by}
        print(json.dumps({**facts, "seconds": round(time.monotonic() - began)}), flush=True)
    return survivors


@contextlib.contextmanager
def kernels_compiled_again() -> Iterator[None]:
    """Replace the installed kernels by ones compiled from the current `csrc/`."""
    from kvik.kernels.cpu import _native  # --check works without kernels

    best = next(name for name in _native.instruction_sets() if name != "amx")
    extension = build_extension("mutants", f"-DKVIK_ISAS={best}")
    installed = Path(_native.__file__)
    aside = installed.with_name("installed-kernels")
    installed.rename(aside)
    try:
        shutil.copy(extension, installed)
        yield
    finally:
        aside.replace(installed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ids", nargs="*", help="faults (all)")
    parser.add_argument("--check", action="store_true", help="only look whether all can be applied")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--tier", default="fast", choices=("fast", "full", "nightly"))
    parser.add_argument("--nearby", action="store_true", help="run only the tests each row names")
    arguments = parser.parse_args()
    mutants = [m for m in load() if not arguments.ids or m.id in arguments.ids]
    if bad := check(mutants):
        return bad
    return run(mutants, arguments.tier, nearby=arguments.nearby) if arguments.run else 0


if __name__ == "__main__":
    sys.exit(main())
