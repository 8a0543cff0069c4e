"""`docs/server-contract.md` has a row per item, and names existing tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "server-contract.md").read_text(encoding="utf-8")
ROWS = {int(n): row for n, row in re.findall(r"^\| (\d+) \|(.*)\|$", TEXT, re.MULTILINE)}
NODES = sorted(set(re.findall(r"`([\w./-]+::[\w:]+)`", TEXT)))
LATER = "not yet applicable: "


@cache
def functions_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )


def test_every_item_has_a_row() -> None:
    assert list(ROWS) == list(range(1, 57))


def test_each_row_names_its_tests_or_why_it_has_none() -> None:
    for item, row in ROWS.items():
        what, answer, tests = (cell.strip() for cell in re.split(r"(?<!\\)\|", row))
        assert what and answer, item
        assert bool(tests) != answer.startswith(LATER), item
        left = re.sub(r"`[\w./-]+::[\w:]+`", "", tests)
        assert not left.strip(", "), f"{item}: the last cell names tests, and nothing else"


def test_the_tests_that_are_named_exist() -> None:
    missing = []
    for node in NODES:
        path, _, name = node.partition("::")
        if not (ROOT / path).exists() or name not in functions_in(ROOT / path):
            missing.append(node)
    assert not missing


def test_clients_have_tests_too() -> None:
    table = TEXT.partition("## Clients that work unchanged")[2]
    rows = [row for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) == 13
    assert all("::test_" in row for row in rows)
