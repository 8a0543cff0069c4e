"""GPU resources of the kernels, compiled without a GPU."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.optional_triton import NO_TRITON
from helpers.tiers import tier

pytest.importorskip("triton", reason=NO_TRITON)

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "src/kvik/kernels/triton"


def python(*arguments: str) -> tuple[int, str]:
    """Run in a separate process, as triton interprets in this one; compiled kernels are cached."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "tests")
    environment["TRITON_CACHE_DIR"] = str(ROOT / "build/triton")
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(900)  # minutes with an empty cache on a busy machine
def test_no_kernel_exceeds_its_resource_limits() -> None:
    """All entries at night, and a few of each kernel before a merge: each compiles for seconds."""
    few = [] if tier() == "nightly" else ["--few"]
    status, text = python("-m", "helpers.triton_resources", *few)
    assert status == 0, text
    sources = "".join(file.read_text() for file in KERNELS.glob("*.py"))
    checked = re.findall(r" shared  (\w+) \(", text)
    assert set(checked) == set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "gpu",
    [
        "8.6",  # the least shared memory, and the oldest instructions
        *(pytest.param(gpu, marks=pytest.mark.nightly) for gpu in ("8.0", "8.9", "10.0", "12.0")),
    ],
)
def test_kernels_fit_other_gpus(gpu: str) -> None:
    """At night all; before a merge those that once did not compile, or exceeded shared memory.
    Of attention, keys in float32 take most of it."""
    wide = "queries of 512, KV float32"
    faulty = (
        "int4 group 128 zeros, 16 tokens",
        wide,
        "int8 group 32",
        "128 heads of",
        "2048 rows, 2048",
    )
    words = [] if tier() == "nightly" else faulty
    status, text = python("-m", "helpers.triton_resources", "--gpu", gpu, *words)
    assert status == 0, text


def test_no_function_returns_none() -> None:
    """Triton 3.6, the oldest that is supported, does not compile it."""
    for file in KERNELS.glob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            if not any(ast.unparse(by).startswith("triton.jit") for by in function.decorator_list):
                continue
            returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
            chosen = [(v.body, v.orelse) if isinstance(v, ast.IfExp) else (v,) for v in returned]
            values = {ast.unparse(v) for each in chosen for v in each if v is not None}
            assert "None" not in values, (file.name, function.name)


# In the form of a disassembly: two loops inside a third.
CODE = """
        /*0010*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;  /* 0x0 */
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ ;  /* 0x0 */
        /*0030*/              @P0 BRA 0x10 ;  /* 0x0 */
        /*0040*/                   LDG.E.128 R4, desc[UR4][R2.64] ;  /* 0x0 */
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, gsb0 ;  /* 0x0 */
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;  /* 0x0 */
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;  /* 0x0 */
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;  /* 0x0 */
        /*0090*/              @P1 BRA 0x40 ;  /* 0x0 */
        /*00a0*/              @P2 BRA 0x10 ;  /* 0x0 */
        /*00b0*/                   BRA 0xb0;  /* 0x0 */
"""

TIGHT = """
import sys
from dataclasses import replace
from helpers.triton_entries import DECODE, MEASURED, NORM, WORDS, Loop
from helpers.triton_resources import loop_of, taken
def tight(make, **limits):
    entry = make(MEASURED)[0]
    options = {**entry.options, **limits.pop("options", {})}
    print(taken(replace(entry, options=options, **limits)))
wide = NORM[2]  # rows of 16384, in registers
tight(wide, max_registers=16)
tight(wide, options={"maxnreg": 32})
tight(wide, max_shared=8)
tight(WORDS[0], loop=Loop(products=1, barriers=1, instructions=200))
tight(DECODE[0], options={"num_stages": 1})
print(loop_of(sys.argv[1]))
"""


@pytest.mark.full
def test_exceeded_resource_limits_are_named() -> None:
    """Registers, spills with too few registers, and shared memory; and faults of a loop, such as
    waits for each tile of keys because nothing is loaded ahead. The loop is the one with most
    products."""
    status, text = python("-c", TIGHT, CODE)
    assert status == 0, text
    registers, spilled, shared, loop, waiting, found = text.splitlines()
    assert "TOO MUCH" in registers and "registers > 16" in registers
    assert "spilled bytes > 0" in spilled
    assert "bytes of shared memory > 8" in shared
    assert "barriers > 1, " in loop and "instructions of the loop > 200" in loop
    assert "TOO LITTLE: 0 products < 1" in loop
    assert "TOO LITTLE: 0 copies < 16" in waiting
    assert found == ("Loop(copies=0, products=2, waits=1, loads=1, barriers=1, instructions=6)")
