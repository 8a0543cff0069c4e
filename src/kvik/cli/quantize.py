"""`kvik quantize [MODEL] -o FOLDER`: write a model in fewer bits, and measure the loss."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvik.cli.flags import (
    Parser,
    add_engine_flags,
    add_model,
    add_option_flags,
    engine_options,
    given_options,
)
from kvik.cli.plugins import SpeedChange
from kvik.cli.terminal import say, say_report, share_bar
from kvik.config.config import EngineConfig
from kvik.config.model_source import find_model
from kvik.config.units import show_bytes
from kvik.errors import ConfigError, KvikError
from kvik.options import Flag, Integer, Kind, Number, Text, TextList, option
from kvik.quantize.recipe import DAMPING, ROW, SMOOTHING, SQUARE, Recipe, dividing

if TYPE_CHECKING:
    from torch import Tensor

    from kvik.quantize.save import Saved, SavedLayer
    from kvik.quantize.source import Source

BUILTIN, NONE = "builtin", "none"


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """Measures a model before and after quantisation, as the engine runs both on this machine."""

    before: EngineConfig  # the model as it was
    name: str  # description of the text
    texts: Sequence[str]  # texts to read; if empty, perplexity is not measured
    speed: bool  # whether decoding speed is measured

    @classmethod
    def of(cls, before: EngineConfig, data: str, speed: bool) -> BeforeAfter:
        """Check that the measurements are possible, before anything is quantised.

        Args:
            data: a file of text, "builtin" or "none".

        Raises:
            ConfigError: the text cannot be read, or the model cannot run on this machine.
        """
        from kvik.evaluate.windows import held_out_texts, read_texts

        if data == NONE:
            measurement = cls(before, "", (), speed)
        elif data == BUILTIN:
            measurement = cls(before, "the story that ships with kvik", held_out_texts(), speed)
        else:
            measurement = cls(before, data, read_texts(Path(data), "eval"), speed)
        measurement._check()
        return measurement

    def _check(self) -> None:
        from kvik.evaluate.quality import prepare
        from kvik.evaluate.windows import choose_window, longest_window, resolve_reader
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
                f"the original cannot be measured ({error}); --eval none --no-speed skips it",
            ) from None

    def perplexity(self, after: EngineConfig) -> Perplexity | None:
        """Return the perplexity of the model and of the quantised one; None: there is no text."""
        from kvik.evaluate.quality import PerplexityChange, measure_quality, reading_bar

        if not self.texts:
            return None
        with reading_bar("reading, before") as progress:
            old = measure_quality(self.before, self.texts, progress=progress)
        with reading_bar("reading, after") as progress:
            new = measure_quality(
                after, self.texts, window=old.window, stride=old.stride, progress=progress
            )
        words = f"{self.name} ({old.num_scored} tokens, windows of {old.window})"
        change = PerplexityChange.between(old, new)
        return Perplexity(old.perplexity, new.perplexity, change.share, change.error, words)

    def decoding(self, after: EngineConfig) -> SpeedChange | None:
        """Return the decoding speed of both models; None: it is not measured."""
        from kvik.cli.plugins import decoding_meter
        from kvik.launch import resolve_config

        if not self.speed:
            return None
        before, quantised = (
            resolve_config(replace(config, max_num_seqs=1)) for config in (self.before, after)
        )
        return decoding_meter()(before, quantised)


AUTO = "auto"
DEFAULT_BITS, DEFAULT_TOKENS = 4, 512
RUNNING = ("device",)  # engine options that do not belong to the recipe


class GroupSize(Kind):
    """A number of inputs, or "auto"."""

    expects, metavar = "an integer", "N"

    def parse(self, text: str) -> int | str:
        return AUTO if text == AUTO else int(text)


@dataclass(frozen=True, slots=True)
class RecipeOptions:
    """Options of the recipe, which `Recipe` checks."""

    method: str = option(
        "gptq",
        Text(metavar="NAME"),
        "rtn (round to nearest), gptq, awq, smoothquant (8 bits, activations too) or fp8",
    )
    bits: int | None = option(
        None, Integer(2, 8), "2, 3, 4 or 8; None: 4; 8 with smoothquant and fp8"
    )
    group_size: int | str = option(
        AUTO,
        GroupSize(),
        "inputs that share a scale; -1: all of them; fp8 also: 0, a single scale, and 128, blocks "
        "of 128 x 128; auto: the first of 128, 64 and 32 that divides all inputs; -1 with "
        "smoothquant and fp8, 128 with e5m2",
    )
    sym: bool | None = option(None, Flag(), "without zero points; None: yes, except for awq")
    act_order: bool = option(False, Flag(), "gptq: quantise columns with the largest inputs first")
    static_groups: bool = option(False, Flag(), "with --act-order: groups stay contiguous")
    damping: float = option(DAMPING, Number(0, 1, above=True), "gptq: damping of the Hessian")
    smoothing: float = option(SMOOTHING, Number(0, 1), "smoothquant: alpha")
    activation_scheme: str = option(
        "dynamic",
        Text(metavar="NAME"),
        "fp8: dynamic, a scale for the activations of each token, or static, a calibrated scale "
        "for each layer",
    )
    fp8_format: str = option(
        "e4m3", Text(metavar="NAME"), "fp8: format of the weights, e4m3 or e5m2"
    )
    skip: tuple[str, ...] = option(
        (), TextList(), 'layers that stay floats, like "*.down_proj"; may be repeated'
    )
    budget_bits: float | None = option(
        None,
        Number(2, 8),
        "average bits per code: the layers that lose most get 8, the others --bits",
    )


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """Options of the text that methods read."""

    calib: str = option(BUILTIN, Text(metavar="FILE"), "text in UTF-8, or builtin: short stories")
    samples: int = option(128, Integer(1, 1 << 20), "maximum number of windows")
    calib_tokens: int | None = option(
        None,
        Integer(1, 1 << 24),
        f"tokens of a window; None: {DEFAULT_TOKENS}, or the model's context",
    )


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Options of what is measured afterwards."""

    eval: str = option(
        BUILTIN,
        Text(metavar="FILE"),
        "text for the perplexity before and after; builtin: a story that no model was trained on; "
        "or none",
    )
    speed: bool = option(True, Flag(), "time both models")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "quantize",
        "[MODEL] -o FOLDER",
        "Write a model's linear layers in fewer bits, in a layout that kvik and others load. An "
        "interrupted run continues where it stopped when it is started again.",
    )
    add_model(parser, "a folder or hub id")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FOLDER", help="folder to write"
    )
    group = add_option_flags(parser, "the recipe", RecipeOptions)
    group.add_argument(
        "--asym",
        dest="sym",
        action="store_false",
        default=argparse.SUPPRESS,
        help="the same as --no-sym",
    )
    title = "calibration (rtn and dynamic fp8 need none)"
    add_option_flags(parser, title, CalibrationOptions)
    add_option_flags(parser, "the report", ReportOptions)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_engine_flags(parser, RUNNING)
    return parser


def run(arguments: argparse.Namespace) -> int:
    import torch

    from kvik.export import check_fit
    from kvik.launch import find_device
    from kvik.quantize.save import Output, check_folder, check_request, quantise_folder
    from kvik.quantize.source import open_source

    options = engine_options(arguments, arguments.model)
    running = {name: value for name, value in options.items() if name in RUNNING}
    check_folder(arguments.output)  # before a model is downloaded
    source = open_source(find_model(arguments.model))
    check_fit(source.folder)  # else the output could not be loaded
    config = EngineConfig(model=str(source.folder), **running)
    device = torch.device(find_device(config.device))
    recipe = _recipe(RecipeOptions(**given_options(RecipeOptions, arguments)), source)
    check_request(source, recipe, arguments.output, None)
    calibration = CalibrationOptions(**given_options(CalibrationOptions, arguments))
    windows = _windows(calibration, source) if recipe.needs_data else None
    measured = ReportOptions(**given_options(ReportOptions, arguments))
    measurements = BeforeAfter.of(config, measured.eval, measured.speed)
    output = Output(arguments.output, source)
    started = time.monotonic()
    try:
        with share_bar() as progress:
            saved = quantise_folder(source, recipe, windows, output, progress, device)
        seconds = time.monotonic() - started
        quantised = replace(config, model=str(arguments.output))
        report = QuantizeReport(
            model=arguments.model or str(source.folder),
            saved=saved,
            calibration=_calibration(calibration.calib, windows),
            seconds=seconds,
            perplexity=measurements.perplexity(quantised),
            speed=measurements.decoding(quantised),
        )
    except KeyboardInterrupt:
        say("kvik: stopped; run the same command again to continue", error=True)
        raise
    path = output.report(report.as_json())
    if arguments.json:
        say(json.dumps(report.as_json(), indent=2))
    else:
        say_report(report.as_text())
    say(f"\nsaved in {arguments.output}, with this report in {path.name}", error=True)
    return 0


def _recipe(options: RecipeOptions, source: Source) -> Recipe:
    from kvik.quantize.source import keeping_floats

    eight = options.method in ("smoothquant", "fp8")
    fields = asdict(options)
    sym, average_bits = fields.pop("sym"), fields.pop("budget_bits")
    if options.bits is None:
        fields["bits"] = 8 if eight else DEFAULT_BITS
    if options.group_size == AUTO:
        fields["group_size"] = SQUARE if options.fp8_format == "e5m2" else ROW
    symmetric = options.method != "awq" if sym is None else sym
    recipe = Recipe(symmetric=symmetric, average_bits=average_bits, **fields)
    if options.group_size != AUTO or eight:
        return recipe
    model_recipe = keeping_floats(recipe, source.spec)
    sizes = dividing(s.inputs for name, s in source.layers.items() if model_recipe.quantises(name))
    return replace(recipe, group_size=sizes[0] if sizes else ROW)


def _windows(options: CalibrationOptions, source: Source) -> Tensor:
    """Return the token ids of the calibration text. [windows, tokens]"""
    from kvik.quantize.calibrate import calibration_windows
    from kvik.text.tokenizer import Tokenizer

    context, tokens = source.spec.max_context, options.calib_tokens
    if tokens is None:
        tokens = min(DEFAULT_TOKENS, context)
    if tokens > context:
        raise ConfigError("calib_tokens", f"must be at most {context} (the context), not {tokens}")
    tokenizer = Tokenizer.load(source.folder)
    return calibration_windows(options.calib, tokenizer, samples=options.samples, tokens=tokens)


def _calibration(text: str, windows: Tensor | None) -> str:
    if windows is None:
        return "none: the weights alone"
    count, tokens = windows.shape
    return f"{count} windows of {tokens} tokens of {text}"


SHOWN = 5  # layers with the largest errors


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of the model before and after quantisation."""

    before: float
    after: float
    change: float  # see `PerplexityChange`
    change_error: float  # likewise
    text: str  # description of the text

    def as_text(self) -> str:
        change = f"{self.change:+.1%}, standard error {self.change_error:.1%}"
        return f"{self.before:.3f} -> {self.after:.3f} ({change}) on {self.text}"


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What was quantised, and what that changed."""

    model: str
    saved: Saved
    calibration: str  # description of the calibration text
    seconds: float  # time of the quantisation, without the measurements
    perplexity: Perplexity | None  # None if not measured
    speed: SpeedChange | None  # likewise

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of the quantised layers, with scales."""
        layers = [layer for layer in self.saved.layers if layer.bits is not None]
        return 8 * sum(layer.bytes for layer in layers) / sum(layer.weights for layer in layers)

    def as_json(self) -> dict[str, object]:
        saved = self.saved
        return {
            "model": self.model,
            "recipe": asdict(saved.recipe),
            "calibration": self.calibration,
            "seconds": round(self.seconds, 1),
            "bytes": {"before": saved.bytes_before, "after": saved.bytes_after},
            "bits_per_weight": self.bits_per_weight,
            "unreached": saved.unreached,
            "perplexity": self.perplexity and asdict(self.perplexity),
            "tokens_per_second": self.speed and self.speed.as_json(),
            "layers": [asdict(layer) for layer in saved.layers],
        }

    def as_text(self) -> str:
        saved = self.saved
        sizes = f"{show_bytes(saved.bytes_before)} -> {show_bytes(saved.bytes_after)}"
        rows = [
            ("recipe", _method(saved.recipe)),
            ("calibration", self.calibration),
            ("time", f"{self.seconds:.0f} s"),
            ("weights", f"{sizes} ({saved.bytes_after / saved.bytes_before:.0%})"),
            ("bits per weight", f"{self.bits_per_weight:.2f} of quantised layers, with scales"),
        ]
        if float_layers := _unquantised(saved.layers):
            rows.append(("in floats", float_layers))
        if unreached := saved.unreached:
            rows.append(("experts", f"{unreached} matrices reached by no token, to nearest"))
        if self.perplexity is not None:
            rows.append(("perplexity", self.perplexity.as_text()))
        if self.speed is not None:
            rows += self.speed.rows()
        lines = [f"{name:18}{value}" for name, value in rows]
        return "\n".join([*lines, "", *_errors(saved.layers)])


def _method(recipe: Recipe) -> str:
    if recipe.method == "fp8":
        shares = {-1: "a scale for each output", 0: "one scale for each layer"}
        share = shares.get(recipe.group_size, "blocks of 128 x 128")
        if recipe.fp8_format == "e5m2":
            return f"fp8 (E5M2), {share}, activations in floats"
        return f"fp8 (E4M3), {share}, activations in fp8 with {recipe.activation_scheme} scales"
    words: list[str] = [recipe.method]
    if recipe.average_bits is None:
        words.append(f"{recipe.bits} bits")
    else:
        eight = sum(bits != recipe.bits for bits in recipe.layer_bits.values())
        words.append(f"{recipe.bits} bits, and more in {eight} layers")
    grouped = recipe.group_size > 0
    words.append(f"groups of {recipe.group_size}" if grouped else "a scale for each output")
    words.append("symmetric" if recipe.symmetric else "zero points")
    words += ["act-order"] if recipe.act_order else []
    words += ["activations in 8 bits"] if recipe.rounds_activations else []
    return ", ".join(words)


def _unquantised(layers: Sequence[SavedLayer]) -> str:
    """Return the kinds of layers that were not quantised, with the number of each."""
    kinds = Counter(layer.name.rpartition(".")[2] for layer in layers if layer.bits is None)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _errors(layers: Sequence[SavedLayer]) -> list[str]:
    """Return the relative errors by kind of layer, and the layers with the largest errors."""
    quantised = [layer for layer in layers if layer.bits is not None]
    quantity = "outputs" if quantised[0].on_inputs else "weights"
    kinds: dict[str, list[SavedLayer]] = {}
    for layer in quantised:
        kinds.setdefault(layer.name.rpartition(".")[2], []).append(layer)
    lines = [f"relative error of {quantity:8}{'mean':>9}{'most':>9}"]
    for kind, group in kinds.items():
        errors = [layer.error for layer in group]
        lines.append(f"  {kind:24}{sum(errors) / len(errors):9.4f}{max(errors):9.4f}")
    worst = sorted(quantised, key=lambda layer: -layer.error)[:SHOWN]
    lines += ["", "furthest off"]
    lines += [f"  {layer.name:44}{layer.error:9.4f}" for layer in worst]
    return lines
