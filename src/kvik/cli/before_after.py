"""A model before and after it was quantised, as the engine runs both on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kvik.config.config import EngineConfig
from kvik.config.errors import ConfigError, KvikError

if TYPE_CHECKING:
    from kvik.quantize.report import Report

BUILTIN, NONE = "builtin", "none"
SPEED_PROMPT, SPEED_OUTPUT = 32, 64  # tokens of the requests that are timed
SPEED_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """What is to be measured.

    Attributes:
        before: the model as it was.
        name: of the text, in words.
        texts: to be read; none: perplexity is not measured.
        speed: whether that of decoding is.
    """

    before: EngineConfig
    name: str
    texts: Sequence[str]
    speed: bool

    @classmethod
    def of(cls, before: EngineConfig, data: str, speed: bool) -> BeforeAfter:
        """Found possible, so that nothing is quantised in vain.

        Args:
            data: a file of text, "builtin" or "none".

        Raises:
            ConfigError: the text cannot be read, or the model cannot be run here.
        """
        from kvik.evaluate.texts import held_out_texts, read_texts

        if data == NONE:
            found = cls(before, "", (), speed)
        elif data == BUILTIN:
            found = cls(before, "the story that ships with kvik", held_out_texts(), speed)
        else:
            found = cls(before, data, read_texts(Path(data), "eval"), speed)
        found._check()
        return found

    def _check(self) -> None:
        from kvik.evaluate.quality import prepare
        from kvik.evaluate.reader import longest_window, resolve_reader
        from kvik.evaluate.windows import choose_window
        from kvik.launch import resolve_config

        try:
            if self.texts:
                window, stride = choose_window(longest_window(self.before), None, None)
                prepare(resolve_reader(self.before, window), self.texts, window, stride)
            if self.speed:
                resolve_config(self.before)
        except KvikError as error:
            option = "eval" if self.texts else "speed"
            raise ConfigError(
                option,
                f"the original cannot be measured ({error}); --eval none --no-speed do without",
            ) from None

    def measure(self, report: Report, folder: Path) -> Report:
        """The report with what was found.

        Args:
            folder: of the quantised model.
        """
        from kvik.quantize.report import Measured

        after = replace(self.before, model=str(folder))
        if self.texts:
            from kvik.evaluate.bar import reading_bar
            from kvik.evaluate.quality import measure_quality

            found = []
            for config, what in ((self.before, "reading, before"), (after, "reading, after")):
                with reading_bar(what) as progress:
                    found.append(measure_quality(config, self.texts, progress=progress))
            words = f"{self.name} ({found[0].num_scored} tokens, windows of {found[0].window})"
            perplexity = Measured(found[0].perplexity, found[1].perplexity)
            report = replace(report, perplexity=perplexity, text=words)
        if self.speed:
            report = replace(report, speed=Measured(_speed(self.before), _speed(after)))
        return report


def _speed(config: EngineConfig) -> float:
    """Tokens/s of one request, the median of some."""
    from kvik.bench.inprocess.inproc import loaded, run_jobs
    from kvik.bench.inprocess.jobs import Requests, fixed
    from kvik.bench.inprocess.measures import DECODE
    from kvik.launch import resolve_config

    resolved = resolve_config(config)
    output = min(SPEED_OUTPUT, resolved.scheduler.max_model_len // 2)
    load = Requests(1, fixed(min(SPEED_PROMPT, output), output), seed="speed")
    with loaded(resolved) as engine:
        runs = [
            run_jobs(engine, load.jobs(number, resolved.model.vocab_size))
            for number in range(-1, SPEED_ROUNDS)  # the first one warms up
        ]
    return median(rate for run in runs[1:] if (rate := DECODE.of(run)) is not None)
