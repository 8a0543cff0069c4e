"""What a test needs to build the native kernels: a compiler, CMake, an environment for both."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

# C++20 and the headers of Python: without either, kvik installs without its native kernels.
_PROBE = "#include <Python.h>\n#include <bit>\nint lanes() { return std::popcount(7u); }\n"


def environment() -> dict[str, str]:
    """The environment, with the programs that stand beside this Python (CMake, ninja) first."""
    scripts = sysconfig.get_path("scripts")
    return os.environ | {"PATH": os.pathsep.join((scripts, os.environ.get("PATH", "")))}


@functools.cache
def compiler() -> str | None:
    """The C++ compiler that a build of kvik would use, if it can build kvik."""
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
    """Path of a library that comes with the compiler, such as libasan.so."""
    command = [str(compiler()), f"-print-file-name={name}"]
    path = subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip()
    return path if os.path.isabs(path) else None  # gcc repeats the name of what it has not
