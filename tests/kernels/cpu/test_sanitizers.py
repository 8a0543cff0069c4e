"""The tests of this folder once more, with kernels that the compiler's sanitizers watch: a read or
write outside of a buffer, a misaligned or undefined operation ends the run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers.building import build_extension, compiler, has_cmake, run_tests, runtime_library

_native = pytest.importorskip("kvik.kernels.cpu._native")

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux", reason="preloads a library as Linux does"),
    pytest.mark.skipif(not has_cmake(), reason="needs CMake"),
    pytest.mark.skipif(compiler() is None, reason="needs a C++20 compiler"),
]


def test_kernels_stay_within_their_buffers() -> None:
    # libstdc++ must be there when libasan looks for the functions that throw.
    libraries = [runtime_library("libasan.so"), runtime_library("libstdc++.so.6")]
    if None in libraries:
        pytest.skip("needs the sanitizers of gcc")
    variables = {
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # What this machine cannot run is not compiled, nor `amx`: no sanitizer sees what its
    # instructions read and write, and the emulation runs the same code with copies in their place.
    isas = [name for name in _native.instruction_sets() if name != "amx"]
    emulate = "ON" if "avx512_bf16" in isas else "OFF"  # which it is made of
    options = (f"-DKVIK_ISAS={';'.join(isas)}", f"-DKVIK_EMULATE_AMX={emulate}")
    extension = build_extension("sanitize", "-DKVIK_SANITIZE=ON", *options)
    # Only products know of AMX: all else of the emulation is what avx512_bf16 runs. And what starts
    # another Python finds the installed kernels there.
    once = "(not amx_emulated or test_amx or test_linear or test_pack) and not compiler_of_torch"
    # A sanitizer ends the process: what pytest had captured until then would be lost.
    arguments = [
        "-v",
        "-x",
        "--capture=no",
        "--tier=full",
        "--no-limits",
        f"--ignore={__file__}",
        "-k",
        once,
    ]
    arguments.append(str(Path(__file__).parent))
    done = run_tests(extension, arguments, variables)
    report = f"{done.stdout[-2000:]}\n{done.stderr[-10000:]}"
    assert done.returncode == 0, report
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, report
    if emulate == "ON":  # nowhere else is the emulation tested
        for file in ("test_amx", "test_linear", "test_pack"):
            emulated = re.findall(rf"{file}\.py::\S*amx_emulated\S* (\w+)", done.stdout)
            assert set(emulated) == {"PASSED"}, (file, emulated)
