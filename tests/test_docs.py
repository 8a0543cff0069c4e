"""Commands in the documents run, and the files that they name exist.

A block after a line `<!-- run -->` is run: bash by a shell, python as a script. Python and the
`kvik` of the shell are forked from a process that has imported torch.
"""

from __future__ import annotations

import ast
import os
import re
import socket
import socketserver
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"<!-- run -->\n```(bash|python)\n(.*?)```", re.DOTALL)
BLOCKS = [
    pytest.param(kind, text, id=f"{document.stem}-{kind}-{i}")
    for document in DOCUMENTS
    for i, (kind, text) in enumerate(BLOCK.findall(document.read_text(encoding="utf-8")))
]


def test_the_readme_has_blocks_to_run() -> None:
    kinds = {kind for kind, _ in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert kinds == {"bash", "python"}


# A command `kvik` that hands its arguments and files to another process, and ends as that does.
KVIK = """#!{python} -ISs
import os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
    line.connect({address!r})
    socket.send_fds(line, ["\\0".join([os.getcwd(), *sys.argv[1:]]).encode()], [0, 1, 2])
    sys.exit(int(line.recv(8)))
"""


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    socket_type = socket.SOCK_SEQPACKET


class ForkKvik(socketserver.BaseRequestHandler):
    """Runs a command, and answers its exit code."""

    def handle(self) -> None:
        data, files, _, _ = socket.recv_fds(self.request, 1 << 16, 3)
        folder, *words = data.decode().split("\0")
        streams = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
        command = [sys.executable, "-m", "kvik", *words]
        done = subprocess.run(command, cwd=folder, **streams, check=False)
        for file in files:
            os.close(file)
        self.request.send(str(done.returncode).encode())


@pytest.fixture(scope="module")
def commands(forked: None) -> Iterator[str]:
    """Return a folder with a `kvik` whose processes are forked."""
    with TemporaryDirectory() as folder, Server(f"{folder}/line", ForkKvik) as server:
        file = Path(folder, "kvik")
        file.write_text(KVIK.format(python=sys.executable, address=f"{folder}/line"))
        file.chmod(0o755)
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield folder
        server.shutdown()
        thread.join()


@pytest.mark.full
@pytest.mark.parametrize(("kind", "text"), BLOCKS)
def test_a_block_runs(kind: str, text: str, commands: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", text]
    if kind == "bash":
        command = ["bash", "-euo", "pipefail", "-c", text]
    folders = os.pathsep.join((commands, os.environ["PATH"]))
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PATH": folders},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


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
