"""A model before and after it was quantised, as the engine runs both on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvik.config.config import EngineConfig
from kvik.errors import ConfigError, KvikError

if TYPE_CHECKING:
    from kvik.cli.quantize_report import Report

BUILTIN, NONE = "builtin", "none"


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
        from kvik.evaluate.windows import held_out_texts, read_texts

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
        from kvik.cli.plugins import decoding_meter
        from kvik.cli.quantize_report import Perplexity
        from kvik.launch import resolve_config

        after = replace(self.before, model=str(folder))
        if self.texts:
            from kvik.evaluate.bar import reading_bar
            from kvik.evaluate.quality import Change, measure_quality

            with reading_bar("reading, before") as progress:
                old = measure_quality(self.before, self.texts, progress=progress)
            with reading_bar("reading, after") as progress:
                new = measure_quality(
                    after, self.texts, window=old.window, stride=old.stride, progress=progress
                )
            words = f"{self.name} ({old.num_scored} tokens, windows of {old.window})"
            change = Change.between(old, new)
            perplexity = Perplexity(old.perplexity, new.perplexity, change, words)
            report = replace(report, perplexity=perplexity)
        if self.speed:
            models = [
                resolve_config(replace(config, max_num_seqs=1)) for config in (self.before, after)
            ]
            report = replace(report, speed=decoding_meter()(*models))
        return report
