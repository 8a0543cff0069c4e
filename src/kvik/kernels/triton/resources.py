"""What the kernels take of a GPU, compiled for sm_90 on any machine.

    python -m kvik.kernels.triton.resources [word in a name ...]

prints registers, spilled bytes and shared memory of each entry, and fails where one takes more than
it may. Triton's interpreter (TRITON_INTERPRET) must be off.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvik.kernels.triton import (
    activation,
    attention_decode,
    attention_merge,
    attention_mla,
    attention_prefill,
    draw,
    draw_search,
    linear_bytes,
    linear_end,
    linear_words,
    matrix_rows,
    norm,
    penalties,
    rotary,
    rows,
    token_rounding,
)
from kvik.kernels.triton.launch import Resources

RESOURCES: tuple[Resources, ...] = (
    *activation.RESOURCES,
    *attention_decode.RESOURCES,
    *attention_merge.RESOURCES,
    *attention_mla.RESOURCES,
    *attention_prefill.RESOURCES,
    *draw.RESOURCES,
    *draw_search.RESOURCES,
    *linear_bytes.RESOURCES,
    *linear_end.RESOURCES,
    *linear_words.RESOURCES,
    *matrix_rows.RESOURCES,
    *norm.RESOURCES,
    *penalties.RESOURCES,
    *rotary.RESOURCES,
    *rows.RESOURCES,
    *token_rounding.RESOURCES,
)

SM_90 = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True, slots=True)
class Taken:
    """Registers and spilled bytes of a thread, shared memory of a program in bytes."""

    name: str
    registers: int
    spills: int
    shared: int
    excess: str  # what it takes beyond what it may; empty if nothing

    def __str__(self) -> str:
        line = f"{self.registers:4} registers {self.spills:5} spilled {self.shared:7} shared"
        return f"{line}  {self.name}" + (f"  TOO MUCH: {self.excess}" if self.excess else "")


def taken(entry: Resources) -> Taken:
    """Compile it, and ask the code what it takes."""
    kernel = entry.kernel
    signature = {
        name: "constexpr" if name in entry.constants else entry.types[name]
        for name in kernel.arg_names
    }
    divisible = [["tt.divisibility", 16]]
    attributes = {
        (i,): divisible
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in entry.aligned
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, dict(entry.constants), attributes),
        target=SM_90,
        options={
            "num_warps": entry.num_warps,
            "num_stages": entry.num_stages,
            "enable_fp_fusion": entry.fused_products,
            "maxnreg": entry.most_registers,
        },
    )
    registers, spills = _of_code(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    limits = (
        ("registers", registers, entry.max_registers),
        ("spilled bytes", spills, entry.max_spills),
        ("bytes of shared memory", shared, entry.max_shared),
    )
    excess = ", ".join(f"{n} {what} > {most}" for what, n, most in limits if n > most)
    return Taken(entry.name, registers, spills, shared, excess)


def _of_code(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread: what is spilled goes to the stack."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def _taken_by_number(number: int) -> Taken:
    return taken(RESOURCES[number])


def check(words: Sequence[str] = (), processes: int = 2) -> list[Taken]:
    """Of the entries whose names hold one of the words, or of all."""
    chosen = [
        number
        for number, entry in enumerate(RESOURCES)
        if not words or any(word in entry.name for word in words)
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        return list(pool.map(_taken_by_number, chosen))


def main(words: Sequence[str]) -> int:
    results = check(words)
    for result in results:
        print(result)
    return int(any(result.excess for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
