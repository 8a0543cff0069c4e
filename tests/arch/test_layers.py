"""Imports run in one direction: allowed imports of each part, including lazy ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

import pytest

pytestmark = pytest.mark.check

# Facts shared by the trunks; workers may import nothing else of core.
BRIDGE = {"core.plan", "core.types", "core.sampling_params", "core.structured"}

# Facts and vocabulary that every part above config may import, and that import nothing else.
GROUND = {"errors", "options", "files", "spec"}

# For each part of kvik, the other parts that it may import. "config" allows all of config. `GROUND`
# is only listed for parts that may not import all of config.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "options": {"errors"},
    "files": {"errors"},
    "spec": {"errors", "options", "files"},
    # control: decides, and never imports torch
    "core": {*GROUND, "frozen"},
    "config": {*GROUND, "models", "core.config"},
    "text": {"config", "core", "child_process"},
    "engine": {"config", "core", "text", "child_process", "interrupts", "version"},
    "gguf": {*GROUND, "models", "core.sampling_params"},
    # compute
    "kernels": {"spec.experts", "spec.kv", "spec.shares", "spec.visible_keys", "spec.weight_kind"},
    "attention": {"errors", "frozen", "spec.kv", "spec.shares", "spec.visible_keys", "kernels"},
    "nn": {*GROUND, "models", "gguf", "kernels", "attention"},
    # Declarations of networks: run by the builder of nn, or described without torch.
    "models": {*GROUND},
    "worker": {
        "config",
        "frozen",
        "kernels",
        "attention",
        "nn",
        "models",
        "version",
        "collector",
        "links",
        *BRIDGE,
    },
    "quantize": {"config", "text", "kernels", "attention", "nn", "models"},
    "planner": {"config", "core", "engine", "gguf", ""},
    # top: only launch joins the trunks
    "model_files": {"config", "core", "text", "engine", "gguf"},
    "export": {"config", "core", "gguf", "kernels", "attention", "nn", "models", "model_files"},
    # Facts of models unknown to kvik, from a process with transformers.
    "fallback": {"config", "child_process", "model_files", "worker.transformers_model"},
    # A leaf: it receives an engine, and does not build one.
    "server": {"config", "core", "text", "engine", "model_files", ""},
    "launch": {
        "config",
        "fallback",
        "core",
        "text",
        "engine",
        "model_files",
        "worker",
        "collector",
        "rank_process",
        "stage_process",
        "ray_launcher",
    },
    # Both ends of the other processes of a group that computes one model.
    "rank_process": {"config", "child_process", "collector", "kernels", "worker"},
    "stage_process": {
        *("config", "child_process", "collector", "kernels", "links", "rank_process", "worker"),
    },
    "ray_launcher": {"config", "rank_process", "stage_process"},
    "links": {"version"},
    # Both ends of the engine in its own process, behind a socket.
    "engine_process": {
        "config",
        "core",
        "child_process",
        "collector",
        "engine",
        "launch",
        "kernels.cpu._native",
    },
    "llm": {
        "config",
        "core",
        "text",
        "engine",
        "model_files",
        "launch",
        "prompts",
    },
    "lang": {"config", "core", "llm", "remote_server"},
    "remote_server": {"config"},
    # The texts and queue limits of the server, without HTTP.
    "async_llm": {
        "config",
        "core",
        "text",
        "engine",
        "model_files",
        "launch",
        "engine_process",
        "llm",
        "prompts",
        "server",
    },
    # Makes plans for a worker itself, as an alternative to the engine.
    "evaluate": {
        *("config", "text", "model_files", "launch", "attention", "kernels"),
        *("worker.graphs", "worker.input_batch", "worker.loading", "worker.platforms", *BRIDGE),
    },
    # Draft heads, trained with a frozen model.
    "training": {"config", "text", "nn", "evaluate", "interrupts"},
    # From a model to an engine folder.
    "build": {"config", "model_files", "launch", ""},
    "prompts": {"errors"},
    "frozen": set(),
    "version": set(),
    "collector": set(),
    "child_process": set(),
    "interrupts": set(),
    # A separate package, which nothing in kvik imports.
    "kvik_bench": {
        "config",
        "core",
        "text",
        "engine",
        "child_process",
        "interrupts",
        "kernels",
        "attention",
        "planner",
        "launch",
        "llm",
        "evaluate",
        "cli",
        "model_files",
        "worker.platforms",
        "remote_server",
        "",
    },
    "cli": {
        "config",
        "core",
        "text",
        "engine",
        "planner",
        "server",
        "model_files",
        "export",
        "fallback",
        "launch",
        "engine_process",
        "llm",
        "async_llm",
        "prompts",
        "evaluate",
        "quantize",
        "build",
        "training",
        "worker.draft_tree",
        "collector",
        "remote_server",
        "",
    },
    # `import kvik` itself, and `python -m kvik`
    "": {"config", "core", "engine", "llm", "async_llm", "version"},
    "__main__": {"cli"},
}
for allowed_row in ALLOWED.values():
    if "config" in allowed_row:
        allowed_row.update(GROUND, {"models"})

CONTROL = (
    "errors",
    "options",
    "files",
    "spec",
    "config",
    "core",
    "text",
    "engine",
    "gguf",
    "planner",
    "model_files",
    "server",
)


def inside(module: str) -> str:
    """ "kvik.core.plan" -> "core.plan"; "kvik" -> ""; "kvik_bench.x" stays."""
    if module.partition(".")[0] == "kvik_bench":
        return module
    return module.removeprefix("kvik").removeprefix(".")


def part(module: str) -> str:
    return inside(module).partition(".")[0]


def is_kvik(module: str) -> bool:
    return module.partition(".")[0] in ("kvik", "kvik_bench")


def permitted(target: str, allowed: set[str]) -> bool:
    name = inside(target)
    return any(name == a or (a and name.startswith(a + ".")) for a in allowed)


def test_every_part_has_a_row(sources: dict[str, object]) -> None:
    assert {part(name) for name in sources} <= set(ALLOWED)


def test_imports_follow_the_table(imports: dict[str, dict[str, int]]) -> None:
    bad = [
        f"{module}:{line} imports {target}"
        for module, targets in imports.items()
        for target, line in targets.items()
        if is_kvik(target)
        and part(target) != part(module)
        and not permitted(target, ALLOWED[part(module)])
    ]
    assert not bad


def test_the_table_has_no_cycle() -> None:
    # The root package only exports, and cli reads the version from it.
    graph = {
        name: {entry.partition(".")[0] for entry in row if entry} for name, row in ALLOWED.items()
    }
    TopologicalSorter(graph).prepare()


def test_no_cycles_between_modules(imports: dict[str, dict[str, int]]) -> None:
    graph = {m: {t for t in targets if is_kvik(t) and t != m} for m, targets in imports.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("import cycle: " + " <- ".join(error.args[1])) from None


def test_core_only_imports_the_standard_library(imports: dict[str, dict[str, int]]) -> None:
    impure = {"asyncio", "io", "os", "pathlib", "random", "secrets", "socket", "subprocess"}
    impure |= {"datetime", "threading", "time", "uuid"}
    bad = [
        f"{module}:{line} imports {target}"
        for module, targets in imports.items()
        if part(module) == "core"
        for target, line in targets.items()
        if not is_kvik(target)
        and (target.partition(".")[0] not in sys.stdlib_module_names - impure)
    ]
    assert not bad


def test_forbidden_packages_are_not_imported(imports: dict[str, dict[str, int]]) -> None:
    banned = {"transformers", "pickle", "scipy", "pytest", "hypothesis"}
    bad = [
        f"{module}:{line} imports {target}"
        for module, targets in imports.items()
        for target, line in targets.items()
        if target.partition(".")[0] in banned
        and not module.startswith("kvik_bench.peers.engines.")  # runs in another engine's process
        and (module, target.partition(".")[0]) != ("kvik.worker.transformers_model", "transformers")
    ]
    assert not bad


def test_the_control_trunk_imports_with_torch_blocked(sources: dict[str, object]) -> None:
    names = [name for name in sources if part(name) in CONTROL]
    names += ["kvik", "kvik.cli.main", "kvik.cli.info"]
    script = f"""
import importlib, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
for name in {names!r}:
    importlib.import_module(name)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_lazy_guarded_relative_and_named_imports_are_counted(
    imports_of: Callable[[str, str, set[str]], dict[str, int]],
) -> None:
    known = {"kvik", "kvik.a", "kvik.b", "kvik.c", "kvik.d.e", "kvik.d.f"}
    text = """
import json
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from kvik.a import Thing
def later():
    from kvik import b
    from . import f
    from ..c import y
REGISTRY = {"x": "kvik.d.f", "y": "not.a.module"}
"""
    found = imports_of("kvik.d.e", text, known)
    assert {name for name in found if is_kvik(name)} == {"kvik.a", "kvik.b", "kvik.c", "kvik.d.f"}
    assert "json" in found
