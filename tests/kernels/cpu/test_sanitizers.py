"""The tests of this folder once more, with a build for tests: AMX is emulated, and the compiler's
sanitizers watch. A read or write outside of a buffer, a misaligned or undefined operation ends the
run. Where the compiler has none, the emulation is tested all the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.building import build_extension, compiler, has_cmake, run_tests, runtime_library

_native = pytest.importorskip("kvik.kernels.cpu._native")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux", reason="preloads a library as Linux does"),
    pytest.mark.skipif(not has_cmake(), reason="needs CMake"),
    pytest.mark.skipif(compiler() is None, reason="needs a C++20 compiler"),
]
EMULATION_NEEDS = "avx512_bf16"


def test_kernels_stay_within_their_buffers_and_emulated_ones_compute_the_same() -> None:
    # libstdc++ must be there when libasan looks for the functions that throw.
    libraries = [runtime_library("libasan.so"), runtime_library("libstdc++.so.6")]
    options, variables = ["-DKVIK_EMULATE_AMX=ON"], {}
    if None not in libraries:
        options.append("-DKVIK_SANITIZE=ON")
        variables = {
            "LD_PRELOAD": " ".join(map(str, libraries)),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
    extension = build_extension("sanitize", *options)
    # A sanitizer ends the process: what pytest had captured until then would be lost.
    arguments = ["-v", "-x", "--capture=no", "-m", "not slow", str(Path(__file__).parent)]
    done = run_tests(extension, arguments, variables)
    report = f"{done.stdout[-2000:]}\n{done.stderr[-10000:]}"
    assert done.returncode == 0, report
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, report
    if EMULATION_NEEDS in _native.instruction_sets():
        lines = done.stdout.splitlines()
        for file in ("test_amx.py", "test_linear.py", "test_pack.py"):
            ran = [line for line in lines if file in line and "amx_emulated" in line]
            assert ran and not [line for line in ran if "SKIPPED" in line], file
