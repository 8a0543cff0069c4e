"""Parse the source tree, so that rules are checked without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Source:
    name: str  # dotted, such as "kvik.core.plan"; a package has its own name
    path: Path
    text: str
    tree: ast.Module
    is_package: bool = False


def imported(source: Source, known: frozenset[str]) -> dict[str, int]:
    """Return every module of `known`, and every external one, that `source` names, with a line
    number.

    Imports inside functions and under TYPE_CHECKING count, as does a string with the full name of a
    known module, by which a registry or a lazy export imports it.
    """
    package = source.name if source.is_package else source.name.rpartition(".")[0]
    found: dict[str, int] = {}
    for node in ast.walk(source.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            full = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in known else base for name in full]
        elif isinstance(node, ast.Constant) and node.value in known and node.value != "kvik":
            names = [node.value]
        for name in names:
            found.setdefault(name, getattr(node, "lineno", 0))
    return found


@pytest.fixture(scope="session")
def sources() -> dict[str, Source]:
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        found[name] = Source(name, path, text, ast.parse(text), is_package)
    assert "kvik.core.plan" in found
    return found


@pytest.fixture(scope="session")
def imports(sources: dict[str, Source]) -> dict[str, dict[str, int]]:
    """Return module -> {imported module: line}."""
    known = frozenset(sources)
    return {name: imported(source, known) for name, source in sources.items()}


@pytest.fixture(scope="session")
def imports_of() -> Callable[[str, str, set[str]], dict[str, int]]:
    """Return the import finder for a piece of text, to test the finder itself."""

    def find(name: str, text: str, known: set[str]) -> dict[str, int]:
        return imported(Source(name, Path(), text, ast.parse(text)), frozenset(known))

    return find
