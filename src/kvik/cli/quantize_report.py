"""What quantising a model has saved, and what it costs: for people, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvik.cli.plugins import SpeedChange
from kvik.config.units import show_bytes
from kvik.evaluate.quality import PerplexityChange
from kvik.quantize.recipe import Recipe
from kvik.quantize.save import Saved, SavedLayer

SHOWN = 5  # layers with the largest errors


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of the model before and after quantisation.

    Attributes:
        text: what was read, in words.
    """

    before: float
    after: float
    change: PerplexityChange
    text: str

    def as_json(self) -> dict[str, object]:
        return {
            "before": self.before,
            "after": self.after,
            "change": self.change.share,
            "change_error": self.change.error,
            "text": self.text,
        }

    def as_text(self) -> str:
        change = f"{self.change.share:+.1%}, standard error {self.change.error:.1%}"
        return f"{self.before:.3f} -> {self.after:.3f} ({change}) on {self.text}"


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """
    Attributes:
        calibration: what the statistics are of, in words.
        seconds: the quantising took, without the measurements.
        perplexity, speed: None: not measured.
    """

    model: str
    saved: Saved
    calibration: str
    seconds: float
    perplexity: Perplexity | None = None
    speed: SpeedChange | None = None

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
            "perplexity": self.perplexity and self.perplexity.as_json(),
            "tokens_per_second": self.speed and self.speed.as_json(),
            "layers": [asdict(layer) for layer in saved.layers],
        }

    def as_text(self) -> str:
        saved = self.saved
        sizes = f"{show_bytes(saved.bytes_before)} -> {show_bytes(saved.bytes_after)}"
        rows = [
            ("recipe", _recipe(saved.recipe)),
            ("calibration", self.calibration),
            ("time", f"{self.seconds:.0f} s"),
            ("weights", f"{sizes} ({saved.bytes_after / saved.bytes_before:.0%})"),
            ("bits per weight", f"{self.bits_per_weight:.2f} of quantised layers, with scales"),
        ]
        if left := _left(saved.layers):
            rows.append(("in floats", left))
        if unreached := saved.unreached:
            rows.append(("experts", f"{unreached} matrices reached by no token, to nearest"))
        if self.perplexity is not None:
            rows.append(("perplexity", self.perplexity.as_text()))
        if self.speed is not None:
            rows += self.speed.rows()
        lines = [f"{name:18}{value}" for name, value in rows]
        return "\n".join([*lines, "", *_errors(saved.layers)])


def _recipe(recipe: Recipe) -> str:
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


def _left(layers: Sequence[SavedLayer]) -> str:
    """Return the kinds of layers that were not quantised, and how many there are of each."""
    kinds = Counter(layer.name.rpartition(".")[2] for layer in layers if layer.bits is None)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _errors(layers: Sequence[SavedLayer]) -> list[str]:
    """Return the relative errors by kind of layer, and the layers with the largest errors."""
    quantised = [layer for layer in layers if layer.bits is not None]
    what = "outputs" if quantised[0].on_inputs else "weights"
    kinds: dict[str, list[SavedLayer]] = {}
    for layer in quantised:
        kinds.setdefault(layer.name.rpartition(".")[2], []).append(layer)
    lines = [f"relative error of {what:8}{'mean':>9}{'most':>9}"]
    for kind, found in kinds.items():
        errors = [layer.error for layer in found]
        lines.append(f"  {kind:24}{sum(errors) / len(errors):9.4f}{max(errors):9.4f}")
    worst = sorted(quantised, key=lambda layer: -layer.error)[:SHOWN]
    lines += ["", "furthest off"]
    lines += [f"  {layer.name:44}{layer.error:9.4f}" for layer in worst]
    return lines
