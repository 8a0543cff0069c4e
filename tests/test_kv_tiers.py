"""Tiers of the KV cache, through the Python API: loads, swaps, recordings."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.faults import raising
from helpers.http_server import until
from helpers.matrix import make_model
from helpers.optional_native import needs_native

from kvik import LLM, SamplingParams
from kvik.cli.main import main
from kvik.config.config import EngineConfig
from kvik.core import moves
from kvik.core.types import EngineRequest
from kvik.errors import ConfigError
from kvik.launch import reschedule, resolve_config, start
from kvik.worker import disk_tier, worker

pytestmark = pytest.mark.usefixtures("forked", "loads_always")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TINY = {"device": "cpu", "threads": 1, "num_blocks": 30, "max_model_len": 256}


def prompts(count: int, tokens: int = 200) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(5, 1000) for _ in range(tokens)] for _ in range(count)]


def texts(llm: LLM, asked: list[list[int]]) -> list[list[int]]:
    return [llm.generate([one], GREEDY)[0].outputs[0].token_ids for one in asked]


def test_prompts_that_left_the_cache_are_not_computed_again() -> None:
    asked = prompts(3)
    with LLM(**TINY, kv_tiers="memory:64MiB") as llm:
        first = texts(llm, asked)
        before = llm.stats()
        assert texts(llm, asked) == first
        stats = llm.stats()
    assert stats.work.prefill_tokens - before.work.prefill_tokens == 3 * 8
    (memory,) = stats.moves.tiers
    assert 0 < memory.loaded == stats.moves.totals.loaded_tokens // 16
    assert memory.bytes <= memory.capacity and memory.bytes_per_second


def test_an_emptied_cache_forgets_the_tiers_too() -> None:
    asked = prompts(1)
    with LLM(**TINY, kv_tiers="memory:64MiB") as llm:
        texts(llm, asked)
        llm.reset_prefix_cache()
        (output,) = llm.generate(asked, GREEDY)
        assert output.num_cached_tokens == 0


def record(folder: Path, **options: object) -> tuple[Path, object]:
    """Record a run with loads and swaps."""
    file = folder / "flight"
    engine = start(resolve_config(EngineConfig(**{**TINY, **options})), record=file)
    loop = engine.loop
    for round_ in range(2):
        for i, prompt in enumerate(prompts(4, 120)):
            loop.add(EngineRequest(f"{round_}-{i}", prompt, GREEDY.with_changes(max_tokens=60)))
        while loop.has_work:
            loop.poll()
    stats = loop.stats()
    loop.close()
    return file, stats


def test_a_disk_tier_serves_the_next_engine_too(tmp_path: Path) -> None:
    asked, tiers = prompts(3), f"disk:{tmp_path / 'kv'}:1GiB"
    with LLM(**TINY, kv_tiers=tiers) as llm:
        first = texts(llm, asked)
    with LLM(**{**TINY, "num_blocks": 50}, kv_tiers=tiers) as llm:  # blocks may differ
        outputs = llm.generate(asked, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == first
        assert [output.num_cached_tokens for output in outputs] == [192] * 3
    with LLM(**TINY, kv_cache_dtype="int8", kv_tiers=tiers) as llm:  # another format does not
        assert [o.num_cached_tokens for o in llm.generate(asked, GREEDY)] == [0] * 3


def test_another_scheduler_of_the_same_worker_has_the_tiers_too(tmp_path: Path) -> None:
    tiers = f"memory:64MiB,disk:{tmp_path / 'kv'}:1GiB"
    engine = start(resolve_config(EngineConfig(**TINY, kv_tiers=tiers)))
    for _ in range(2):
        loop, found = engine.loop, []
        for prompt in prompts(3):
            loop.add(EngineRequest("a", prompt, GREEDY))
            while loop.has_work:
                found += [delta.report for delta in loop.poll() if delta.report]
        engine = reschedule(engine, engine.resolved.scheduler, engine.resolved.cache)
    assert [report.num_cached_tokens for report in found] == [192] * 3
    engine.loop.close()


def test_a_folder_that_cannot_be_used_is_found_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(worker, "load_share", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match="^kv_tiers: cannot keep pages in .*/file/kv'"):
        LLM(**TINY, kv_tiers=f"disk:{tmp_path / 'file' / 'kv'}:1GiB")


def test_a_disk_that_does_not_answer_keeps_no_request_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = prompts(3), threading.Event()
    read = disk_tier.DiskTier.read
    monkeypatch.setattr(moves, "LOAD_SECONDS", 0.3)
    with LLM(**TINY, kv_tiers=f"disk:{tmp_path / 'kv'}:1GiB") as llm:
        right = texts(llm, asked)
        monkeypatch.setattr(disk_tier.DiskTier, "read", lambda *a: answer.wait(20) and read(*a))
        try:
            assert texts(llm, asked[:1]) == right[:1]  # nothing was loaded
            late = GREEDY.with_changes(max_tokens=1)
            assert llm.stats().moves.totals.given_up == 1
            assert llm.generate([asked[1][:40]], late)[0].outputs[0].token_ids
        finally:
            answer.set()
        assert texts(llm, asked) == right


def damage(path: Path, rng: random.Random) -> None:
    """Damage a file that may have been damaged before, and that the engine may be deleting."""
    kind = rng.randrange(4)
    with suppress(FileNotFoundError):
        data = bytearray(path.read_bytes())
        if kind == 3 or not data:
            path.unlink()
            return
        if kind == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[rng.randrange(len(data)) :]
        else:
            data[64:] = bytes(len(data[64:]))
        path.write_bytes(data)


@pytest.mark.parametrize("name", ["bundled", "states"])
def test_damaged_pages_never_change_a_token(name: str, tmp_path: Path) -> None:
    asked, tiers, rng = prompts(3), f"disk:{tmp_path / 'kv'}:1GiB", random.Random(1)
    model = make_model(name, tmp_path)
    if name == "states":  # few checkpoints, so that states are loaded
        model |= {"max_num_seqs": 1}
        asked = [[5 + token % 91 for token in prompt] for prompt in asked]
    with LLM(**{**TINY, **model}, kv_tiers=tiers) as llm:
        first = texts(llm, asked)
        for _ in range(6):
            for path in sorted((tmp_path / "kv").glob("*/*/*.kv")):
                if rng.random() < 0.2:
                    damage(path, rng)
            assert texts(llm, asked) == first
        (disk,) = llm.stats().moves.tiers
        assert disk.failed > 10 and disk.loaded > 10


def test_a_full_disk_turns_the_tier_off_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, tiers = prompts(3), f"disk:{tmp_path / 'kv'}:1GiB"
    with LLM(**TINY) as llm:
        right = texts(llm, asked)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with LLM(**TINY, kv_tiers=tiers) as llm:
        found = texts(llm, asked[:1])
        monkeypatch.setattr(disk_tier, "_write", raising(full))
        found += texts(llm, asked[1:])
        assert found == right and texts(llm, asked) == right
        assert llm.stats().moves.off == os.strerror(errno.ENOSPC)
    assert len([r for r in caplog.records if "turned off" in r.message]) == 1


def test_a_clock_that_jumps_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, rng = prompts(3), random.Random(2)
    with LLM(**TINY) as llm:
        right = texts(llm, asked)
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + rng.choice([0, 0, 0, -100, 100]))
    with LLM(**TINY, kv_tiers=f"memory:2MiB,disk:{tmp_path / 'kv'}:1GiB") as llm:
        for _ in range(3):
            assert texts(llm, asked) == right


def test_the_quota_holds_on_the_disk(tmp_path: Path) -> None:
    quota = 1 << 20  # 21 pages of the bundled model
    with LLM(**TINY, kv_tiers=f"disk:{tmp_path / 'kv'}:1MiB") as llm:
        for prompt in prompts(6):
            llm.generate([prompt], GREEDY)
            size = 0
            for path in (tmp_path / "kv").glob("*/*/*"):
                with suppress(FileNotFoundError):  # renamed or removed meanwhile
                    size += path.stat().st_size
            assert size <= quota
    assert 15 <= len(list((tmp_path / "kv").glob("*/*/*.kv"))) <= 21


KILLED = """
import sys
from kvik import LLM, SamplingParams
llm = LLM(device="cpu", threads=1, num_blocks=30, max_model_len=256, kv_tiers=sys.argv[1])
prompt = [int(token) for token in sys.argv[2].split(",")]
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
print(llm.generate([prompt], params)[0].outputs[0].token_ids, flush=True)
for _ in range(10**6):
    llm.generate([[token + 1 for token in prompt]], params)
"""


@pytest.mark.full
def test_a_killed_engine_leaves_its_pages(tmp_path: Path) -> None:
    (prompt,), tiers = prompts(1), f"disk:{tmp_path / 'kv'}:1GiB"
    words = [sys.executable, "-c", KILLED, tiers, ",".join(map(str, prompt))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        said = child.stdout.readline()
        until(lambda: len(list((tmp_path / "kv").glob("*/*/*.kv"))) >= 13, 20)
        child.kill()
    with LLM(**TINY, kv_tiers=tiers) as llm:
        (output,) = llm.generate([prompt], GREEDY)
        assert output.num_cached_tokens == 192
        assert str(output.outputs[0].token_ids) == said.strip()


@pytest.mark.full
@pytest.mark.parametrize(
    "processes",
    [
        {},
        pytest.param({"tensor_parallel_size": 2, "threads": 2}, marks=needs_native),
        pytest.param(
            {"pipeline_parallel_size": 2, "threads": 2}, marks=[needs_native, pytest.mark.nightly]
        ),
    ],
)
def test_a_recording_with_a_disk_tier_is_replayed_and_changes_no_file(
    processes: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = f"memory:1MiB,disk:{tmp_path / 'kv'}:1GiB"
    record(tmp_path, kv_tiers=tiers)
    file, stats = record(tmp_path, kv_tiers=tiers, **processes)  # of pages that the first one left
    assert {tier.name for tier in stats.moves.tiers if tier.loaded} == {"memory", "disk"}
    pages = {path: path.stat().st_mtime_ns for path in (tmp_path / "kv").glob("*/*/*")}
    assert main(["replay", str(file)]) == 0, capsys.readouterr()
    assert pages == {path: path.stat().st_mtime_ns for path in (tmp_path / "kv").glob("*/*/*")}
    for path in pages:
        path.unlink()
    assert main(["replay", str(file)]) == 1
    assert "a page that was loaded" in capsys.readouterr().out


def test_a_recording_with_moves_is_replayed(tmp_path: Path, capsys) -> None:
    file, stats = record(tmp_path, kv_tiers="memory:64MiB")
    assert stats.moves.totals.swapped_in and stats.moves.totals.loaded_tokens
    assert main(["replay", str(file)]) == 0, capsys.readouterr()
