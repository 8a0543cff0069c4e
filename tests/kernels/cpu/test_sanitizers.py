"""The tests of this folder with kernels under the compiler's sanitizers: out-of-bounds accesses,
misaligned or undefined operations, and races between threads of a team end the run."""

from __future__ import annotations

import re
import subprocess
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


# Only products and attention use AMX; the rest of the emulation is the code of avx512_bf16. Tests
# that start another Python get the installed kernels there.
USES_AMX = ("test_amx", "test_attention", "test_indexer", "test_linear", "test_pack")
CHOSEN = f"(not amx_emulated or {' or '.join(USES_AMX)}) and not compiler_of_torch"


def run_watched(
    sanitizers: str,
    library: str,
    variables: dict[str, str],
    tier: str,
    isas: list[str],
    *options: str,
) -> subprocess.CompletedProcess[str]:
    """Run the tests of this folder and a tier with kernels for `isas` built with `sanitizers`,
    whose runtime library is `library`."""
    # libstdc++ must be loaded when the runtime looks up the functions that throw.
    libraries = [runtime_library(library), runtime_library("libstdc++.so.6")]
    if None in libraries:
        pytest.skip("needs the sanitizers of gcc")
    name = f"sanitize-{sanitizers.replace(',', '-')}"
    options += f"-DKVIK_SANITIZE={sanitizers}", f"-DKVIK_ISAS={';'.join(isas)}"
    extension = build_extension(name, *options)
    # The module always has `portable`, with sanitizers only if requested.
    chosen = CHOSEN if "portable" in isas else f"{CHOSEN} and not portable"
    # A sanitizer ends the process, which would lose output captured by pytest.
    flags = ["-v", "-x", "--capture=no", f"--tier={tier}", "--no-limits", "-k", chosen]
    arguments = [*flags, f"--ignore={__file__}", str(Path(__file__).parent)]
    variables = variables | {"LD_PRELOAD": " ".join(map(str, libraries))}
    done = run_tests(extension, arguments, variables)
    report = f"{done.stdout[-2000:]}\n{done.stderr[-10000:]}"
    assert done.returncode == 0, report
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, report
    return done


def native_isas() -> list[str]:
    """Return the instruction sets of this machine without AMX, whose memory accesses sanitizers do
    not see; the emulation runs the same code with copies instead."""
    return [name for name in _native.instruction_sets() if name != "amx"]


@pytest.mark.parametrize("tier", ["fast", pytest.param("full", marks=pytest.mark.nightly)])
def test_kernels_stay_within_their_buffers(tier: str) -> None:
    isas = native_isas()
    emulate = "avx512_bf16" in isas  # the base of the emulation
    if tier == "fast":  # each takes minutes to compile, and they share most of the code
        isas = isas[:1]
    done = run_watched(
        "address,undefined",
        "libasan.so",
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
        tier,
        isas,
        f"-DKVIK_EMULATE_AMX={'ON' if emulate else 'OFF'}",
    )
    if emulate:  # the only test of the emulation
        for file in USES_AMX:
            emulated = re.findall(
                rf"{file}\.py::.*amx_emulated.*\] ([A-Z]+)$", done.stdout, re.MULTILINE
            )
            assert set(emulated) == {"PASSED"}, (file, emulated)


@pytest.mark.nightly
def test_threads_of_a_team_do_not_race() -> None:
    # torch's own threads are not instrumented, and their copies would look like races.
    best = native_isas()[:1]
    run_watched("thread", "libtsan.so", {"OMP_NUM_THREADS": "1"}, "full", best)
