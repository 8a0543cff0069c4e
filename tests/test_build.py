"""Builds and installations with and without a C++ compiler."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.building import ROOT, compiler, environment, has_cmake

pytest.importorskip("scikit_build_core")
pytest.importorskip("nanobind")
needs_cmake = pytest.mark.skipif(not has_cmake(), reason="needs CMake")
needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++20 compiler")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux writes")

EXTENSION = re.compile(r"kvik/kernels/cpu/_native\.[^/]*so")
BUILD = """
import json, sys, scikit_build_core.build as backend
getattr(backend, sys.argv[1])(sys.argv[2], json.loads(sys.argv[3]))
"""


def build(
    kind: str,
    folder: Path,
    settings: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Path:
    """Run `build_wheel` or `build_sdist` of the build backend on this checkout, and return the
    file."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(folder), json.dumps(settings or {})],
        cwd=ROOT,
        env=environment() | dict(variables or {}),
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = folder.iterdir()
    return result


def assert_complete(names: set[str]) -> None:
    """Check the Python part of a wheel: modules, the bundled models, the py.typed marker, the
    licences of what it contains."""
    assert {"kvik/__init__.py", "kvik/py.typed", "kvik/kernels/cpu/__init__.py"} <= names
    for model in ("stories", "stories-draft", "stories-medusa"):
        files = {path.name for path in (ROOT / "src/kvik/bundled" / model).iterdir()}
        assert files and {f"kvik/bundled/{model}/{name}" for name in files} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("csrc")]
    licences = {name.partition("/licenses/")[2] for name in names}
    assert {"LICENSE", "csrc/LICENSE.third-party"} <= licences


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel in the checkout's own build folder, which compiles only what is missing."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests of another worker may build too
        return build("build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.mark.full
@needs_cmake
@needs_compiler
def test_wheel_holds_the_native_kernels(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert len([name for name in names if EXTENSION.fullmatch(name)]) == 1
    assert not wheel.name.endswith("-none-any.whl")
    assert_complete(names)


@pytest.mark.full
@needs_cmake
def test_wheel_without_a_compiler_has_only_python(tmp_path: Path) -> None:
    """Nor does a library in the source tree get into it."""
    no_compiler = {"CXX": shutil.which("false") or "false"}
    settings = {"build-dir": str(tmp_path / "build")}
    (tmp_path / "wheel").mkdir()
    wheel = build("build_wheel", tmp_path / "wheel", settings, no_compiler)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert not [name for name in names if name.endswith(".so")]
    assert wheel.name.endswith("-py3-none-any.whl")
    assert_complete(names)


@pytest.mark.full
def test_the_sdist_contains_all_sources_of_a_build(tmp_path: Path) -> None:
    """And what the README's `make demo` and `make test` need."""
    with tarfile.open(build("build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir() if path.is_file()}
    named = {"pyproject.toml", "LICENSE", "README.md", "Makefile", "constraints.txt"}
    assert named | {"src/kvik/py.typed"} | sources <= names
    assert not [name for name in names if name.endswith(".so") or "__pycache__" in name]


@pytest.mark.full
@needs_cmake
@needs_compiler
@needs_linux
@pytest.mark.usefixtures("wheel")
def test_code_of_an_instruction_set_stays_in_its_table() -> None:
    """The linker keeps one copy of an inline function that several objects define. A copy from an
    object compiled for AVX-512 would run on machines without it, and so would its static
    initialisers."""
    newest = max(ROOT.glob("build/*/.skbuild-info.json"), key=lambda path: path.stat().st_mtime)
    folders = list(newest.parent.glob("CMakeFiles/kernels_*.dir"))
    assert folders
    for folder in folders:
        isa = folder.name.removeprefix("kernels_").removesuffix(".dir")
        path, own = folder / "table.cpp.o", f"table_{isa}"
        if isa == "amx":
            path, own = folder / "kernels_amx.cpp.o", "kernels_amx"
        listing = subprocess.run(["nm", "-C", path], check=True, text=True, capture_output=True)
        symbols = [line[17:].split(" ", 1) for line in listing.stdout.splitlines()]
        shared = {name for kind, name in symbols if kind in "ABCDGRSTVWiu"}
        assert shared == {f"kvik::{own}"}
        assert not [name for _, name in symbols if name.startswith("_GLOBAL__sub_I")]


def test_kernels_are_installed_if_a_compiler_is_found() -> None:
    """An install without them succeeds, so only this test finds errors in csrc/."""
    if compiler() is None or not has_cmake():
        pytest.skip("needs a C++20 compiler and CMake")
    assert importlib.util.find_spec("kvik.kernels.cpu._native") is not None, (
        "kvik was installed without its native kernels: `make -B test` installs it again, "
        "`.venv/bin/cmake --build build/cp3*` shows what the compiler says"
    )


def test_memory_that_is_never_freed_is_not_reported() -> None:
    pytest.importorskip("kvik.kernels.cpu._native")
    code = "import sys\nfrom kvik.kernels.cpu._native import Runtime\n"
    code += "sys.kept = Runtime('portable', 1)"
    done = subprocess.run([sys.executable, "-c", code], check=True, text=True, capture_output=True)
    assert done.stdout + done.stderr == ""
