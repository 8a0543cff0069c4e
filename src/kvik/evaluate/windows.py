"""Cuts a text into windows that a model can read, so that every token is scored at most once.

Windows of `window` tokens begin every `stride` tokens of the text. Each is read without earlier
context, and scores the tokens that no window before it scored. The first token of a window has no
prediction and is not scored. With `stride` < `window` this affects only the first token of the
text; with a tokenizer that puts BOS before a prompt it affects none, because every window begins
with BOS. With `stride` = `window` and no BOS it affects the first token of each window.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.step_memory import PROMPT_ROWS
from kvik.config.units import show_bytes
from kvik.core.plan import NewRequest, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.errors import ConfigError, ParamError
from kvik.launch import load_worker, resolve_config
from kvik.text.tokenizer import Tokenizer, check_unicode

# A loaded model as a reader: windows of tokens in, logits of each position out.
#
# Plans are made here, for one request in one slot. Everything below is the serving code: kernels,
# weight and KV formats, chunks, replayed graphs.


class EvaluatedModel(Protocol):
    """The methods of a worker that a reader calls."""

    def read(self, plan: SchedulerOutput) -> Tensor:
        """Return hidden states [tokens, hidden] of the plan's tokens, valid until the next call."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] fp32."""
        ...

    def enter(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings [rows, hidden] of tokens [rows] at positions [rows]."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive positions of a window."""

    ids: Tensor  # [rows] int64, the token at each position
    logits: tuple[Tensor, ...]  # [rows, vocab] of each model, its prediction of these tokens


class Reader:
    """One model, which reads one window at a time."""

    def __init__(self, resolved: ResolvedConfig, model: EvaluatedModel) -> None:
        self.resolved = resolved
        self.model = model
        self.tokens_at_once = resolved.scheduler.max_num_batched_tokens
        self._step = 0
        self._used = False

    def begin(self, ids: Sequence[int]) -> NewRequest:
        """Return a new request for these tokens, which replaces the previous one."""
        cache = self.resolved.cache
        count = -(-len(ids) // cache.block_size)
        blocks = [
            list(range(1 + group * count, 1 + (group + 1) * count))
            for group in range(len(cache.groups))
        ]
        params = SamplingParams(temperature=0.0)
        return NewRequest(0, list(ids), len(ids), 0, blocks, params, frozenset(), 0)

    def read(self, ids: Sequence[int], start: int, end: int) -> Tensor:
        """Read tokens [start, end) of a window; earlier calls have read the tokens before `start`.
        Returns [end - start, hidden], valid until the next call."""
        first = start == 0
        plan = SchedulerOutput(
            step=self._step,
            slots=[0],
            num_scheduled_tokens=[end - start],
            num_draft_tokens=[0],
            samples=[False],
            new_requests=[self.begin(ids)] if first else [],
            freed_slots=[0] if first and self._used else [],
        )
        self._step += 1
        self._used = True
        return self.model.read(plan)


def longest_window(config: EngineConfig) -> int:
    """Return the longest window that the model and the options allow. Nothing is loaded."""
    return resolve_config(_for_one(config)).scheduler.max_model_len


def resolve_reader(config: EngineConfig, window: int) -> ResolvedConfig:
    """Resolve the config of a reader: one request, and the KV blocks of a window.

    Raises:
        KvikError: the model cannot be used, predicts no tokens, or does not fit.
    """
    reader_config = replace(_for_one(config), max_model_len=window)
    groups = len(resolve_config(reader_config).cache.groups)
    num_blocks = groups * -(-window // config.block_size)
    resolved = resolve_config(replace(reader_config, num_blocks=num_blocks))
    resolved.model.check_writes()
    return resolved


@contextmanager
def loaded_reader(resolved: ResolvedConfig) -> Iterator[Reader]:
    """Load a model as a reader; it is freed at the end of the block."""
    worker = load_worker(resolved)
    try:
        yield Reader(resolved, worker)
    finally:
        worker.stop()


def check_context(resolved: ResolvedConfig, reference: ResolvedConfig) -> None:
    """Raise ConfigError if two models do not fit one device together."""
    if resolved.runner.device != reference.runner.device:
        return
    needed = resolved.memory.total + reference.memory.total
    limit = min(resolved.memory.limit, reference.memory.limit)
    if needed > limit:
        raise ConfigError(
            "reference",
            f"needs {show_bytes(needed)} together with the model, of {show_bytes(limit)} allowed; "
            "without a reference, only perplexity is measured",
        )


def read_together(readers: Sequence[Reader], window: ScoredWindow) -> Iterator[Piece]:
    """Read a window with all models together, with only a few rows of logits in memory at a time.

    The last token of a window predicts no scored token, so it is not read.
    """
    ids, end = window.token_ids, len(window.token_ids) - 1
    chunk = min(reader.tokens_at_once for reader in readers)
    targets = torch.tensor(ids)
    for start in range(0, end, chunk):
        stop = min(start + chunk, end)
        hidden = [reader.read(ids, start, stop) for reader in readers]
        for row in range(max(start, window.first_scored - 1), stop, PROMPT_ROWS):
            last = min(row + PROMPT_ROWS, stop)
            logits = [
                reader.model.logits(states[row - start : last - start])
                for reader, states in zip(readers, hidden, strict=True)
            ]
            yield Piece(
                targets[row + 1 : last + 1].to(logits[0].device),
                (logits[0], *(other.to(logits[0].device) for other in logits[1:])),
            )


def _for_one(config: EngineConfig) -> EngineConfig:
    return replace(
        config,
        max_num_seqs=1,
        num_blocks=None,
        kv_cache_memory=None,
        graph_memory=0,  # only decoding steps are captured
        speculative_config=None,
        spec_method=None,
        spec_model=None,
        spec_tokens=None,
        kv_budget=None,  # prompts are read whole
    )


# Texts to evaluate on: a file, or a bundled story, which no model was trained on.

MAX_BYTES = 64 << 20  # a tokenizer needs about fifty times as much memory
STORY = Path(__file__).with_name("held_out.txt")


def held_out_texts() -> list[str]:
    """Return the bundled story: about 1500 tokens, enough to compare, too few for a leaderboard."""
    return [STORY.read_text(encoding="utf-8")]


def read_texts(path: Path, option: str = "data") -> list[str]:
    """Return the texts of a file: one text, or for .jsonl the field "text" of each line.

    Args:
        option: the option that names the file, for errors.

    Raises:
        ConfigError: the file cannot be read as that, or holds no text.
    """
    try:
        if path.is_dir():
            raise ConfigError(option, f"{path} is a folder, not a file of text")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(option, f"{path} has more than {MAX_BYTES >> 20} MiB")
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(option, f"{path} is not UTF-8 (byte {error.start})") from None
    texts = list(_records(path, content, option)) if path.suffix == ".jsonl" else [content]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ConfigError(option, f"{path} holds no text")
    return texts


def _records(path: Path, content: str, option: str) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(option, f"{path}, line {number} is not JSON") from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ConfigError(option, f'{path}, line {number} has no field "text" with a string')
        try:
            check_unicode(text)
        except ParamError as error:
            raise ConfigError(option, f"{path}, line {number} {error.message}") from None
        yield text


LONGEST_DEFAULT = 2048  # window of most papers


@dataclass(frozen=True, slots=True)
class ScoredWindow:
    """A window of a text."""

    token_ids: tuple[int, ...]  # at least two, BOS included
    first_scored: int  # index of the first scored token, at least 1; all tokens after it are scored


def choose_window(longest: int, window: int | None, stride: int | None) -> tuple[int, int]:
    """Return the requested window and stride, or the defaults.

    Args:
        longest: tokens that the models can read at once.

    Raises:
        ConfigError: `window` or `stride` is out of range.
    """
    chosen = min(longest, LONGEST_DEFAULT) if window is None else window
    if not 2 <= chosen <= longest:
        raise ConfigError("window", f"must be 2 to {longest} (the context), not {chosen}")
    step = chosen if stride is None else stride
    if not 1 <= step <= chosen:
        raise ConfigError("stride", f"must be 1 to {chosen} (the window), not {step}")
    return chosen, step


def cut(
    ids: Sequence[int], prefix: Sequence[int], window: int, stride: int
) -> Iterator[ScoredWindow]:
    """Yield the windows of one text. A short text is one shorter window; a text without a token to
    score has none.

    Args:
        ids: the text alone.
        prefix: first tokens of every window (BOS); they count as part of it.
        window: longest window in tokens, longer than the prefix.
        stride: tokens of the text between the starts of windows; at most the tokens of the text in
            a window.
    """
    for start, end, first in _spans(len(ids), len(prefix), window, stride):
        yield ScoredWindow((*prefix, *ids[start:end]), first)


def count_scored(length: int, num_prefix: int, window: int, stride: int) -> int:
    """Return the number of tokens that all windows of a text score.

    Args:
        length: of the text, in tokens.
        num_prefix: tokens of the prefix.
    """
    return sum(
        num_prefix + end - start - first
        for start, end, first in _spans(length, num_prefix, window, stride)
    )


def _spans(
    length: int, num_prefix: int, window: int, stride: int
) -> Iterator[tuple[int, int, int]]:
    """Yield for each window its first token of the text, the one after its last, and the index in
    the window of the first token that it scores."""
    width = window - num_prefix
    stride = min(stride, width)
    scored = 0  # end of the tokens scored by earlier windows
    for start in range(0, length, stride):
        end = min(start + width, length)
        first = max(num_prefix + scored - start, 1)
        if num_prefix + end - start > first:
            yield start, end, first
        scored = end


def prompt_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the tokenizer puts before a prompt."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    prompt = tokenizer.encode("a", add_special_tokens=True)
    for start in range(len(prompt) - len(plain) + 1):
        if prompt[start : start + len(plain)] == plain:
            return tuple(prompt[:start])
    return ()
