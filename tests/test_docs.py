"""Commands in the documents run, and the files that they name exist.

A block after a line `<!-- run -->` is run: bash by a shell, python as a script. A fresh Python
takes two seconds to import torch, so `kvik` and the scripts run in forks of a process that has
imported it (`SERVER`). `CLIENT` asks it for a fork and passes on arguments and standard streams.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"<!-- run -->\n```(bash|python)\n(.*?)```", re.DOTALL)
BLOCKS = [
    pytest.param(kind, text, id=f"{document.stem}-{kind}-{i}")
    for document in DOCUMENTS
    for i, (kind, text) in enumerate(BLOCK.findall(document.read_text(encoding="utf-8")))
]


SERVER = """
import gc, json, os, socket, sys, traceback
import kvik.async_llm, kvik.cli.main, kvik.llm, kvik.launch, torch

gc.freeze()
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print(flush=True)  # ready
    while True:
        connection, _ = listener.accept()
        data, streams, *_ = socket.recv_fds(connection, 1 << 16, 3)
        if pid := os.fork():
            for number in streams:
                os.close(number)
            _, status = os.waitpid(pid, 0)
            connection.send(bytes([os.waitstatus_to_exitcode(status) & 255]))
            connection.close()
            continue
        code, (folder, *sys.argv) = 1, json.loads(data)
        try:
            os.chdir(folder)
            for place, number in enumerate(streams):
                os.dup2(number, place)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
            if sys.argv[0] == "kvik":
                code = kvik.cli.main.main()
            else:
                exec(compile(sys.argv[1], "script", "exec"), {"__name__": "__main__"})
                code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
"""
CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    arguments = [os.getcwd(), os.path.basename(sys.argv[0]), *sys.argv[1:]]
    socket.send_fds(server, [json.dumps(arguments).encode()], [0, 1, 2])
    sys.exit(server.recv(1)[0])
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with the programs `kvik` and `script`."""
    folder = tmp_path_factory.mktemp("commands")
    address = str(folder / "socket")
    for name in ("kvik", "script"):
        (folder / name).write_text(CLIENT.format(python=sys.executable, address=address))
        (folder / name).chmod(0o755)
    command = [sys.executable, "-c", SERVER, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline()
        yield folder
        server.kill()


def test_the_readme_has_blocks_to_run() -> None:
    kinds = {kind for kind, _ in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert kinds == {"bash", "python"}


@pytest.mark.full
@pytest.mark.parametrize(("kind", "text"), BLOCKS)
def test_a_block_runs(kind: str, text: str, commands: Path, tmp_path: Path) -> None:
    command = [str(commands / "script"), text]
    if kind == "bash":
        command = ["bash", "-euo", "pipefail", "-c", text]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PATH": os.pathsep.join((str(commands), os.environ["PATH"]))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.full
def test_the_installed_command_runs() -> None:
    command = [Path(sys.executable).parent / "kvik", "--version"]
    assert subprocess.run(command, capture_output=True, check=True).stdout


@pytest.mark.check
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_files_that_a_document_names_exist(document: Path) -> None:
    """Checks names in code quotes, such as `docs/structure.md`, relative to the root or the
    package."""
    names = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", document.read_text(encoding="utf-8"))
    roots = (ROOT, ROOT / "src", ROOT / "src" / "kvik")
    missing = [name for name in names if not any((root / name).exists() for root in roots)]
    assert not missing


@pytest.mark.check
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_lines_of_text_are_short(document: Path) -> None:
    """At most 120 characters; rows of tables and code may be longer."""
    text = re.sub(r"^ *```.*?^ *```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    lines = (line for line in text.splitlines() if not line.startswith(("|", "    ")))
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.check
def test_every_folder_is_in_the_structure() -> None:
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "kvik"
    folders = [p.name for p in package.iterdir() if p.is_dir() and p.name != "__pycache__"]
    assert [name for name in folders if f"`{name}/`" not in text] == []


@pytest.mark.check
def test_files_that_a_folder_names_exist() -> None:
    """The docstring of a folder's `__init__.py` is the map of the folder."""
    source, missing = ROOT / "src" / "kvik", []
    for init in source.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        for name in re.findall(r"`([\w/]+\.py)`", text):
            own = [init.parent / name, source / name, *init.parent.glob(f"*/{name}")]
            if not any(path.exists() for path in own):
                missing.append(f"{init.relative_to(source)}: {name}")
    assert not missing
