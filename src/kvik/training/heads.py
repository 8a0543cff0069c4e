"""Train draft heads for a model on text, and save them in a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.config.config import EngineConfig
from kvik.config.draft_heads import EAGLE, KINDS, MEDUSA, HeadsSpec, read_heads_spec
from kvik.config.step_memory import PROMPT_ROWS
from kvik.errors import ConfigError, ModelError
from kvik.evaluate.windows import (
    Reader,
    ScoredWindow,
    cut,
    loaded_reader,
    prompt_prefix,
    resolve_reader,
)
from kvik.files import can_write, working_folder, writing_whole_folder
from kvik.nn.safetensors import write_safetensors
from kvik.text.tokenizer import Tokenizer
from kvik.training.train import (
    FILE,
    Batch,
    Progress,
    Schedule,
    SnapshotStore,
    Trainee,
    accuracies,
    check_windows,
    identity_of,
    read_states,
    train,
)

# Training of Medusa's heads (models/draft_heads.py), with the model's own output matrix.

DECAY = 0.8  # weight of a head's loss relative to the previous head's, as in the paper


class MedusaTrainee:
    """Medusa's heads; their blocks start at zero, so that each head equals the model's own."""

    def __init__(self, spec: HeadsSpec, output: Tensor) -> None:
        """Make heads with blocks of zeros.

        Args:
            output: [hidden, vocab] fp32, of the model.
        """
        self.spec = spec
        self.output = output
        heads, width = spec.depth, spec.hidden_size
        self.weights = [torch.zeros(heads, width, width) for _ in range(spec.layers)]
        self.biases = [torch.zeros(heads, width) for _ in range(spec.layers)]

    @property
    def parameters(self) -> list[Tensor]:
        return self.weights + self.biases

    def logits(self, batch: Batch) -> Tensor:
        x = batch.hidden[:, :1].expand(-1, self.spec.depth, -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + F.silu(torch.einsum("bki,koi->bko", x, weight) + bias)
        return x @ self.output

    def loss(self, batch: Batch) -> Tensor:
        logits = self.logits(batch)
        losses = F.cross_entropy(
            logits.flatten(0, 1), batch.ids[:, 1:].reshape(-1), reduction="none"
        )
        return (
            losses.view(-1, self.spec.depth).mean(0) * DECAY ** torch.arange(self.spec.depth)
        ).sum()

    def tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            for head in range(self.spec.depth):
                tensors[f"{head}.{layer}.linear.weight"] = weight[head]
                tensors[f"{head}.{layer}.linear.bias"] = bias[head]
        return tensors


# Training of EAGLE's layer (models/draft_heads.py), on its own predictions to the full depth.

EPS = 1e-6  # as of models/draft_heads.py
FEATURES = 0.1  # weight of the distance between predicted and true hidden states

Enter = Callable[[Tensor, Tensor], Tensor]  # ids, positions [rows] -> [rows, hidden]


class EagleTrainee:
    """EAGLE's layer; its feed-forward block starts at zero."""

    def __init__(self, spec: HeadsSpec, output: Tensor, enter: Enter, seed: int) -> None:
        """
        Args:
            output: [hidden, vocab] fp32, of the model.
            enter: the embedding of tokens in the model.
        """
        self.spec = spec
        self.output = output
        self.enter = enter
        generator = torch.Generator().manual_seed(seed)
        width, inner = spec.hidden_size, spec.inner_size

        def drawn(outputs: int, inputs: int) -> Tensor:
            return torch.randn(outputs, inputs, generator=generator).mul_(inputs**-0.5)

        self.join, self.offset = drawn(width, 2 * width), torch.zeros(width)
        self.gain = torch.ones(width)
        self.gate, self.up = drawn(inner, width), drawn(inner, width)
        self.down = torch.zeros(width, inner)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.join, self.offset, self.gain, self.gate, self.up, self.down]

    def guesses(self, batch: Batch) -> Tensor:
        """Return predictions of batch.hidden[:, 1:], [rows, depth, hidden]."""
        x, predictions = batch.hidden[:, 0], []
        for depth in range(self.spec.depth):
            embedded = self.enter(batch.ids[:, depth], batch.positions + 1 + depth)
            x = F.linear(torch.cat((embedded, x), 1), self.join, self.offset)
            y = F.rms_norm(x, self.gain.shape, self.gain, EPS)
            x = x + F.linear(F.silu(F.linear(y, self.gate)) * F.linear(y, self.up), self.down)
            predictions.append(x)
        return torch.stack(predictions, 1)

    def logits(self, batch: Batch) -> Tensor:
        return self.guesses(batch) @ self.output

    def loss(self, batch: Batch) -> Tensor:
        guessed = self.guesses(batch)
        logits = (guessed @ self.output).flatten(0, 1)
        words = F.cross_entropy(logits, batch.ids[:, 1:].reshape(-1))
        return words + FEATURES * F.smooth_l1_loss(guessed, batch.hidden[:, 1:])

    def tensors(self) -> dict[str, Tensor]:
        return {
            "fc.weight": self.join,
            "fc.bias": self.offset,
            "norm.weight": self.gain,
            "mlp.gate_proj.weight": self.gate,
            "mlp.up_proj.weight": self.up,
            "mlp.down_proj.weight": self.down,
        }


CONFIG, WEIGHTS = "config.json", "model.safetensors"
_OWN = {CONFIG, WEIGHTS, FILE}


@dataclass(frozen=True, slots=True)
class HeadsRecipe:
    """Kind and sizes of the heads, and how they are trained."""

    kind: str  # one of `KINDS`
    depth: int  # number of drafted tokens
    layers: int  # residual blocks of a Medusa head
    inner: int  # width of EAGLE's feed-forward block
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class TrainedHeads:
    """The result of a training."""

    spec: HeadsSpec
    tokens: int  # of the text
    num_bytes: int  # of the weights
    finished: bool  # whether all steps were done


def windows_of(texts: Sequence[str], tokenizer: Tokenizer, window: int) -> list[ScoredWindow]:
    """Return windows that cover some texts, each text from its beginning. Raises ConfigError if a
    window has no room for text."""
    prefix = prompt_prefix(tokenizer)
    if window < len(prefix) + 2:
        raise ConfigError("window", f"must be {len(prefix) + 2} or more, not {window}")
    return [
        piece
        for text in texts
        for piece in cut(tokenizer.encode(text, add_special_tokens=False), prefix, window, window)
    ]


def train_heads(
    config: EngineConfig,
    windows: Sequence[ScoredWindow],
    recipe: HeadsRecipe,
    out: Path,
    progress: Progress,
) -> TrainedHeads:
    """Train heads and save them in `out`, a folder.

    The state is saved there from time to time; the next call continues from it.

    Raises:
        KvikError: the model cannot be used, there is too little text, or `out` holds other files or
            cannot be written.
    """
    check_place(out)
    check_windows(windows, recipe.depth)
    longest = max((len(window.token_ids) for window in windows), default=2)
    with (
        loaded_reader(resolve_reader(config, longest)) as reader,
        _writing(),
        working_folder(out, alone=True) as work,
    ):
        states = read_states(reader, windows, work / "states", progress)
        trainee = _trainee(reader, recipe)
        keeper = SnapshotStore(out / FILE, identity_of(recipe, states))
        finished = train(trainee, states, recipe.schedule, keeper, progress)
        shares = accuracies(trainee, states, recipe.schedule.rows, progress)
        spec = replace(trainee.spec, accuracies=shares)
        size = _save(spec, trainee, reader, out, None if finished else keeper.file)
    return TrainedHeads(spec, len(states.ids), size, finished)


@contextmanager
def _writing() -> Iterator[None]:
    """Name the output in errors of the system; the model is loaded before."""
    try:
        yield
    except OSError as error:
        reason = f"cannot be written ({error.strerror}); the same command continues"
        raise ConfigError("output", reason) from None


def check_place(out: Path) -> None:
    """Raise ConfigError if `out` cannot be written, or is neither new nor a folder of heads."""
    if out.exists() and not (out.is_dir() and _is_ours(out)):
        raise ConfigError("output", f"{out} exists and is not a folder of draft heads")
    if not can_write(out / CONFIG, parents=True):
        raise ConfigError("output", f"{str(out)!r} must be a folder to write to")


def holds_finished(out: Path) -> bool:
    """Return whether a folder has heads whose training is finished."""
    return (out / CONFIG).exists() and not (out / FILE).exists()


def _is_ours(folder: Path) -> bool:
    """Return whether a folder has only heads or the state of their training."""
    names = {path.name for path in folder.iterdir()}
    if CONFIG not in names or not names <= _OWN:
        return names <= {FILE}
    for kind in KINDS:
        try:
            read_heads_spec(folder, kind)
        except ModelError:
            continue
        return True
    return False  # a model's folder, which has files of the same names


def _trainee(reader: Reader, recipe: HeadsRecipe) -> Trainee:
    model, dtype = reader.resolved.model, getattr(torch, reader.resolved.runner.dtype)
    device = reader.resolved.runner.device
    # The logits of unit vectors are the columns of the output matrix, in any format.
    unit = torch.eye(model.hidden_size, dtype=dtype, device=device)
    parts = [
        reader.model.logits(unit[first : first + PROMPT_ROWS]).cpu().clone()
        for first in range(0, len(unit), PROMPT_ROWS)
    ]
    output = torch.cat(parts)  # [hidden, vocab]
    sizes = model.hidden_size, model.vocab_size, recipe.depth
    if recipe.kind == MEDUSA:
        return MedusaTrainee(HeadsSpec(MEDUSA, *sizes, recipe.layers), output)

    def enter(ids: Tensor, positions: Tensor) -> Tensor:
        return reader.model.enter(ids.to(device), positions.to(device)).cpu().float().clone()

    spec = HeadsSpec(EAGLE, *sizes, inner_size=recipe.inner)
    return EagleTrainee(spec, output, enter, recipe.schedule.seed)


def _save(
    spec: HeadsSpec, trainee: Trainee, reader: Reader, out: Path, snapshot: Path | None
) -> int:
    """Write the folder of heads; return the bytes of their weights.

    Args:
        snapshot: snapshot of an unfinished training, to keep in the folder.
    """
    runner = reader.resolved.runner
    model, dtype = Path(runner.model_path).name, getattr(torch, runner.dtype)
    with writing_whole_folder(out) as folder:
        if snapshot is not None and snapshot.is_file():
            shutil.copyfile(snapshot, folder / FILE)
        text = json.dumps(spec.as_config(model), indent=2) + "\n"
        (folder / CONFIG).write_text(text, encoding="utf-8")
        tensors = {name: tensor.to(dtype) for name, tensor in trainee.tensors().items()}
        return write_safetensors(folder / WEIGHTS, tensors)
