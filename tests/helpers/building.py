"""Build the native kernels in tests: the compiler, CMake, and their environment."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Needs C++20 and Python's headers, without which kvik installs without native kernels.
_PROBE = "#include <Python.h>\n#include <bit>\nint lanes() { return std::popcount(7u); }\n"

# Replaces the installed extension before a test imports it.
_RUN = """
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch
import kvik.kernels.cpu

spec = spec_from_file_location("kvik.kernels.cpu._native", sys.argv[1])
module = module_from_spec(spec)
sys.modules[spec.name] = kvik.kernels.cpu._native = module
spec.loader.exec_module(module)
sys.exit(pytest.main(sys.argv[2:]))
"""


def environment() -> dict[str, str]:
    """Return the environment with this Python's scripts (CMake, ninja) first in PATH."""
    scripts = sysconfig.get_path("scripts")
    return os.environ | {"PATH": os.pathsep.join((scripts, os.environ.get("PATH", "")))}


@functools.cache
def compiler() -> str | None:
    """Return the C++ compiler that a build of kvik would use, or None if it cannot build kvik."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found is None:
            continue
        include = f"-I{sysconfig.get_path('include')}"
        command = [found, "-std=c++20", include, "-x", "c++", "-c", "-", "-o"]
        with tempfile.TemporaryDirectory() as folder:
            command.append(f"{folder}/probe.o")
            done = subprocess.run(
                command, input=_PROBE, text=True, capture_output=True, check=False
            )
        return found if done.returncode == 0 else None
    return None


def has_cmake() -> bool:
    return shutil.which("cmake", path=environment()["PATH"]) is not None


def runtime_library(name: str) -> str | None:
    """Return the path of a library of the compiler, such as libasan.so."""
    command = [str(compiler()), f"-print-file-name={name}"]
    path = subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip()
    return path if os.path.isabs(path) else None  # gcc prints just the name if it has no such file


def build_extension(name: str, *options: str) -> Path:
    """Build the native kernels with these CMake options, in a folder kept for the next run."""
    nanobind = pytest.importorskip("nanobind")
    folder = ROOT / "build" / f"{name}-{sysconfig.get_config_var('SOABI')}"
    configure = [
        *("cmake", "-S", str(ROOT / "csrc"), "-B", str(folder), *options),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"),
    ]
    if shutil.which("ninja", path=environment()["PATH"]):
        configure += ["-G", "Ninja"]
    parallel = str(os.cpu_count())
    for command in (configure, ["cmake", "--build", str(folder), "--parallel", parallel]):
        done = subprocess.run(
            command, env=environment(), text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (extension,) = folder.glob("_native.*so")
    return extension


def run_tests(
    extension: Path, arguments: Sequence[str], variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest in its own process, with `extension` in place of the installed one."""
    return subprocess.run(
        [sys.executable, "-c", _RUN, str(extension), "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=environment() | dict(variables or {}),
        text=True,
        capture_output=True,
        check=False,
    )
