"""Quantise the model of one folder into another folder, block by block."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from kvik.config.model_source import CONFIG
from kvik.config.units import show_bytes
from kvik.errors import ConfigError, KvikError, shown
from kvik.files import DRAFT, can_write, write_whole
from kvik.kernels.fp8 import SQUARE
from kvik.kernels.weights import DTYPES
from kvik.nn.checkpoint import INDEX
from kvik.nn.formats.base import LinearShape
from kvik.nn.formats.compressed_tensors import IntQuantized, PackQuantized
from kvik.nn.formats.fp8 import BLOCK_SCALE, Fp8
from kvik.nn.formats.integers import Awq, Gptq
from kvik.nn.formats.registry import FORMATS
from kvik.nn.safetensors import Stored, read_header, write_safetensors
from kvik.quantize.block import WEIGHT
from kvik.quantize.budget import choose_bits
from kvik.quantize.calibrate import CPU, quantise_blocks
from kvik.quantize.quantised import BlockResult, Float8, LayerResult, Progress, Quantised
from kvik.quantize.recipe import MANY, ROW, Recipe, check_groups
from kvik.quantize.source import Source, expert_roles, keeping_floats
from kvik.spec.declared import Role
from kvik.spec.fields import Fields, read_json
from kvik.spec.stored_weights import HEAD, KEY, LINEAR, REGEX, read_stored_quantization

Config = dict[str, object]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """How one linear layer is stored."""

    format: Awq | Gptq | PackQuantized | IntQuantized | Fp8
    scales: torch.dtype  # dtype of stored scales, if the format does not fix it

    @property
    def num_bytes(self) -> int:
        """The bytes of its required tensors."""
        tensors = self.format.tensors(self.scales).values()
        return sum(torch.Size(t.shape).numel() * t.dtype.itemsize for t in tensors)

    def tensors(self, quantised: Quantised | Float8) -> dict[str, Tensor]:
        """Return the tensors to store, by their names within the layer."""
        if isinstance(quantised, Float8):
            assert isinstance(self.format, Fp8)
            scales = quantised.scales, quantised.input_scale
            tensors = self.format.save(quantised.values, *scales)
            narrow = {name: tensors[name].to(self.scales) for name in tensors if name != "weight"}
            return {**tensors, **narrow}
        assert not isinstance(self.format, Fp8)
        codes = quantised.codes()
        codes = replace(codes, scales=codes.scales.to(self.scales))
        if isinstance(self.format, Awq) and codes.zeros is None:
            middle = torch.full_like(codes.scales, quantised.grid.middle, dtype=torch.uint8)
            codes = replace(codes, zeros=middle)
        return self.format.save(codes)


def layouts(
    recipe: Recipe, layers: Mapping[str, LinearShape], dtype: torch.dtype
) -> dict[str, LayerLayout]:
    """Return the layout of each quantised layer, by name.

    Args:
        layers: the linear layers of all blocks.
        dtype: of the model.

    Raises:
        ConfigError: a layer cannot be stored in the recipe's layout.
    """
    config = quantization_config(recipe, layers)
    stored = read_stored_quantization(Fields({KEY: config}), layers)
    assert stored is not None
    blocks = recipe.method == "fp8" and recipe.group_size == SQUARE[1]
    names = {BLOCK_SCALE: ()} if blocks else {}
    scales = dtype if recipe.layout == "compressed-tensors" else torch.float32
    if recipe.method == "fp8":
        scales = recipe.scale_dtype(dtype)
    layer_layouts = {}
    for layer, shape in layers.items():
        scheme = stored.scheme(layer)
        if scheme is None:
            continue
        try:
            format = FORMATS[scheme.layout](scheme, shape, names)
        except ValueError as error:
            raise ConfigError(
                "method", f"{recipe.method} cannot store {shown(layer)}: {error}; skip it"
            ) from None
        assert isinstance(format, Awq | Gptq | PackQuantized | IntQuantized | Fp8)
        layer_layouts[layer] = LayerLayout(format, scales)
    return layer_layouts


def quantization_config(
    recipe: Recipe,
    layers: Iterable[str],
    outside: Iterable[str] = (),
    foreign: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> Config:
    """Return `quantization_config` of config.json.

    Args:
        layers: names of the linear layers of all blocks.
        outside: names of other linear layers, which stay floats.
        foreign: see `Source.foreign`; they stay floats. Other tools may have another prefix before
            these names.
    """
    names = list(layers)
    skipped = [*(name for name in names if not recipe.quantises(name)), *outside]
    others = [name for scope in foreign.values() for name in scope]
    patterns = [rf"(.*\.)?{re.escape(scope)}(\..*)?$" for scope in foreign]
    match recipe.layout:
        case "awq":
            return _awq(recipe, [*skipped, *others])
        case "gptq":
            return _gptq(recipe, [*(f"^{re.escape(name)}$" for name in skipped), *patterns])
        case "fp8":
            return _fp8(recipe, [*skipped, *others])
        case "compressed-tensors":
            patterns = [REGEX + pattern for pattern in patterns]
            return _compressed(recipe, names, [*skipped, *patterns])


def _awq(recipe: Recipe, skipped: list[str]) -> Config:
    return {
        "quant_method": "awq",
        "bits": recipe.bits,
        "group_size": recipe.group_size,
        "version": "gemm",
        "zero_point": True,  # the layout always has them
        "modules_to_not_convert": [HEAD, *skipped],
    }


def _gptq(recipe: Recipe, patterns: list[str]) -> Config:
    config: Config = {
        "quant_method": "gptq",
        "bits": recipe.bits,
        "group_size": recipe.group_size,
        "damp_percent": recipe.damping,
        "desc_act": recipe.act_order and not recipe.static_groups and recipe.group_size > 0,
        "static_groups": recipe.static_groups,
        "sym": recipe.symmetric,
        "true_sequential": True,
        "lm_head": False,
        # Every tool reads the older format, but it cannot store zero points of 0.
        "checkpoint_format": "gptq" if recipe.symmetric else "gptq_v2",
    }
    if patterns:
        config["dynamic"] = {f"-:{pattern}": {} for pattern in patterns}
    return config


def _fp8(recipe: Recipe, skipped: list[str]) -> Config:
    return {
        "quant_method": "fp8",
        "fmt": recipe.fp8_format,
        "activation_scheme": recipe.activation_scheme,
        "weight_block_size": list(SQUARE) if recipe.group_size == SQUARE[1] else None,
        "modules_to_not_convert": [HEAD, *skipped],
    }


def _compressed(recipe: Recipe, names: list[str], skipped: list[str]) -> Config:
    if recipe.method == "fp8":
        format = "float-quantized"
    else:
        format = "int-quantized" if recipe.rounds_activations else "pack-quantized"
    groups: Config = {"group_0": _group(recipe, [LINEAR], recipe.bits, format)}
    other_bits = sorted({recipe.bits_of(name) for name in names} - {recipe.bits})
    for i, bits in enumerate(other_bits, 1):
        # names take precedence over classes of layers
        targets = [n for n in names if recipe.bits_of(n) == bits and recipe.quantises(n)]
        if targets:
            groups[f"group_{i}"] = _group(recipe, targets, bits, format)
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [HEAD, *skipped],
        "kv_cache_scheme": None,
    }


def _group(recipe: Recipe, targets: list[str], bits: int, format: str) -> Config:
    kind = "float" if recipe.method == "fp8" else "int"
    size = recipe.group_size
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": recipe.symmetric,
        "strategy": "group" if size > 0 else "channel" if size == ROW else "tensor",
        "group_size": size if size > 0 else None,
        "actorder": "weight" if recipe.act_order else None,  # groups are contiguous
        "dynamic": False,
    }
    dynamic = recipe.activation_scheme == "dynamic"
    activations = {
        "num_bits": 8,
        "type": kind,
        "symmetric": True,
        "strategy": "token" if dynamic else "tensor",
        "dynamic": dynamic,
    }
    rounded = format != "pack-quantized"
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": activations if rounded else None,
        "output_activations": None,
        "format": format,
    }


# The output folder: a shard for each block, config.json last.
#
# Until config.json is written, a hidden folder in it identifies the run and records the result of
# each block. An interrupted run continues with the first block that has no shard; the bytes of the
# result are the same.

STATE = ".unfinished"
RUN, LOCK = "run.json", "lock"
REPORT = "quantization_report.json"
# Files that are copied from the model's folder: tokenizer, templates, defaults, cards, licences.
TAKEN = ("*.json", "*.jinja", "*.txt", "*.md", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*")
INDICES, OWN = "*.index.json", (CONFIG, REPORT)
SPARE = 64 << 20  # bytes that must stay free


@dataclass(frozen=True, slots=True)
class SavedLayer:
    """A linear layer in the saved checkpoint."""

    name: str
    bits: int | None  # of a code; None: the layer is unchanged
    weights: int  # number of its weights
    bytes: int  # of all its tensors, without the bias
    # error, on_inputs: see `LayerResult`.
    error: float
    on_inputs: bool


def check_folder(folder: Path) -> None:
    """Check a folder to save into, for which no model is needed.

    Raises:
        ConfigError: it is a file, has other content, or cannot be written.
    """
    name = repr(str(folder))
    if folder.exists() and not folder.is_dir():
        raise ConfigError("output", f"must be a folder, and {name} is a file")
    if not can_write(folder / CONFIG, parents=True):
        raise ConfigError("output", f"cannot write {name}")
    if folder.exists() and not (folder / STATE).exists() and any(folder.iterdir()):
        raise ConfigError("output", f"{name} is not empty: name another")


class Output:
    """The folder that a run saves into."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder = folder
        self._source = source
        self._state = folder / STATE
        self.work = self._state / "work"  # folder for the calibration's files between blocks

    @contextmanager
    def begin(self, run: Mapping[str, object]) -> Iterator[None]:
        """Start a run or continue it, with the folder locked for other processes.

        Args:
            run: identity of the run, a JSON object.

        Raises:
            ConfigError: the folder has other content, or another process is working in it.
        """
        try:
            check_folder(self.folder)
            self._state.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._state / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            raise ConfigError(
                "output", f"cannot write {str(self.folder)!r} ({error.strerror})"
            ) from None
        try:
            self._claim(lock, json.dumps(run, sort_keys=True, indent=1))
            yield
        finally:
            os.close(lock)

    def _claim(self, lock: int, run: str) -> None:
        name = str(self.folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError("output", f"another run is working in {name!r}") from None
        run_file = self._state / RUN
        if run_file.exists() and run_file.read_text() != run:
            if self.saved():
                raise ConfigError(
                    "output",
                    f"{name!r} holds a part of another run: finish that with its model and flags, "
                    "or remove the folder",
                )
            shutil.rmtree(self.work, ignore_errors=True)
        for draft in (*self.folder.glob(f"{DRAFT}*"), *self._state.glob(f"{DRAFT}*")):
            draft.unlink()
        write_whole(run_file, run.encode())

    def check_disk_space(self, num_bytes: int) -> None:
        """Check that the disk has space for `num_bytes`, minus the blocks already saved.

        Raises:
            ConfigError: it does not.
        """
        saved = (self._shard(i).stat().st_size for i in range(len(self.saved())))
        need = num_bytes - sum(saved) + SPARE
        place = self.folder.resolve()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if need > free:
            raise ConfigError(
                "output",
                f"needs about {show_bytes(need)} of disk, {show_bytes(free)} are free in "
                f"{str(place)!r}",
            )

    def saved(self) -> list[tuple[SavedLayer, ...]]:
        """Return the layers of each finished block, from block 0."""
        blocks = []
        for index in range(self._source.spec.num_layers):
            if not (self._record(index).exists() and self._shard(index).exists()):
                break
            layers = json.loads(self._record(index).read_bytes())
            blocks.append(tuple(SavedLayer(**layer) for layer in layers))
        return blocks

    def save_block(
        self, index: int, tensors: Mapping[str, Tensor | Stored], layers: Sequence[SavedLayer]
    ) -> None:
        """Write the shard of a block, and the record of its layers before it.

        Raises:
            OSError: it cannot be written.
        """
        record = json.dumps([asdict(layer) for layer in layers], indent=1)
        write_whole(self._record(index), record.encode())
        write_safetensors(self._shard(index), tensors)  # last: it marks the block as finished

    def finish(self, quantization: Mapping[str, object]) -> int:
        """Write the tensors outside blocks, the other files, and config.json last.

        Returns:
            The bytes of all tensors.

        Raises:
            OSError: a file cannot be written.
        """
        source, blocks = self._source, self._source.spec.num_layers
        write_safetensors(self._shard(blocks), source.rest())
        owners: dict[str, str] = {}
        total = 0
        for index in range(blocks + 1):
            shard = self._shard(index)
            entries = read_header(shard)
            owners |= {entry.name: shard.name for entry in entries}
            total += sum(entry.size for entry in entries)
        listed = {"metadata": {"total_size": total}, "weight_map": dict(sorted(owners.items()))}
        write_whole(self.folder / INDEX, _json(listed))
        for pattern in TAKEN:
            for path in source.folder.glob(pattern):
                if path.is_file() and path.name not in OWN and not path.match(INDICES):
                    write_whole(self.folder / path.name, path.read_bytes())
        config = read_json(source.folder / CONFIG)
        write_whole(self.folder / CONFIG, _json({**config, KEY: quantization}))
        return total

    def report(self, report: Mapping[str, object]) -> Path:
        """Save the report, which ends the run.

        Raises:
            ConfigError: it cannot be written.
        """
        draft = self.folder / f"{DRAFT}{STATE}"  # a rename is atomic, deleting files is not
        try:
            write_whole(self.folder / REPORT, _json(report))
            self._state.replace(draft)
        except OSError as error:
            raise ConfigError(
                "output", f"the report cannot be written ({error.strerror})"
            ) from None
        shutil.rmtree(draft, ignore_errors=True)
        return self.folder / REPORT

    def abandon(self) -> None:
        """Remove the files of a run that has finished no block."""
        if not self.saved():
            shutil.rmtree(self._state, ignore_errors=True)
            if self.folder.exists() and not any(self.folder.iterdir()):
                self.folder.rmdir()

    def _record(self, index: int) -> Path:
        return self._state / f"block-{index:05}.json"

    def _shard(self, index: int) -> Path:
        count = self._source.spec.num_layers + 1
        return self.folder / f"model-{index + 1:05}-of-{count:05}.safetensors"


def _json(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


HIDDEN_BYTES = 8  # per hidden value of the calibration: two fp32 files exist at a time


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a finished run."""

    recipe: Recipe  # with the bits of each layer, if a budget chose them
    layers: tuple[SavedLayer, ...]  # all linear layers of blocks
    # bytes_before, bytes_after: of all tensors.
    bytes_before: int
    bytes_after: int

    @property
    def unreached(self) -> int:
        """The number of experts' matrices that no token of the calibration text reached."""
        quantised = [layer.on_inputs for layer in self.layers if layer.bits is not None]
        return quantised.count(False) if any(quantised) else 0


def check_request(source: Source, recipe: Recipe, folder: Path, windows: Tensor | None) -> None:
    """Check everything that can be checked before work begins and anything is written.

    Raises:
        KvikError: the recipe does not fit the model, or the folder or its disk cannot be used.
    """
    names = (*source.layers, *source.outside, HEAD)
    for pattern in recipe.skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            example = next(iter(source.layers))
            raise ConfigError("skip", f"{shown(pattern)} matches no layer, such as {example}")
    recipe = keeping_floats(recipe, source.spec)
    check_groups(recipe, {name: shape.inputs for name, shape in source.layers.items()})
    _check_experts(source, recipe)
    if not any(recipe.quantises(name) for name in source.layers):
        raise ConfigError("skip", "leaves no layer to quantise")
    # with a budget, the most that layers can have
    layer_bits = {} if recipe.average_bits is None else dict.fromkeys(source.layers, MANY)
    layer_layouts = layouts(
        recipe.with_layer_bits(layer_bits), source.layers, DTYPES[source.spec.dtype]
    )
    if folder.resolve() == source.folder.resolve():
        raise ConfigError("output", "must not be the model's own folder")
    need = source.num_bytes
    for name, layout in layer_layouts.items():
        need += layout.num_bytes - source.tensors[name + WEIGHT].entry.size
    if windows is not None:
        need += windows.numel() * source.spec.residual_width * HIDDEN_BYTES
    Output(folder, source).check_disk_space(need)


def _check_experts(source: Source, recipe: Recipe) -> None:
    """Check that all experts of a layer are quantised, or none.

    Raises:
        ConfigError: only some are.
    """
    for index in range(source.spec.num_layers):
        quantised: dict[Role, set[bool]] = {}
        for pattern, role in expert_roles(source.spec, index).items():
            quantised.setdefault(role, set()).add(recipe.quantises(pattern.format(index)))
        if any(len(choices) > 1 for choices in quantised.values()):
            raise ConfigError("skip", f"must take all experts of layer {index}, or none of them")


def quantise_folder(
    source: Source,
    recipe: Recipe,
    windows: Tensor | None,
    output: Output,
    progress: Progress,
    device: torch.device = CPU,
) -> Saved:
    """Quantise a model and save it; continues an interrupted run of the same call.

    Args:
        windows: [windows, tokens] ids of the calibration text; None: `recipe` needs none.
        device: of the computation.

    Raises:
        KvikError: as `check_request`; weights or text cannot be used; a file cannot be written.
    """
    check_request(source, recipe, output.folder, windows)
    recipe = keeping_floats(recipe, source.spec)
    with output.begin(_run(source, recipe, windows)):
        try:
            return _quantise(source, recipe, windows, output, progress, device)
        except KvikError:
            output.abandon()
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError("output", f"stopped ({reason}); run the same command again") from None


def _quantise(
    source: Source,
    recipe: Recipe,
    windows: Tensor | None,
    output: Output,
    progress: Progress,
    device: torch.device,
) -> Saved:
    folder, spec = source.folder, source.spec
    dtype, blocks = DTYPES[source.spec.dtype], spec.num_layers
    if recipe.average_bits is not None:
        assert windows is not None
        recipe = choose_bits(folder, spec, recipe, windows, output.work, progress, device)
    layer_layouts = layouts(recipe, source.layers, dtype)
    first = len(output.saved())
    if first < blocks:
        results = quantise_blocks(
            folder, spec, recipe, windows, output.work, progress, device, first=first
        )
        for result in results:
            _save_block(source, result, layer_layouts, output)
    quantization = quantization_config(recipe, source.layers, source.outside, source.foreign)
    total = output.finish(quantization)
    layers = tuple(layer for block in output.saved() for layer in block)
    return Saved(recipe, layers, source.num_bytes, total)


def _save_block(
    source: Source, result: BlockResult, layer_layouts: Mapping[str, LayerLayout], output: Output
) -> None:
    tensors: dict[str, Tensor | Stored] = {**source.block(result.index), **result.changed}
    layers = []
    for layer in result.layers:
        if layer.quantised is not None:
            del tensors[layer.name + WEIGHT]
            written = layer_layouts[layer.name].tensors(layer.quantised)
            tensors |= {f"{layer.name}.{part}": tensor for part, tensor in written.items()}
            layers.append(_saved(source, layer, sum(t.nbytes for t in written.values())))
        else:
            layers.append(_saved(source, layer, source.tensors[layer.name + WEIGHT].entry.size))
    output.save_block(result.index, tensors, layers)


def _saved(source: Source, layer: LayerResult, num_bytes: int) -> SavedLayer:
    shape = source.layers[layer.name]
    bits = None
    if isinstance(layer.quantised, Quantised):
        bits = layer.quantised.grid.bits
    elif isinstance(layer.quantised, Float8):
        bits = 8
    weights = shape.inputs * shape.outputs
    return SavedLayer(layer.name, bits, weights, num_bytes, layer.error, layer.on_inputs)


def _run(source: Source, recipe: Recipe, windows: Tensor | None) -> dict[str, object]:
    """Return the identity of the run: recipe, model and text."""
    model = hashlib.sha256((source.folder / CONFIG).read_bytes())
    for path in sorted({stored.path for stored in source.tensors.values()}):
        facts = path.stat()
        model.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    text = None if windows is None else hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest()
    wishes: dict[str, object] = json.loads(json.dumps(asdict(recipe)))
    return {"recipe": wishes, "model": model.hexdigest(), "text": text}
