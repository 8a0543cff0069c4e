"""`kvik bench latency`, `throughput`, `startup`, `batching` and `techniques`: from the command line
to figures, on the bundled model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.calibrations import calibration
from helpers.commands import Command
from msgspec.structs import replace

from kvik.cli.main import main
from kvik.config.hardware import detect
from kvik.errors import KvikError
from kvik.planner.calibration import ReadRate, calibration_path, save, this_machine
from kvik_bench.inprocess.rounds import Watch
from kvik_bench.inprocess.startup import start_once

ENGINE = ("--device", "cpu", "--threads", "1", "--max-model-len", "128", "--max-num-seqs", "8")
ONE_MORE = ("--repeats", "2", "--warmup", "0")


def bench(verb: str, file: Path, *flags: str) -> dict[str, Any]:
    assert main(["bench", verb, *flags, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["kind"] == verb
    assert any("kvik calibrate" in remark for remark in found["remarks"])
    return found


def values(row: dict[str, Any]) -> dict[str, list[float]]:
    return {figure["name"]: figure["values"] for figure in row["figures"]}


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--batch", "1,4", "--prompt-tokens", "16", "--output-tokens", "6")
    found = bench("latency", tmp_path / "out.json", *sizes, *ONE_MORE, *ENGINE)
    assert [row["label"] for row in found["rows"]] == ["batch 1", "batch 4"]
    for row, batch in zip(found["rows"], (1, 4), strict=True):
        figures = values(row)
        assert figures["batch"] == [batch]
        for ttft, tpot, e2e in zip(*(figures[n] for n in ("TTFT", "TPOT", "E2E")), strict=True):
            assert e2e == pytest.approx(ttft + 5 * tpot)
        for rate, e2e in zip(figures["output"], figures["E2E"], strict=True):
            assert rate <= batch * 6 / (e2e / 1e3) * 1.001  # wall time is at least the mean
        assert len(row["series"]["ITL, ms"]) == 2 * batch * 5
    assert "Medians of 2 rounds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "flags"),
    [
        ("latency", ("--batch", "1", "--output-tokens", "2")),
        ("throughput", ("--num-requests", "2", "--output-tokens", "2")),
    ],
)
def test_load_of_other_processes_is_reported(
    verb: str, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "others", lambda watch: 0.4)
    prompt = ("--prompt-tokens", "4")
    found = bench(verb, tmp_path / "out.json", *flags, *prompt, *ONE_MORE, *ENGINE)
    assert sum("other processes took 40%" in remark for remark in found["remarks"]) == 1


def test_figures_beyond_the_ceilings_are_reported_as_invalid(
    tmp_path: Path, command: Command
) -> None:
    """And lead to no advice."""
    slow = (ReadRate(8 << 20, 1e6), ReadRate(512 << 20, 1e6))
    machine = this_machine(detect(), 1, "")
    save(replace(calibration(), machine=machine, reads=slow), calibration_path())
    sizes = ("--batch", "1", "--prompt-tokens", "16", "--output-tokens", "6")
    file = tmp_path / "out.json"
    text = command("bench", "latency", *sizes, *ONE_MORE, *ENGINE, "--json", str(file)).out
    assert ", impossible" in text
    found = json.loads(file.read_text())
    impossible = {f["name"] for f in found["rows"][0]["figures"] if f["impossible"]}
    assert "of bandwidth" in impossible
    (remark,) = (r for r in found["remarks"] if r.startswith("batch 1"))
    assert "do not believe" in remark and "would help" not in remark


def test_throughput(tmp_path: Path) -> None:
    sizes = ("--num-requests", "12", "--prompt-tokens", "2..20", "--output-tokens", "3")
    shared = ("--prefix-tokens", "32")
    found = bench("throughput", tmp_path / "out.json", *sizes, *shared, *ONE_MORE, *ENGINE)
    (row,) = found["rows"]
    figures = values(row)
    for i, seconds in enumerate(figures["wall time"]):
        assert figures["output"][i] == pytest.approx(36 / seconds)
        assert figures["requests"][i] == pytest.approx(12 / seconds)
        assert figures["total"][i] == pytest.approx(figures["input"][i] + figures["output"][i])
        assert figures["E2E p99"][i] <= 1e3 * seconds
    # The last 4 of 12 begin after the first 8 have cached their prefix.
    assert all(share > 0 for share in figures["prefix hits"])
    assert figures["preemptions"] == [0, 0]
    assert figures["peak memory"][0] > 50


def test_throughput_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:00:00.0000000,10,2", "2023-11-16 18:10:00.0000000,20,4"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    flags = ("--trace", str(trace), "--repeats", "1", "--warmup", "0")
    found = bench("throughput", tmp_path / "out.json", *flags, *ENGINE)
    figures = values(found["rows"][0])
    assert figures["input"][0] == pytest.approx(30 / figures["wall time"][0])
    assert figures["output"][0] == pytest.approx(6 / figures["wall time"][0])
    assert figures["wall time"][0] < 60


def test_batching(tmp_path: Path) -> None:
    load = ("--num-requests", "4", "--rate", "1000", "--prompt-tokens", "4", "--batch-size", "2")
    flags = ("--output-tokens", "2..6", "--repeats", "1", "--warmup", "0", *ENGINE[:-2])
    found = bench("batching", tmp_path / "out.json", *load, *flags)
    assert [row["label"] for row in found["rows"]] == ["static", "dynamic", "continuous"]
    assert found["facts"]["batch size"].startswith("2 requests")
    assert "1e+03 a second (given)" in found["facts"]["arrivals"]


def test_techniques(tmp_path: Path) -> None:
    sizes = ("--num-requests", "2", "--prefix-tokens", "16", "--prompt-tokens", "4")
    flags = ("--output-tokens", "3", "--alone", "1", "--repeats", "1", "--warmup", "0")
    found = bench("techniques", tmp_path / "out.json", *sizes, *flags, *ENGINE)
    assert len(found["rows"]) == 7
    assert values(found["rows"][0])["over the first"] == [1.0]


@pytest.mark.full
def test_startup(tmp_path: Path) -> None:
    flags = ("--prompt-tokens", "4", "--repeats", "1", "--warmup", "0")
    started = time.monotonic()
    found = bench("startup", tmp_path / "out.json", *flags, *ENGINE)
    elapsed = time.monotonic() - started
    first, short = (values(row) for row in found["rows"])
    parts = ("Python", "import", "resolve", "torch", "load", "first token")
    assert first["seconds"][0] == pytest.approx(sum(first[name][0] for name in parts))
    assert all(first[name][0] > 0 for name in parts)
    assert 0 < short["seconds"][0] < first["seconds"][0] < elapsed
    assert first["peak memory"][0] > 50


def test_a_failing_start_is_reported_with_the_reason() -> None:
    with pytest.raises(KvikError, match="startup: the process failed: .*no folder"):
        start_once({"device": "cpu", "model": "/no/such/model"}, [20])


def test_invalid_options_are_refused(tmp_path: Path, command: Command) -> None:
    long = tmp_path / "long.csv"
    long.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0000000,127,2\n")
    for arguments, message in (
        (("latency", "--batch", "0"), "--batch:"),
        (("latency", "--batch", "1,9"), "--batch:"),
        (("latency", "--batch", "1", "--output-tokens", "0"), "--output-tokens:"),
        (("latency", "--batch", "1", "--prompt-tokens", "200"), "--prompt-tokens:"),
        (("latency", "--repeats", "0"), "--repeats:"),
        (("throughput", "--num-requests", "0"), "--num-requests:"),
        (("throughput", "--prompt-tokens", "900"), "--prompt-tokens:"),
        (("throughput", "--prefix-tokens", "-1"), "--prefix-tokens:"),
        (("throughput", "--prefixes", "0"), "--prefixes:"),
        (("throughput", "--output-tokens", "many"), "--output-tokens:"),
        (("throughput", "--trace", "no.csv"), "--trace: cannot be read"),
        (("throughput", "--trace", str(long)), "--trace: 127, and 2 of output, are more than"),
        (("throughput", "--trace", "no.csv", "--prompt-tokens", "9"), "--prompt-tokens:"),
        (("startup", "--prompt-tokens", "0"), "--prompt-tokens:"),
        (("startup", "--warmup", "-1"), "--warmup:"),
        (("batching",), "--max-num-seqs:"),
        *((("batching", "--rate", rate), "--rate:") for rate in ("0", "-1", "nan", "inf")),
        (("batching", "--policy", "static"), "--policy:"),
        (("techniques", "--quantization", "int8"), "--quantization:"),
        (("techniques", "--spec-method", "suffix"), "--spec-method:"),
        (("techniques", "--prefix-tokens", "0", "--num-requests", "9"), "--num-requests:"),
        (("techniques", "--prefix-tokens", "0", "--alone", "0"), "--alone:"),
        (("techniques", "--prefix-tokens", "0", "--num-requests", "1"), "--alone:"),
        (("techniques", "--prefix-tokens", "120"), "--prompt-tokens:"),
        (("attention", "--lengths", "0"), "--lengths:"),
        (("attention", "--lengths", "16,131072"), "--lengths: must be in [1, "),
        (("attention", "--lengths", "65536"), "--lengths:"),  # 128 GiB per matrix
        (("attention", "--attention-backend", "reference"), "--attention-backend:"),
    ):
        assert command.refusal("bench", *arguments, *ENGINE).startswith(message)
