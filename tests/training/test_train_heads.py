"""Training of draft heads: they learn, and the engine computes the same heads."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import save_tiny
from torch import Tensor

from kvik import LLM, SamplingParams
from kvik.config.config import EngineConfig
from kvik.config.draft_heads import EAGLE, KINDS, MEDUSA, HeadsSpec, read_heads_spec
from kvik.errors import ConfigError, ModelError
from kvik.evaluate.windows import ScoredWindow
from kvik.files import working_folder
from kvik.launch import resolve_config
from kvik.training.heads import (
    EagleTrainee,
    HeadsRecipe,
    MedusaTrainee,
    holds_finished,
    train_heads,
)
from kvik.training.train import FILE, Batch, Progress, Schedule, SnapshotStore
from kvik.worker.drafters.heads import load_eagle, load_medusa
from kvik.worker.platforms import TorchPlatform

VOCAB, HIDDEN, DEPTH = 96, 32, 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def options(folder: Path) -> dict[str, object]:
    return {"model": str(folder), "dtype": "float32", "device": "cpu", "threads": 1}


def recipe(kind: str, tokens: int = 4800, seed: int = 0) -> HeadsRecipe:
    return HeadsRecipe(kind, DEPTH, 1, 48, Schedule(tokens, 32, 1e-2, seed))


def quiet(what: str, share: float) -> None:
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "Llama")
    return folder


@pytest.fixture(scope="module")
def windows() -> list[ScoredWindow]:
    """Return a cycle of twelve tokens, entered anywhere."""
    circle = [7, 90, 33, 5, 61, 18, 72, 44, 29, 83, 50, 11]
    starts = [5 * i % 12 for i in range(48)]
    return [ScoredWindow(tuple((circle * 3)[start : start + 20]), 1) for start in starts]


@pytest.mark.parametrize("kind", [MEDUSA, pytest.param(EAGLE, marks=pytest.mark.full)])
def test_heads_learn_and_the_engine_drafts_with_them(kind, model, windows, tmp_path):
    out = tmp_path / "heads"
    config = EngineConfig(**options(model))
    trained = train_heads(config, windows, recipe(kind), out, quiet)
    untrained = train_heads(config, windows, recipe(kind, tokens=1), tmp_path / "no", quiet)
    assert trained.finished and trained.tokens == sum(len(w.token_ids) for w in windows)
    assert trained.num_bytes < (out / "model.safetensors").stat().st_size
    spec = read_heads_spec(out, kind)
    assert spec.depth == DEPTH and len(spec.accuracies) == DEPTH
    assert spec.accuracies[0][0] > 0.3 + untrained.spec.accuracies[0][0]
    prompts = [list(window.token_ids[:8]) for window in windows[:6]]
    with LLM(**options(model)) as llm:
        expected = llm.generate(prompts, GREEDY)
    planned = {"method": kind, "model": str(out), "num_speculative_tokens": 6, "adaptive": False}
    with LLM(**options(model), speculative_config=planned) as llm:
        found = llm.generate(prompts, GREEDY)
    for output, other in zip(found, expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
    assert all(output.num_drafted_tokens > 20 for output in found)


def test_the_same_seed_gives_the_same_heads(model, windows, tmp_path):
    config = EngineConfig(**options(model))
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train_heads(config, windows, recipe(EAGLE, 640, seed), tmp_path / name, quiet)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_ctrl_c_within_a_step_keeps_what_was_learned(
    model, windows, tmp_path, monkeypatch, default_sigint
):
    losses: list[Tensor] = []

    def loss(trainee: MedusaTrainee, batch: Batch) -> Tensor:
        losses.append(trainee_loss(trainee, batch))
        if len(losses) == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return losses[-1]

    trainee_loss = MedusaTrainee.loss
    monkeypatch.setattr(MedusaTrainee, "loss", loss)
    out, config = tmp_path / "heads", EngineConfig(**options(model))
    trained = train_heads(config, windows, recipe(MEDUSA, 640), out, quiet)  # 20 steps
    assert not trained.finished and len(losses) == 10
    assert read_heads_spec(out, MEDUSA).accuracies == trained.spec.accuracies
    assert [path.name for path in tmp_path.iterdir()] == ["heads"] and not holds_finished(out)
    assert train_heads(config, windows, recipe(MEDUSA, 640), out, quiet).finished
    assert len(losses) == 20
    train_heads(config, windows, recipe(MEDUSA, 640), tmp_path / "unbroken", quiet)
    for name in ("config.json", "model.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_training_resumes(kind, model, windows, tmp_path, monkeypatch):
    monkeypatch.setattr(SnapshotStore, "due", lambda self: True)  # after every step
    config, out = EngineConfig(**options(model)), tmp_path / "heads"
    steps: list[float] = []

    def until(last: float, error: type[BaseException]) -> Progress:
        def progress(what: str, share: float) -> None:
            if what.startswith("training"):
                steps.append(share)
                if share >= last:
                    raise error

        return progress

    planned = recipe(kind, 640)  # 20 steps
    with pytest.raises(ConfigError, match="output: cannot be written"):
        train_heads(config, windows, planned, out, until(0.3, OSError))  # like a power failure
    assert [path.name for path in out.iterdir()] == [FILE] and len(steps) == 6
    trained = train_heads(config, windows, planned, out, until(0.5, KeyboardInterrupt))
    assert not trained.finished and steps[6:] == [0.35, 0.4, 0.45, 0.5]
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "model.safetensors", FILE}
    with pytest.raises(ConfigError, match="another model, text or recipe"):
        train_heads(config, windows, recipe(kind, 672), out, quiet)
    with pytest.raises(ConfigError, match="another model, text or recipe"):
        train_heads(config, windows[1:], planned, out, quiet)
    assert train_heads(config, windows, planned, out, until(2.0, OSError)).finished
    assert len(steps) == 20
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    train_heads(config, windows, planned, tmp_path / "unbroken", quiet)
    for name in ("config.json", "model.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()


def test_two_processes_do_not_train_in_one_folder(model, windows, tmp_path):
    config, out = EngineConfig(**options(model)), tmp_path / "heads"
    with working_folder(out), pytest.raises(ConfigError, match="output: .*another process"):
        train_heads(config, windows, recipe(MEDUSA, 640), out, quiet)
    assert train_heads(config, windows, recipe(MEDUSA, 640), out, quiet).finished


def test_a_damaged_checkpoint_is_named(model, windows, tmp_path):
    out = tmp_path / "heads"
    out.mkdir()
    (out / FILE).write_bytes(b"cut in two")
    with pytest.raises(ModelError, match=FILE):
        train_heads(EngineConfig(**options(model)), windows, recipe(MEDUSA), out, quiet)


def test_a_rate_that_is_too_high_is_reported(model, windows, tmp_path):
    wild = HeadsRecipe(EAGLE, DEPTH, 1, 48, Schedule(32000, 32, 1e30, 0))
    with pytest.raises(ConfigError, match="must be below"):
        train_heads(EngineConfig(**options(model)), windows, wild, tmp_path / "new", quiet)


def test_an_existing_folder_and_too_little_text_are_refused(model, windows, tmp_path):
    config = EngineConfig(**options(model))
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not a folder of draft heads"):
        train_heads(config, windows, recipe(MEDUSA), taken, quiet)
    before = sorted(path.read_bytes() for path in model.iterdir())
    with pytest.raises(ConfigError, match="not a folder of draft heads"):
        train_heads(config, windows, recipe(MEDUSA), model, quiet)
    assert sorted(path.read_bytes() for path in model.iterdir()) == before
    with pytest.raises(ConfigError, match="16 windows or more, not 3"):
        train_heads(config, windows[:3], recipe(MEDUSA), tmp_path / "new", quiet)
    short = [ScoredWindow((1, 2, 3), 1)] * 20
    with pytest.raises(ConfigError, match="more than 3 tokens"):
        train_heads(config, short, recipe(MEDUSA), tmp_path / "new", quiet)


class Stub:
    """A model's embedding and head, without the rest."""

    def __init__(self, output: Tensor, table: Tensor) -> None:
        self.output, self.table = output, table

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.output

    def enter(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.table[ids] + positions[:, None]


def saved(trainee: MedusaTrainee | EagleTrainee, folder: Path) -> Path:
    import json

    from kvik.nn.safetensors import write_safetensors

    for i, tensor in enumerate(trainee.parameters):
        tensor.normal_(0, 0.2, generator=torch.Generator().manual_seed(i))
    (folder / "config.json").write_text(json.dumps(trainee.spec.as_config("m")))
    write_safetensors(folder / "model.safetensors", trainee.tensors())
    return folder


@pytest.mark.parametrize("layers", [1, 3])
def test_the_engine_runs_the_trained_heads(layers, model, tmp_path):
    g = torch.Generator().manual_seed(9)
    stub = Stub(torch.randn(HIDDEN, VOCAB, generator=g), torch.randn(VOCAB, HIDDEN, generator=g))
    hidden = torch.randn(5, 1 + DEPTH, HIDDEN, generator=g)
    ids = torch.randint(VOCAB, (5, 1 + DEPTH), generator=g)
    batch, sizes = Batch(hidden, ids, torch.arange(5)), (HIDDEN, VOCAB)
    parts = TorchPlatform(resolve_config(EngineConfig(**options(model), kernels="torch"))).parts

    medusa = MedusaTrainee(HeadsSpec(MEDUSA, *sizes, DEPTH, layers), stub.output)
    heads = load_medusa(saved(medusa, tmp_path), stub, sizes, parts)
    torch.testing.assert_close(heads(hidden[:, 0]), medusa.logits(batch), rtol=1e-4, atol=1e-4)

    spec = HeadsSpec(EAGLE, *sizes, DEPTH, inner_size=48)
    eagle = EagleTrainee(spec, stub.output, stub.enter, seed=0)
    layer = load_eagle(saved(eagle, tmp_path), sizes, parts)
    state = hidden[:, 0]
    for depth in range(DEPTH):
        embedded = stub.enter(ids[:, depth], batch.positions + 1 + depth)
        state = layer(embedded, state)
        expected = eagle.logits(batch)[:, depth]
        torch.testing.assert_close(stub.logits(state), expected, rtol=1e-4, atol=1e-3)
