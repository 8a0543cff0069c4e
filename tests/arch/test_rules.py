"""House rules that can be checked in syntax: each finds violations and names their lines."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.check

# Functions that may take **options and pass them on, each with checks of every name.
HANDS_ON_KEYWORDS = {
    "kvik.llm:LLM.__init__",
    "kvik.core.sampling_params:_OtherNames.__call__",
    "kvik.core.sampling_params:SamplingParams.with_changes",
    "kvik.lang.program:State.gen",
    # These pass options to the caller's own function.
    "kvik.lang.program:run",
    "kvik.lang.program:stream",
}

MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"}
MUTATORS |= {"setdefault", "sort", "update", "appendleft", "popleft"}
CONTAINERS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}
ITERATORS = {"count", "cycle", "iter"}

# Pronouns, participles and superlatives as names of values do not say what the values are.
VAGUE = {"asked", "beside", "found", "given", "held", "least", "most", "one", "own", "room"}
VAGUE |= {"wanted", "what", "whole"}


def environment_reads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
            yield node.lineno, f"os.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ("environ", "getenv", "environb"):
                    yield node.lineno, f"from os import {alias.name}"


def interpreters(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
            yield node.lineno, "sys.executable"


def feature_tests(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "hasattr":
            yield node.lineno, "hasattr"


def callee(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def mutable_state(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find containers and iterators at module level that are modified in the file, or not named or
    annotated as constants."""
    constants: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            value, annotation = node.value, ""
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            names, value = [node.target.id], node.value
            annotation = ast.unparse(node.annotation)
        else:
            continue
        if any(isinstance(n, ast.Call) and callee(n) in ITERATORS for n in ast.walk(value)):
            yield node.lineno, f"{names} is an iterator shared by the whole process"
        displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
        call = isinstance(value, ast.Call) and callee(value) in CONTAINERS
        if not isinstance(value, displays) and not call:
            continue
        for name in names:
            constants[name] = node.lineno
            dunder = name.startswith("__")
            final = annotation.startswith(("Final", "Mapping", "Sequence", "tuple"))
            if not (dunder or final or name.isupper()):
                yield node.lineno, f"{name} is mutable and not declared constant"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"
        changed = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in MUTATORS:
                changed = node.func.value
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.AugAssign):
            changed = node.target
        if isinstance(changed, ast.Name) and changed.id in constants:
            yield node.lineno, f"{changed.id}, a constant of line {constants[changed.id]}, changes"


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        prefix, parent = stack.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name, node
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                stack.append((f"{prefix}{node.name}.", node))
            else:
                stack.append((prefix, node))


def keyword_pass_through(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for name, function in functions(tree):
        if function.args.kwarg is None:
            continue
        own = function.args.kwarg.arg
        for node in ast.walk(function):
            if isinstance(node, ast.keyword) and node.arg is None and callee(node.value) == own:
                yield function.lineno, name


def vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for _, function in functions(tree):
        for node in ast.walk(function):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
            if name.strip("_") in VAGUE:
                yield node.lineno, name


Rule = Callable[[ast.Module], Iterator[tuple[int, str]]]


def violations(sources: dict[str, Any], rule: Rule) -> list[str]:
    return [
        f"{source.path}:{line}: {what}"
        for source in sources.values()
        for line, what in rule(source.tree)
    ]


def test_the_environment_is_read_in_one_place(sources: dict[str, Any]) -> None:
    others = {name: s for name, s in sources.items() if name != "kvik.config.env"}
    assert not violations(others, environment_reads)


def test_python_is_started_in_one_place(sources: dict[str, Any]) -> None:
    """That function keeps the current folder out of the path. Adapters of other engines are
    scripts."""
    allowed = ("kvik.child_process", "kvik_bench.peers.engine_entries")
    others = {name: s for name, s in sources.items() if name not in allowed}
    assert not violations(others, interpreters)


def test_no_feature_is_detected_by_hasattr(sources: dict[str, Any]) -> None:
    assert not violations(sources, feature_tests)


def test_no_mutable_state_at_module_level(sources: dict[str, Any]) -> None:
    assert not violations(sources, mutable_state)


def test_keywords_are_not_passed_on(sources: dict[str, Any]) -> None:
    found = {
        f"{name}:{function}"
        for name, source in sources.items()
        for _, function in keyword_pass_through(source.tree)
    }
    assert found <= HANDS_ON_KEYWORDS


def test_names_say_what_values_are(sources: dict[str, Any]) -> None:
    """Apart from the kernels of Triton, which are formulas."""
    prose = {name: s for name, s in sources.items() if "kernels.triton" not in name}
    assert len(prose) < len(sources)
    assert not violations(prose, vague_names)


def test_class_names_are_unique(sources: dict[str, Any]) -> None:
    """Names with a leading underscore are local to their module; tools may repeat those."""
    count = Counter(
        node.name
        for name, source in sources.items()
        if not name.startswith("kvik_bench")
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, times in count.items() if times > 1]


# Interfaces whose defaults suit most implementations; these count as no level.
INTERFACES = {"AttentionBackend", "PageFolder", "Platform"}


def test_inheritance_is_one_level_deep(sources: dict[str, Any]) -> None:
    parents = {
        node.name: [callee(base) for base in node.bases]
        for source in sources.values()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }
    bad = []
    known = parents.keys() - INTERFACES
    for name, bases in parents.items():
        ours = [base for base in bases if base in known]
        if len(ours) > 1 or any(b in known for base in ours for b in parents[base]):
            bad.append(f"{name}({', '.join(bases)})")
    assert not bad


def test_entry_points_name_what_there_is() -> None:
    """Nothing imports them by name, so that no other test or tool would miss them."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    groups = {"scripts": project["scripts"], **project["entry-points"]}
    assert len(groups) >= 3
    for group, entries in groups.items():
        for name, value in entries.items():
            assert EntryPoint(name, value, group).load() is not None


def test_packages_have_docstrings_and_export_nothing(sources: dict[str, Any]) -> None:
    """Except for the names of the Python API."""
    bad = [
        str(source.path)
        for name, source in sources.items()
        if source.is_package and name not in ("kvik", "kvik.lang", "kvik.server")
        if len(source.tree.body) != 1 or not ast.get_docstring(source.tree)
    ]
    assert not bad


def test_every_module_has_a_docstring(sources: dict[str, Any]) -> None:
    assert not [str(s.path) for s in sources.values() if not ast.get_docstring(s.tree)]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (environment_reads, "import os\ndef f(): return os.environ.get('A')"),
        (environment_reads, "from os import getenv"),
        (feature_tests, "def f(x): return hasattr(x, 'y')"),
        (mutable_state, "cache = {}"),
        (mutable_state, "CACHE = {}\ndef f(k): CACHE[k] = 1"),
        (mutable_state, "SEEN = set()\ndef f(k): SEEN.add(k)"),
        (mutable_state, "def f():\n    global x\n    x = 1"),
        (mutable_state, "serial = itertools.count().__next__"),
        (keyword_pass_through, "class A:\n    def f(self, **kw): return g(1, **kw)"),
        (vague_names, "def f(x): return [one for one in x]"),
        (vague_names, "def f(_found): pass"),
    ],
)
def test_a_rule_detects_violations(rule: Rule, text: str) -> None:
    assert list(rule(ast.parse(text)))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (environment_reads, "import os\nos.cpu_count()"),
        (
            mutable_state,
            "NAMES = {'a': 1}\nnames: Final = ['a']\ndef f():\n    x = []\n    x.append(1)",
        ),
        (mutable_state, "__all__ = ['a']\nx = 1\ny = (1, 2)\nT = Callable[[int], str]"),
        (keyword_pass_through, "def f(**kw): return sorted(kw)"),
        (vague_names, "def f(x): return x.found(one)"),
    ],
)
def test_a_rule_accepts_valid_code(rule: Rule, text: str) -> None:
    assert not list(rule(ast.parse(text)))
