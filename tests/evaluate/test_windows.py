"""Windows score every token once, with at least the promised context."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor

from kvik import launch
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.hardware import Gpu, Hardware
from kvik.config.step_memory import PROMPT_ROWS
from kvik.core.plan import SchedulerOutput
from kvik.errors import ConfigError
from kvik.evaluate.windows import (
    Reader,
    ScoredWindow,
    check_context,
    choose_window,
    count_scored,
    cut,
    held_out_texts,
    prompt_prefix,
    read_texts,
    read_together,
    resolve_reader,
)
from kvik.text.tokenizer import Tokenizer

BOS = 99


def windows(count: int, prefix: tuple[int, ...], window: int, stride: int) -> list[ScoredWindow]:
    return list(cut(range(count), prefix, window, stride))


def scored(found: list[ScoredWindow]) -> list[int]:
    return [token for window in found for token in window.token_ids[window.first_scored :]]


@pytest.mark.parametrize(
    ("count", "prefix", "expected"),
    [
        (0, (), []),
        (1, (), []),
        (0, (BOS,), []),
        (1, (BOS,), [ScoredWindow((BOS, 0), 1)]),
        (3, (), [ScoredWindow((0, 1, 2), 1)]),
        (5, (), [ScoredWindow((0, 1, 2, 3, 4), 1)]),
        (6, (), [ScoredWindow((0, 1, 2, 3, 4), 1)]),  # the last token has no context
    ],
)
def test_short_texts(count: int, prefix: tuple[int, ...], expected: list[ScoredWindow]) -> None:
    assert windows(count, prefix, 5, 5) == expected


@given(st.integers(0, 60), st.integers(0, 2), st.integers(2, 20), st.data())
def test_every_token_once_with_its_context(
    count: int, num_prefix: int, room: int, data: st.DataObject
) -> None:
    window = num_prefix + room
    stride = data.draw(st.integers(1, window))
    found = windows(count, (BOS,) * num_prefix, window, stride)
    assert all(len(one.token_ids) <= window for one in found)
    tokens = scored(found)
    assert len(tokens) == count_scored(count, num_prefix, window, stride)
    assert tokens == sorted(set(tokens))
    if num_prefix:
        assert tokens == list(range(count))
    elif stride < room:
        assert tokens == list(range(1, count))
    for one in found:  # a scored token's context is the text before it
        text = [token for token in one.token_ids if token != BOS]
        assert text == list(range(text[0], text[0] + len(text)))
        if text[0] > 0 and num_prefix == 0:
            least = min(room - stride, one.first_scored)
            assert one.first_scored >= max(least, 1)


def test_defaults_and_limits() -> None:
    assert choose_window(1024, None, None) == (1024, 1024)
    assert choose_window(8192, None, None) == (2048, 2048)
    assert choose_window(8192, 8192, 512) == (8192, 512)
    with pytest.raises(ConfigError, match=r"window: must be 2 to 1024 \(the context\), not 1025"):
        choose_window(1024, 1025, None)
    with pytest.raises(ConfigError, match="window: must be 2 to 1024"):
        choose_window(1024, 1, None)
    with pytest.raises(ConfigError, match=r"stride: must be 1 to 16 \(the window\), not 17"):
        choose_window(1024, 16, 17)
    with pytest.raises(ConfigError, match="stride"):
        choose_window(1024, 16, 0)


@pytest.mark.parametrize(
    ("template", "prefix"),
    [("$A", ()), ("<s> $A", (1,)), ("<s> $A </s>", (1,)), ("$A </s>", ())],
)
def test_the_prefix_that_a_tokenizer_adds_to_prompts(
    template: str, prefix: tuple[int, ...]
) -> None:
    library = Library(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "?": 3}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert prompt_prefix(Tokenizer(library)) == prefix


# Driving a worker: plans, chunks, and few rows of logits at a time.


WINDOW = 200
VOCAB = 2048


@pytest.fixture(scope="module")
def resolved() -> ResolvedConfig:
    config = EngineConfig(device="cpu", threads=1, max_num_batched_tokens=70, block_size=16)
    return resolve_reader(config, WINDOW)


def test_no_memory_is_reserved_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation captures nothing, whatever a server would."""
    gpus = (Gpu(0, "H100", 80 << 30, 78 << 30, (9, 0)),)
    there = Hardware("PC", 8, 16 << 30, "RAM", frozenset(), gpus=gpus, triton=True)
    monkeypatch.setattr(launch, "find_gpus", lambda: gpus)
    monkeypatch.setattr(launch, "detect", lambda found: there)
    config = EngineConfig(graph_memory=8 << 30)
    assert launch.resolve_config(config).runner.graph_sizes
    runner = resolve_reader(config, WINDOW).runner
    assert (runner.kernels, runner.graph_sizes, runner.graph_memory) == ("triton", (), 0)


@dataclass
class Positions:
    """A worker whose hidden states are positions, and whose logits identify them."""

    plans: list[SchedulerOutput] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    position: int = 0

    def read(self, plan: SchedulerOutput) -> Tensor:
        self.plans.append(plan)
        if plan.new_requests:
            self.position = 0
        (count,) = plan.num_scheduled_tokens
        hidden = torch.arange(self.position, self.position + count)[:, None]
        self.position += count
        return hidden  # [tokens, 1]

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        return hidden.float().expand(-1, VOCAB)


def test_a_window_is_read_in_chunks_and_scored_in_parts(resolved: ResolvedConfig) -> None:
    model = Positions()
    reader = Reader(resolved, model)
    ids = tuple(range(1000, 1000 + WINDOW))
    pieces = list(read_together([reader], ScoredWindow(ids, 90)))
    assert [plan.num_scheduled_tokens for plan in model.plans] == [[70], [70], [59]]
    assert all(plan.slots == [0] and plan.samples == [False] for plan in model.plans)
    (new,) = model.plans[0].new_requests
    assert (new.token_ids, new.num_computed_tokens) == (list(ids), 0)
    assert [len(plan.new_requests) for plan in model.plans] == [1, 0, 0]
    assert max(model.rows) <= PROMPT_ROWS and sum(model.rows) == WINDOW - 90
    assert torch.cat([piece.ids for piece in pieces]).tolist() == list(ids[90:])
    seen = torch.cat([piece.logits[0][:, 0] for piece in pieces])
    assert seen.tolist() == list(range(89, WINDOW - 1))  # each from the position before it


def test_every_window_begins_with_an_empty_slot(resolved: ResolvedConfig) -> None:
    model = Positions()
    reader = Reader(resolved, model)
    for length in (WINDOW, 3, 2):
        list(read_together([reader], ScoredWindow(tuple(range(length)), 1)))
    begun = [plan for plan in model.plans if plan.new_requests]
    assert [plan.freed_slots for plan in begun] == [[], [0], [0]]
    assert [plan.step for plan in model.plans] == list(range(len(model.plans)))


def test_a_window_gets_all_blocks_it_needs(resolved: ResolvedConfig) -> None:
    new = Reader(resolved, Positions()).begin(range(WINDOW))
    used = [block for group in new.block_ids for block in group]
    assert len(new.block_ids) == len(resolved.cache.groups)
    assert len(set(used)) == len(used) == len(resolved.cache.groups) * -(-WINDOW // 16)
    assert min(used) == 1 and max(used) == resolved.cache.num_blocks
    assert resolved.scheduler.max_num_seqs == 1


def test_two_models_use_chunks_that_both_support(resolved: ResolvedConfig) -> None:
    small = replace(resolved, scheduler=replace(resolved.scheduler, max_num_batched_tokens=33))
    models = (Positions(), Positions())
    readers = [Reader(resolved, models[0]), Reader(small, models[1])]
    for piece in read_together(readers, ScoredWindow(tuple(range(WINDOW)), 1)):
        assert torch.equal(piece.logits[0], piece.logits[1])
        assert piece.logits[0].shape == (len(piece.ids), VOCAB)
    for model in models:
        assert max(plan.num_tokens for plan in model.plans) == 33


def test_two_models_that_do_not_fit_together_are_refused(resolved: ResolvedConfig) -> None:
    half = resolved.memory.limit * 6 // 10
    large = replace(resolved, memory=replace(resolved.memory, weights=half))
    check_context(large, resolved)
    with pytest.raises(ConfigError, match=r"reference: needs .* together with the model, of .*"):
        check_context(large, large)
    check_context(large, replace(large, runner=replace(large.runner, device="cuda:0")))


# Files of text: plain, one JSON object per line, and invalid ones.


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_plain_text_is_one_text(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "\ufeffOne day\n\nthe fóx\n".encode())
    assert read_texts(path) == ["One day\n\nthe fóx\n"]


def test_lines_of_json_are_separate_texts(tmp_path: Path) -> None:
    content = b'{"text": "One\\nday", "id": 1}\r\n\n{"text": " "}\n{"text": "\\u2028two"}'
    assert read_texts(write(tmp_path, "a.jsonl", content)) == ["One\nday", "\u2028two"]


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("a.txt", b" \n", "holds no text"),
        ("a.txt", b"caf\xe9", "is not UTF-8 \\(byte 3\\)"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", b'{"story": "a"}', 'line 1 has no field "text" with a string'),
        ("a.jsonl", b'"a"', 'line 1 has no field "text"'),
        ("a.jsonl", b'{"text": 3}', 'line 1 has no field "text"'),
        ("a.jsonl", b'{"text": "a"}\n{"text": "a\\ud800"}', "line 2 must be valid Unicode"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_invalid_texts_are_refused(tmp_path: Path, name: str, content: bytes, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"data: .*{wrong}"):
        read_texts(write(tmp_path, name, content))


def test_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data: .* is a folder"):
        read_texts(tmp_path)
    with pytest.raises(ConfigError, match=r"data: .* cannot be read \(No such file"):
        read_texts(tmp_path / "none")


def test_the_bundled_story() -> None:
    (story,) = held_out_texts()
    assert story.startswith("The Clockmaker's Goose") and len(story) > 4000
