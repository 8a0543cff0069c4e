"""The GPU resources of Triton kernels, compiled for a GPU on any machine.

    PYTHONPATH=tests python -m helpers.triton_resources [--gpu 9.0] [--few] [word in a name ...]

prints registers, spilled bytes and shared memory of each entry, and the instructions of its main
loop if that is checked, and fails if an entry breaks a limit, or cannot be compiled. `--gpu` is a
compute capability. With `--few`, it compiles at most `FEW` entries of each kernel. Triton's
interpreter (TRITON_INTERPRET) must be off.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from helpers.triton_entries import MEASURED, Loop, Resources, resources
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import create_function_from_signature

BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))
FEW = 2


@dataclass(frozen=True, slots=True)
class Taken:
    """Registers and spilled bytes per thread, and shared memory per program in bytes."""

    name: str
    registers: int
    spills: int
    shared: int
    loop: Loop | None  # counts of the main loop
    excess: str  # limits exceeded; empty if none
    lack: str  # instructions missing from the loop; empty if none

    def __str__(self) -> str:
        line = f"{self.registers:4} registers {self.spills:5} spilled {self.shared:7} shared"
        line += f"  {self.name}" + (f"  {self.loop}" if self.loop else "")
        line += f"  TOO MUCH: {self.excess}" if self.excess else ""
        return line + (f"  TOO LITTLE: {self.lack}" if self.lack else "")


def taken(entry: Resources, capability: tuple[int, int] = MEASURED) -> Taken:
    """Compile an entry, and read its resources from the code."""
    try:
        compiled = triton.compile(*specialised(entry, capability))
    except Exception as error:
        return Taken(entry.name, 0, 0, 0, None, f"cannot be compiled: {str(error)[:400]}", "")
    text = _text_of(compiled.asm["cubin"], instructions=entry.loop is not None)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    registers, spills = int(found[1]), int(found[2])  # spills go to the stack
    shared = compiled.metadata.shared
    limits = [
        ("registers", registers, entry.max_registers),
        ("spilled bytes", spills, entry.max_spills),
        ("bytes of shared memory", shared, entry.max_shared),
    ]
    lack, loop, wanted = "", None, entry.loop
    if wanted is not None:
        loop = loop_of(text)
        least = (
            ("copies", loop.copies, wanted.copies),
            ("products", loop.products, wanted.products),
        )
        lack = ", ".join(f"{n} {what} < {few}" for what, n, few in least if n < few)
        limits += [
            ("waits", loop.waits, wanted.waits),
            ("loads", loop.loads, wanted.loads),
            ("barriers", loop.barriers, wanted.barriers),
            ("instructions of the loop", loop.instructions, wanted.instructions),
        ]
    excess = ", ".join(f"{n} {what} > {most}" for what, n, most in limits if n > most)
    return Taken(entry.name, registers, spills, shared, loop, excess, lack)


def specialised(
    entry: Resources, capability: tuple[int, int] = MEASURED
) -> tuple[ASTSource, GPUTarget, dict[str, Any]]:
    """Return what Triton would compile for such a launch, and how."""
    kernel, target = entry.kernel, GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    backend = CUDABackend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, options = bind(*entry.arguments, **entry.options)
    given = kernel._pack_args(backend, entry.options, bound, kinds, options)
    options, signature, constants, attributes = given
    return ASTSource(kernel, signature, constants, attributes), target, options.__dict__


def _text_of(cubin: bytes, *, instructions: bool) -> str:
    """Return the resources of the code or, which takes longer, its instructions, one per line.
    Cached next to the code."""
    name = "instructions.txt" if instructions else "taken.txt"
    kept = get_cache_manager(sha256(cubin).hexdigest())
    known = kept.get_file(name)
    if known is not None:
        return Path(known).read_text()
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    what = ["--dump-resource-usage"] + ["--dump-sass"] * instructions
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), *what, file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kept.put(text, name, binary=False)
    return text


def loop_of(text: str) -> Loop:
    """Return the innermost loop with most products and, among these, fewest instructions."""
    code = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,5})\*/ +(.*?);", text)]
    jumps = (
        (int(found[1], 16), at) for at, what in code if (found := re.search(r"BRA.* (0x\w+)", what))
    )
    spans = [span for span in jumps if span[0] < span[1]]
    inner = [
        (first, last)
        for first, last in spans
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans)
    ]
    bodies = [[what for at, what in code if first <= at <= last] for first, last in inner]

    def count(body: list[str], pattern: str) -> int:
        return sum(re.search(pattern, what) is not None for what in body)

    body = max(bodies, key=lambda body: (count(body, r"\b[A-Z]*MMA\."), -len(body)), default=[])
    return Loop(
        copies=count(body, r"\bLDGSTS\S*\.128\b"),
        products=count(body, r"\b[A-Z]GMMA\."),
        waits=count(body, r"\bWARPGROUP\.DEPBAR\b"),
        loads=count(body, r"\bLDG\."),
        barriers=count(body, r"\bBAR\.SYNC"),
        instructions=len(body),
    )


def _taken_by_number(capability: tuple[int, int], number: int) -> Taken:
    return taken(resources(capability)[number], capability)


def few(entries: Sequence[Resources]) -> list[int]:
    """Return the numbers of at most `FEW` entries of each kernel, from all parts of its list."""
    by_kernel: dict[str, list[int]] = defaultdict(list)
    for number, entry in enumerate(entries):
        by_kernel[entry.kernel.__name__].append(number)
    return [number for own in by_kernel.values() for number in own[:: -(-len(own) // FEW)]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="check the entries whose names have one of these")
    parser.add_argument("--few", action="store_true", help="check few entries of each kernel")
    parser.add_argument("--gpu", default="9.0", help="its compute capability")
    wishes = parser.parse_args(arguments)
    major, minor = map(int, wishes.gpu.split("."))
    entries, words = resources((major, minor)), wishes.words or [""]
    numbers = few(entries) if wishes.few else range(len(entries))
    numbers = [n for n in numbers if any(word in entries[n].name for word in words)]
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        results = list(pool.map(partial(_taken_by_number, (major, minor)), numbers))
    for result in results:
        print(result)
    return int(any(result.excess or result.lack for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
