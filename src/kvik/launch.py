"""Composition root: turns a config into a running engine. Only this module joins the trunks."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvik.collector import uncollected
from kvik.config.compute import choose_device
from kvik.config.config import (
    ASKED,
    EngineConfig,
    Notes,
    ResolvedConfig,
    check_config,
    requested_speculation,
)
from kvik.config.draft_heads import KINDS, assistant_facts, eagle3_facts, heads_for, shipped_heads
from kvik.config.env import draw_seed
from kvik.config.hardware import detect, find_gpus
from kvik.config.kv_budget import asked_budgets
from kvik.config.model_source import find_adapter, find_model, model_name, read_adapter
from kvik.config.resolve import resolve
from kvik.config.speculative import EAGLE3, MODEL_METHODS, NO_SOURCE, DraftSource, SpeculativeConfig
from kvik.config.units import show_bytes
from kvik.core.config import CacheConfig, SchedulerConfig
from kvik.core.structured import Grammars
from kvik.engine.core import EngineCore
from kvik.engine.loop import Engine, EngineLoop
from kvik.engine.memory_watch import MemoryWatch
from kvik.errors import START_LOG, ConfigError, ModelError, ParamError
from kvik.files import check_current_folder
from kvik.model_files import model_files
from kvik.models.gemma4 import ASSISTANT
from kvik.models.model_spec import ModelSpec
from kvik.text.tokenizer import Tokenizer, read_template
from kvik.worker.ahead import LoadAhead

if TYPE_CHECKING:
    import numpy as np

    from kvik.core.types import EngineRequest
    from kvik.engine.recorder import Event
    from kvik.engine.replay import Replayed
    from kvik.rank_process import RankProcesses
    from kvik.spec.engine_folder import Manifest
    from kvik.stage_process import Launcher, StageProcesses
    from kvik.worker.disk_tier import ComputedPages
    from kvik.worker.worker import Worker


MIN_SHARED = 0.9  # of the target's tokens; below that the vocabularies differ too much to draft


def shared_vocabulary(target: Tokenizer, draft: Tokenizer) -> tuple[int, ...] | None:
    """Return the target's id of each token of the draft model, -1 if it has none; None: all ids are
    equal.

    Tokens match if both vocabularies spell them alike.

    Raises:
        ConfigError: too few tokens match.
    """
    ours, theirs = target.library.get_vocab(True), draft.library.get_vocab(True)
    if ours == theirs:
        return None
    target_ids = [-1] * draft.vocab_size
    for token, draft_id in theirs.items():
        target_ids[draft_id] = ours.get(token, -1)
    shared = len(ours.keys() & theirs.keys()) / len(ours)
    if shared < MIN_SHARED:
        raise ConfigError(
            "spec_model",
            f"knows {shared:.0%} of the model's tokens; at least {MIN_SHARED:.0%} must be spelt "
            "the same",
        )
    return tuple(target_ids)


log = logging.getLogger(START_LOG)

LoadTokenizer = Callable[[], Tokenizer | None]  # None: the model has none

QUICKLY_LOADED = 4 << 30  # bytes of weights


class EarlyStart:
    """Starts other processes and `LoadAhead` before torch is imported.

    `stages` are the pipeline stages before the last one, `ranks` the other ranks. They are None if
    there are none, or once a worker owns them; otherwise they end with the block.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        """
        Raises:
            MemoryError: the address space is too small.
        """
        self.stages: StageProcesses | None = None
        self.ranks: RankProcesses | None = None
        runner = resolved.runner
        with ExitStack() as stack:
            stack.callback(self._stop)
            if runner.stages:
                from kvik.stage_process import LocalLauncher, StageProcesses

                launcher: Launcher = LocalLauncher()
                if runner.backend == "ray":
                    from kvik.ray_launcher import RayLauncher

                    launcher = RayLauncher(resolved)
                self.stages = StageProcesses(resolved, launcher)
            if runner.ranks > 1:
                from kvik.rank_process import RankProcesses  # its imports are for groups only

                last = runner.stages[-1] if runner.stages else None
                cores = () if self.stages is None else self.stages.cores
                self.ranks = RankProcesses(resolved, last, cores)
            self._ahead = stack.enter_context(LoadAhead(resolved))
            self._stack = stack.pop_all()

    def memory(self) -> np.ndarray | None:
        """See `LoadAhead.memory`."""
        return self._ahead.memory()

    def __enter__(self) -> EarlyStart:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _stop(self) -> None:
        for processes in (self.stages, self.ranks):
            if processes is not None:
                processes.stop()


def launch(config: EngineConfig) -> Engine:
    """Resolve the config, load the model, and return the running engine.

    Raises:
        KvikError: the model or an option cannot be used; nothing was loaded.
    """
    return start(resolve_config(config))


def start(resolved: ResolvedConfig, *, record: Path | None = None) -> Engine:
    """Load a resolved config, and return the running engine.

    Args:
        record: file to record events to, for `kvik replay`.

    Raises:
        KvikError: the model cannot be used, or the file cannot be written.
    """
    check_one_engine(resolved)
    check_no_role(resolved)
    check_current_folder()
    default_params = model_files(Path(resolved.runner.model_path)).default_params()
    runner = resolved.runner
    # The tokenizer's library holds the GIL. That delays the quantisation of weights, which is many
    # short operations, more than the import of torch, and plain loading less. Before a long load
    # the tokenizer also comes first so that its errors come early.
    first = runner.quantization != "none" or resolved.memory.weights > QUICKLY_LOADED
    with uncollected(), EarlyStart(resolved) as ahead, ThreadPoolExecutor(1) as aside:
        early_tokenizer = aside.submit(load_tokenizer, resolved) if first else None

        import kvik.worker.worker  # noqa: F401 (brings in torch)

        if early_tokenizer is not None:
            early_tokenizer.result()
        reading = early_tokenizer or aside.submit(load_tokenizer, resolved)
        loop = load_loop(resolved, record, ahead, tokenizer=reading.result)
        try:
            tokenizer = reading.result()
        except BaseException:
            loop.close()
            raise
    return Engine(loop, tokenizer, default_params)


_NO_ROLE = "must be both, except with kvik serve: only servers have roles"


def check_no_role(resolved: ResolvedConfig) -> None:
    """Raise ConfigError if the config gives a role, which only an engine with a server can have."""
    if resolved.runner.role != "both":
        raise ConfigError("role", _NO_ROLE)


def check_one_engine(resolved: ResolvedConfig) -> None:
    """Raise ConfigError if the config asks for several engines: this process can run only one."""
    if resolved.runner.replicas > 1:
        reason = "kvik serve and AsyncLLM run several, each in a separate process"
        raise ConfigError(
            "data_parallel_size", f"must be 1 for an engine in this process: {reason}"
        )


def load_loop(
    resolved: ResolvedConfig,
    record: Path | None = None,
    ahead: EarlyStart | None = None,
    token: bytes = b"",
    tokenizer: LoadTokenizer | None = None,
) -> EngineLoop:
    """Load the engine alone, without what a frontend needs. Raises the errors of `start`.

    Args:
        record: see `start`.
        ahead: the early start, if torch was imported after it; None: starts now.
        token: see `Worker`.
        tokenizer: returns that of a frontend in this process, for grammars; None: they load one.
    """
    runner, tiers = resolved.runner, resolved.cache.tiers
    if tiers is not None and (tiers.peers or tiers.lends) and not token:
        raise ConfigError("role", _NO_ROLE)
    weights, name = show_bytes(resolved.memory.weights), model_name(Path(runner.model_path))
    log.info("loading %s: %s of weights, %s on %s", name, weights, runner.dtype, runner.device)
    _tell_what_matters(resolved)

    # Not on a GPU: its memory is the engine's own, and torch's allocator returns none.
    memory = MemoryWatch(resolved.memory.limit) if runner.kernels == "native" else None
    core = EngineCore(resolved)
    if record is None:
        worker = load_worker(resolved, ahead=ahead, token=token, tokenizer=tokenizer)
        loop = EngineLoop(core, worker, time.monotonic, memory=memory)
        loop.find_pages()
        return loop

    from kvik.engine.recorder import ClockTape, Recorder  # imports msgspec

    tape = ClockTape(time.monotonic)
    worker = load_worker(resolved, tape, ahead, token=token, tokenizer=tokenizer)
    recorder = Recorder(record, resolved, tape)
    loop = EngineLoop(core, worker, time.monotonic, [recorder], memory)
    loop.find_pages()
    return loop


def check_tokenizer(resolved: ResolvedConfig) -> None:
    """Raise ModelError, which says what is missing, if the model has no tokenizer."""
    files = model_files(Path(resolved.runner.model_path))
    if not files.has_tokenizer():
        files.tokenizer()


def load_tokenizer(resolved: ResolvedConfig) -> Tokenizer | None:
    """Load the tokenizer, with the chat template that the options name; None: the model has none.

    Raises:
        KvikError: the tokenizer or the chat template cannot be used.
    """
    files = model_files(Path(resolved.runner.model_path))
    file = resolved.chat_template
    if not files.has_tokenizer():
        if file is not None:
            raise ConfigError("chat_template", "has no effect: this model has no tokenizer")
        return None
    tokenizer = files.tokenizer()
    if file is not None:
        tokenizer.chat_template = read_template(file)
        _check_template(tokenizer)
    return tokenizer


def _check_template(tokenizer: Tokenizer) -> None:
    """Raise `ModelError` if a chat template is not valid Jinja. A valid one may still refuse this
    conversation."""
    from kvik.text.chat_template import ChatTemplate  # imports msgspec, only for chats

    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    try:
        template.render([{"role": "user", "content": "Hello"}])
    except ParamError:
        pass
    finally:
        template.close()


def load_worker(
    resolved: ResolvedConfig,
    clock: Callable[[], float] = time.monotonic,
    ahead: EarlyStart | None = None,
    *,
    token: bytes = b"",
    tokenizer: LoadTokenizer | None = None,
    replays: bool = False,
    computed: ComputedPages | None = None,
) -> Worker:
    """Load the model alone, for a caller that plans the steps itself. For `ahead` and `tokenizer`
    see `load_loop`, for `token`, `replays` and `computed` see `Worker`."""
    with uncollected(), ahead or EarlyStart(resolved) as start_up:
        from kvik.worker.loading import fill_cache
        from kvik.worker.worker import Worker

        runner, stages, ranks = resolved.runner, start_up.stages, start_up.ranks
        several = ranks is not None or stages is not None
        if several and runner.engine_cache and runner.load_format == "safetensors":
            fill_cache(resolved)
        if stages is not None:
            stages.load()
        memory = start_up.memory()
        grammars = None  # encoders write no text
        if not resolved.model.encoder:
            grammars = grammars_of(resolved, tokenizer)
        with nullcontext() if ranks is None else ranks.loading() as setup:
            worker = Worker(
                resolved,
                clock,
                memory=memory,
                grammars=grammars,
                setup=setup,
                stages=stages,
                token=token,
                replays=replays,
                computed=computed,
            )
        start_up.stages = start_up.ranks = None  # the worker stops them
        return worker


def grammars_of(resolved: ResolvedConfig, tokenizer: LoadTokenizer | None = None) -> Grammars:
    """Return the grammars of structured outputs. For `tokenizer` see `load_loop`."""
    from kvik.text.matcher import BuiltGrammars  # imports numpy

    files = model_files(Path(resolved.runner.model_path))
    load = tokenizer or (lambda: files.tokenizer() if files.has_tokenizer() else None)
    return BuiltGrammars(load, resolved.model.vocab_size)


def play(
    resolved: ResolvedConfig,
    readings: Iterable[float],
    events: Iterable[Event],
    progress: Callable[[int], None],
    fetched: Sequence[EngineRequest] = (),
) -> Replayed:
    """Replay a recording with the model that it names. See `Replay`.

    Args:
        readings: recorded readings of the worker's clock.
        fetched: the requests that `fetches` finds in it, which are computed first.

    Raises:
        KvikError: the model cannot be used, or the recording is damaged.
    """
    from kvik.engine.replay import RecordedClock, Replay

    with ExitStack() as stack:
        computed = None
        if fetched:
            computed = _computed(resolved, fetched)
            stack.callback(computed.end)
        clock = RecordedClock(readings)
        worker = load_worker(resolved, clock, replays=True, computed=computed)
        stack.callback(worker.stop)
        return Replay(EngineCore(resolved), worker, clock).run(events, progress)


def _computed(resolved: ResolvedConfig, prompts: Sequence[EngineRequest]) -> ComputedPages:
    """Return the pages of prompts, computed by a separate engine, which keeps them on a disk tier
    of unlimited size."""
    from kvik.engine.replay import keep_pages
    from kvik.worker.disk_tier import ComputedPages

    tiers = resolved.cache.tiers
    assert tiers is not None
    sizes = replace(tiers, memory=0, disk=sys.maxsize, peers=False, lends=False)
    keeps = replace(resolved, cache=replace(resolved.cache, tiers=sizes))
    computed = ComputedPages()
    worker = load_worker(keeps, replays=True, computed=computed)
    try:
        keep_pages(EngineCore(keeps), worker, prompts)
    except BaseException:
        computed.end()
        raise
    finally:
        worker.stop()
    return computed


def build_weights(
    resolved: ResolvedConfig, file: BinaryIO, advance: Callable[[int, int], None]
) -> Manifest:
    """Write the weights in the layout that the worker has in memory. Returns the part of an engine
    folder's manifest that describes them."""
    from kvik.worker import loading

    return loading.build_weights(resolved, file, advance)


def reschedule(engine: Engine, scheduler: SchedulerConfig, cache: CacheConfig) -> Engine:
    """Return an engine with the same loaded model, another scheduling policy, and an empty prefix
    cache.

    The sizes must be those it was loaded with. `engine` must have no requests, and must not be used
    afterwards.
    """
    resolved = replace(engine.resolved, scheduler=scheduler, cache=cache)
    loop = EngineLoop(EngineCore(resolved), engine.loop.executor, time.monotonic)
    loop.find_pages()
    return replace(engine, loop=loop)


def _tell_what_matters(resolved: ResolvedConfig) -> None:
    """Warn, with the reason, if the engine is several times slower than it could be, or if its
    outputs differ from the model's."""
    for decision in resolved.decisions:
        slow = decision.name == "kernels" and decision.value == "torch"
        if slow and decision.reason != ASKED:
            log.warning("running on torch's kernels, which are slower: %s", decision.reason)
        elif decision.name == "fallback" and resolved.model.fallback is not None:
            log.warning("running through transformers, which is much slower: %s", decision.reason)
        elif decision.name == "typical_acceptance":
            log.warning("speculation with typical_acceptance is %s", decision.reason)
        elif decision.name == "kv_budget":
            log.warning("a kv_budget of %s is %s", decision.value, decision.reason)


def resolve_config(config: EngineConfig, *, moves: bool = False) -> ResolvedConfig:
    """Make every decision, with its reason, before anything is loaded.

    Args:
        moves: requests may move between this engine and engines of other servers.
    """
    config = check_config(config)  # before a model is downloaded
    path = find_model(config.model, revision=config.revision)
    if config.lora is not None:
        config = replace(config, lora=str(find_adapter("lora", config.lora)))
    named = (entry.partition("=") for entry in config.adapters)
    adapters = tuple(read_adapter(name, folder) for name, _, folder in named)
    spec = _read_spec(path, config.fallback)
    gpus = () if config.device == "cpu" else find_gpus()
    requested = requested_speculation(config)
    source = _draft_source(requested, path, spec)
    budgets = asked_budgets(config.kv_budget, spec)
    seed = draw_seed()
    return resolve(
        config, spec, detect(gpus), str(path), source, seed, budgets, adapters, moves=moves
    )


def _read_spec(path: Path, fallback: str) -> ModelSpec:
    if fallback == "none":
        return model_files(path).spec()
    from kvik.fallback import read_spec  # few models need it

    return read_spec(path, fallback)


def find_device(device: str) -> str:
    """Return the device for work without an engine: "cpu" or "cuda:N".

    Args:
        device: as `EngineConfig.device`.

    Raises:
        ConfigError: the device is invalid or missing.
    """
    config = check_config(EngineConfig(device=device))
    gpus = () if device == "cpu" else find_gpus()
    return choose_device(config, detect(gpus), Notes())[0]


def _draft_source(requested: SpeculativeConfig | None, model: Path, spec: ModelSpec) -> DraftSource:
    """Return the draft model or the draft heads, if any are requested."""
    if requested is None or requested.method not in MODEL_METHODS:
        return NO_SOURCE
    if requested.method in KINDS:
        folder = (
            _find_drafter(requested.model)
            if requested.model
            else shipped_heads(requested.method, model)
        )
        heads = heads_for(folder, requested.method, spec.hidden_size, spec.vocab_size)
        return DraftSource(str(folder), heads=heads)
    path = _find_drafter(requested.model)
    if requested.method == EAGLE3:
        head, taps = eagle3_facts(path, spec)
        return DraftSource(str(path), head, taps=taps)
    if requested.method == ASSISTANT:
        return DraftSource(str(path), assistant_facts(path, spec))
    ours, theirs = model_files(model), model_files(path)
    try:
        draft = theirs.spec()
    except ModelError as error:
        raise ModelError("spec_model", str(error)) from None
    if ours.has_tokenizer() and theirs.has_tokenizer():
        meanings = shared_vocabulary(ours.tokenizer(), theirs.tokenizer())
    elif spec.vocab_size != draft.vocab_size:
        raise ConfigError(
            "spec_model",
            f"must have {spec.vocab_size} tokens as the model has, not {draft.vocab_size}: without "
            "tokenizers their tokens cannot be matched",
        )
    else:
        meanings = None
    return DraftSource(str(path), draft, meanings)


def _find_drafter(model: str) -> Path:
    try:
        return find_model(model)
    except ModelError as error:
        raise ModelError("spec_model", error.message) from None
