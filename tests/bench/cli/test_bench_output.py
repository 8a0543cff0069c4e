"""Outputs of a benchmark, and refusals before anything is measured."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.bench_results import read_result, sample_result

from kvik.cli.terminal import abandon_broken_streams
from kvik.errors import ConfigError
from kvik_bench.cli.output import add_output_flags, check_output, write_out


def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_output_flags(parser)
    return parser.parse_args(words)


@pytest.mark.full
def test_files_are_written_and_tables_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    wanted = flags(
        f"--json={folder}/r 1.json", f"--html={folder}/r.html", f"--plot={folder}/new/charts"
    )
    check_output(wanted)
    write_out(sample_result(), wanted)
    assert read_result((folder / "r 1.json").read_bytes()) == sample_result()
    assert (folder / "r.html").read_text().startswith("<!DOCTYPE html>")
    assert len(list((folder / "new" / "charts").glob("*.png"))) == 4
    out, err = capsys.readouterr()
    assert "TTFT p50" in out and f"wrote {folder}/r 1.json" in err


def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = flags("--json", "-")
    check_output(wanted)
    write_out(sample_result(), wanted)
    assert read_result(capsys.readouterr().out) == sample_result()


def test_a_path_that_is_not_utf_8_loses_no_result(tmp_path: Path) -> None:
    result = replace(sample_result(), facts={"model": os.fsdecode(b"caf\xe9")}, charts=())
    write_out(result, flags(f"--json={tmp_path}/r.json", f"--html={tmp_path}/r.html"))
    kept = read_result((tmp_path / "r.json").read_bytes())
    assert kept == replace(result, facts={"model": "caf?"})
    assert "caf?" in (tmp_path / "r.html").read_text()


def test_files_are_written_even_if_standard_output_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    out = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(BrokenPipeError):  # which the command takes for no failure
        write_out(sample_result(), flags(f"--json={tmp_path}/r.json"))
    abandon_broken_streams()  # what `out` still holds
    out.close()
    assert read_result((tmp_path / "r.json").read_bytes()) == sample_result()


def test_tables_are_printed_when_a_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = flags(f"--json={tmp_path}/gone/r.json")
    with pytest.raises(ConfigError, match="json: cannot be written"):
        write_out(sample_result(), wanted)
    assert "TTFT p50" in capsys.readouterr().out


def test_paths_that_cannot_be_written_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for words in (
        f"--json={tmp_path}",
        f"--html={tmp_path}/none/x.html",
        f"--plot={tmp_path}/file",
        f"--plot={tmp_path}/file/charts",
    ):
        with pytest.raises(ConfigError, match="must be a f"):
            check_output(flags(words))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    for words in (f"--json={tmp_path}/r.json", f"--plot={tmp_path}/charts"):
        with pytest.raises(ConfigError, match="to write to"):
            check_output(flags(words))


@pytest.mark.parametrize("flag", ["--plot", "--html"])
def test_a_missing_matplotlib_names_the_extra_to_install(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvik\[bench\]'") as caught:
        check_output(flags(flag, str(tmp_path / "x")))
    assert f"--{caught.value.field}" == flag
    check_output(flags("--json", str(tmp_path / "x")))
