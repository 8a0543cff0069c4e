"""One rank: loads the model as resolved, allocates the cache as planned, computes plans."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvik.attention.select import NATIVE
from kvik.config.config import ResolvedConfig
from kvik.config.hardware import detect
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.structured import Constraint, Grammars
from kvik.errors import ConfigError, GroupLost, ParamError
from kvik.nn.pages import FINGERPRINT_BYTES, VERSION
from kvik.spec.adapters import Adapter
from kvik.spec.engine_folder import read_manifest
from kvik.version import __version__
from kvik.worker.disk_tier import ComputedPages, DiskTier, ReplayTier, usable_folder
from kvik.worker.drafters.registry import DrafterParts, build_drafter
from kvik.worker.engine_cache import digest_of, fingerprints
from kvik.worker.graphs import EngineNetwork
from kvik.worker.group import EarlierStages, GiveBack, LoadAdapter, RankSetup
from kvik.worker.loading import load_share
from kvik.worker.model_runner import ModelRunner, Participant, RunningStep
from kvik.worker.output_tokens import OutputTokens
from kvik.worker.page_copies import ProcessCopies, StreamCopies, own_pages
from kvik.worker.page_mover import PageFolder, PageMover, Peers, TierParts
from kvik.worker.pipeline import Pipeline, StageSteps
from kvik.worker.platforms import inference_on, on_device, platform
from kvik.worker.prompt_outputs import Pooling, PromptLogprobs
from kvik.worker.request_table import RequestTable
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.speculator import Speculator
from kvik.worker.staged_mover import StagedPageMover
from kvik.worker.step_inputs import AtOnce, Copies, PinnedCopies, StepSizes
from kvik.worker.warm_up import IdleWork

if TYPE_CHECKING:
    from kvik.worker.transformers_model import RequestCaches


class Worker:
    """The model with its cache, as the `Executor` of this process and thread.

    A step begins when it is submitted: a CPU computes it then, a GPU computes while the next one is
    planned.

    Raises:
        ModelError: the weights do not fit the spec.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        clock: Callable[[], float] = time.monotonic,
        copies: Copies | None = None,
        memory: np.ndarray | None = None,
        grammars: Grammars | None = None,
        setup: RankSetup | None = None,
        stages: EarlierStages | None = None,
        *,
        token: bytes = b"",
        replays: bool = False,
        computed: ComputedPages | None = None,
    ) -> None:
        """
        Args:
            copies: copies results to the host; None: the best choice for the device.
            memory: for weights: [bytes] uint8 zeros; None: new memory.
            grammars: of structured texts; None: there are none.
            setup: setup of the first process of a group that computes the layers; None: there is
                no group.
            stages: the stages before this one, which is the last; None: there are none.
            token: secret shared by engines that exchange pages; b"": there are none.
            replays: the plans were made before: loads are done at once, and no folder is changed.
            computed: pages of other engines, for a replay. A worker with other engines in its
                config reads them, another one stores its pages there.
        """
        runner = config.runner
        self._grammars = grammars
        self._mover: PageMover | None = None
        self._threads = runner.threads if runner.device == "cpu" else None
        if runner.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError("device", "torch cannot use the GPU: was it built for CUDA?")
        self._set_threads()
        self._device = torch.device(runner.device)
        self._inference = inference_on(self._device)
        if runner.kv_folder is not None and config.cache.tiers is not None and not replays:
            usable_folder(runner.kv_folder, config.cache.tiers.disk)  # before weights are loaded
        with on_device(self._device):
            network = self._build(config, clock, copies, memory, setup, stages)
            if config.cache.tiers is not None:  # last, as it opens files
                assert self._runner is not None
                covered = self._runner.table.covered
                if covered is None:
                    covered = np.zeros(config.state_rows, np.int32)
                self._mover = page_mover(
                    config, network, setup, token, covered, replays=replays, computed=computed
                )
        if runner.attention_backend == NATIVE:
            # torch does little in a step, and its threads busy-wait, also for each other.
            self._threads = 1

    def _build(
        self,
        config: ResolvedConfig,
        clock: Callable[[], float],
        copies: Copies | None,
        memory: np.ndarray | None,
        setup: RankSetup | None,
        stages: EarlierStages | None,
    ) -> EngineNetwork:
        runner = config.runner
        self._stages, self._stages_prepare = stages, stages is not None
        chosen = platform(config, memory, setup)
        self._release_freed, self._graphs = chosen.release_freed, chosen.graph_memory
        self._team, self._give_back = chosen.team, chosen.give_back
        network = load_share(config, chosen, setup, runner.stages[-1] if stages else None)
        speculation = config.speculation
        sizes = StepSizes.of_engine(config)
        graph, inputs = chosen.graph(network, sizes)
        pipeline = None
        if stages is not None:
            network = replace(network, earlier=stages)
            steps = StageSteps(network, graph, inputs, config.cache.block_size)
            graph = pipeline = Pipeline(steps, stages)
            inputs = pipeline.inputs
            stages.wait_loaded()
        device, draw_bytes = chosen.parts.device, chosen.parts.draw_bytes
        max_num_seqs, vocab_size = config.scheduler.max_num_seqs, config.model.vocab_size
        table = _request_table(config, sizes)
        sampling = SamplingTable(max_num_seqs, vocab_size, device, draw_bytes, self._grammars)
        speculator: Speculator | None = None
        compiled = chosen.parts.warm_ups.steps(network, config.model, sizes)
        self._idle_work: tuple[IdleWork, ...] = (compiled, graph)
        if speculation is not None:
            drafts = chosen if speculation.divided else chosen.for_drafts()
            parts = DrafterParts(speculation, config, table, sampling, network, drafts)
            drafter = build_drafter(parts)
            self._idle_work += tuple(parts.idle_work)
            speculator = Speculator(speculation, drafter, table, sampling, vocab_size, clock)
        chosen.wait_loaded()
        self._idle_work += (chosen.parts.warm_ups.rules(),)
        if copies is None:
            copies = best_copies(device)
        # See `Executor`.
        self.depth = max(copies.depth, len(runner.stages))
        self.in_turn = speculation is not None
        participants = step_participants(network, table, sampling, device, copies, speculator)
        self._caches: RequestCaches | None = None
        if config.model.fallback is not None:
            from kvik.worker.transformers_model import TransformersSteps  # few models need it

            assert isinstance(graph, TransformersSteps)
            self._caches = graph.caches
            participants.insert(0, graph.caches)
        self._runner: ModelRunner | None = ModelRunner(
            network, graph, inputs, table, participants, clock, depth=self.depth, pipeline=pipeline
        )
        return network

    @property
    def lost(self) -> str:
        if self._runner is None:
            return ""
        network = self._runner.network
        reasons = (processes.lost for processes in (network.ranks, network.earlier) if processes)
        return next(filter(None, reasons), "")

    def submit(self, plan: SchedulerOutput) -> RunningStep | SchedulerOutput:
        """Begin a step and its moves; see `ModelRunner.begin`. The handle of a plan that has only
        moves is the plan."""
        runner = self._ready()
        with self._inference():
            if self._mover is not None:
                self._mover.begin(plan)
            if not plan.slots:
                return plan
            if self._team is not None:
                self._team.begin_step()
            return runner.begin(plan)

    def result(self, handle: object) -> ModelRunnerOutput:
        """Wait for a step; see `ModelRunner.finish`."""
        runner = self._ready()
        if isinstance(handle, SchedulerOutput):
            with self._inference():
                moved = None if self._mover is None else self._mover.wait(handle.step)
            if self.lost:
                raise GroupLost("tensor_parallel_size", self.lost)
            return ModelRunnerOutput(handle.step, [], moved=moved)
        assert isinstance(handle, RunningStep)
        with self._inference():
            output = runner.finish(handle)
            if self._mover is not None:
                output.moved = self._mover.take(handle.plan.step)
        if self._device.type != "cpu" and self.lost:  # kernels ended without the other processes
            raise GroupLost("tensor_parallel_size", self.lost)
        if self._graphs is not None:
            output.graphs = self._graphs.changes()
        if self._team is not None:
            output.threads = self._team.changes()
        return output

    def give_back(self, blocks: Sequence[int]) -> int:
        network = self._ready().network
        for processes in (network.ranks, network.earlier):
            if processes is not None:
                with suppress(GroupLost):  # the next step reports it
                    processes.send(GiveBack(list(blocks)))
        return self._give_back(network.kv.storages, blocks)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        network = self._ready().network
        assert network.adapters is not None
        with self._inference():
            network.adapters.load(slot, adapter)
        for processes in (network.ranks, network.earlier):
            if processes is not None:
                processes.ask(LoadAdapter(slot, adapter))

    def prepare_grammars(self) -> None:
        if self._grammars is not None:
            self._grammars.prepare()

    def build_grammar(self, constraint: Constraint) -> Future[object]:
        if self._grammars is None:
            raise ParamError("structured", "this engine has no grammars")
        return self._grammars.begin(constraint)

    def idle_step(self) -> bool:
        self._ready()
        with self._inference():
            remains = any(work.idle_step() for work in self._idle_work)
        if self._stages is not None and self._stages_prepare:
            self._stages_prepare = False
            with suppress(GroupLost):  # see `lost`
                self._stages_prepare = self._stages.idle_step()
        return remains or self._stages_prepare

    def read(self, plan: SchedulerOutput) -> Tensor:
        """See `ModelRunner.read`."""
        runner = self._ready()
        if self._caches is not None:
            self._caches.all_scored = True
        with self._inference():
            return runner.read(plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits of rows that `read` returned: [rows, hidden] -> [rows, vocab] fp32."""
        runner = self._ready()
        with self._inference():
            return runner.network.logits(hidden)

    def enter(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the model's input of tokens [rows] at positions [rows]: [rows, hidden]."""
        runner = self._ready()
        with self._inference():
            return runner.network.enter(ids, positions)

    def _ready(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the worker is closed")
        self._set_threads()
        return self._runner

    def _set_threads(self) -> None:
        """Set torch's number of threads before every step, because another engine of this process
        may have changed it."""
        if self._threads is not None and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def stop(self) -> None:
        """Free weights and cache; safe to call twice."""
        if self._mover is not None:
            with on_device(self._device):
                self._mover.close()
            self._mover = None
        if self._stages is not None:
            self._stages.stop()
        if self._runner is not None and self._runner.network.ranks is not None:
            self._runner.network.ranks.stop()
        self._runner = self._team = None
        self._idle_work = ()
        # A GPU that failed has no memory to release.
        with suppress(RuntimeError), on_device(self._device):
            self._release_freed()  # the next engine of this process plans with the free memory


def _request_table(config: ResolvedConfig, sizes: StepSizes) -> RequestTable:
    model, groups = config.model, config.cache.groups
    return RequestTable(
        config.scheduler.max_num_seqs,
        config.scheduler.max_model_len,
        len(groups),
        config.cache.block_size,
        states=bool(model.states),
        covered=config.state_rows if sizes.logs else 0,
        type_stride=model.type_stride if model.token_types > 1 else 0,
        shares=[group.shares for group in groups],
        budgeted=[i for i, group in enumerate(groups) if group.budgeted],
        adapters=sizes.adapters,
    )


def page_mover(
    config: ResolvedConfig,
    network: EngineNetwork,
    setup: RankSetup | None,
    token: bytes,
    covered: np.ndarray,
    *,
    replays: bool,
    computed: ComputedPages | None,
) -> PageMover:
    """Make the page mover for the tiers of an engine.

    Args:
        covered: [rows of states], tokens that each state covers.

    Raises:
        ConfigError: a tier cannot be used.
    """
    tiers, runner = config.cache.tiers, config.runner
    assert tiers is not None
    pages = own_pages(config, network, setup, covered)
    assert tuple(group_pages.num_bytes for group_pages in pages) == tiers.page_bytes
    folder: PageFolder | None = None
    fingerprint = b""
    if runner.kv_folder is not None or token:
        fingerprint = cache_fingerprint(config)
    if runner.kv_folder is not None:
        if replays:
            folder = ReplayTier(runner.kv_folder, fingerprint, tiers.disk)
        else:
            folder = DiskTier(runner.kv_folder, fingerprint, tiers.disk)
    receivers = [group for group in (network.ranks, network.earlier) if group is not None]
    peers: Peers | None = None
    page_server = None
    if computed is not None:
        folder, peers = (folder, computed) if tiers.peers else (computed, None)
    if token:
        from kvik.worker.peer_tier import PeerPages, page_server_at  # few engines exchange pages

        peers = PeerPages(token, fingerprint) if tiers.peers else None
        if runner.kv_listen is not None:
            page_server = partial(page_server_at, runner.kv_listen, token, fingerprint)
    parts = TierParts(tiers.memory, folder, peers, page_server, at_once=replays)
    if receivers:
        count = max(1, len(runner.stages)) * runner.ranks
        processes = [number for number in range(count) if number != count - runner.ranks]
        return StagedPageMover(pages, parts, partial(ProcessCopies, pages, receivers, processes))
    if runner.device != "cpu":
        return StagedPageMover(pages, parts, partial(StreamCopies, pages))
    return PageMover(pages, parts)


def cache_fingerprint(config: ResolvedConfig) -> bytes:
    """Return a digest of everything that keys and values depend on except tokens: the weights, the
    model's layers and their formats, the kernels, and the layout of a block, but not the number of
    blocks.

    Raises:
        ModelError: a file of the model cannot be read.
    """
    model, runner, cache = config.model, config.runner, config.cache
    weights = fingerprints(config)
    if model.built is not None:
        weights = read_manifest(Path(runner.model_path)).seal
    dynamic = any(rope.kind == "dynamic" for rope in model.ropes)
    facts = (
        (VERSION, __version__, torch.__version__, weights, runner.load_format),
        runner.seed if runner.load_format == "random" else 0,
        runner.ranks if runner.fast_cut else 1,
        (runner.dtype, runner.quantization, runner.kernels, runner.attention_backend),
        (detect().native_isa, sys.byteorder),
        () if runner.device == "cpu" else torch.cuda.get_device_capability(runner.device),
        (model.architecture, model.layers, cache.groups, cache.block_size),
        config.scheduler.max_model_len if dynamic else 0,
        *_head_facts(config),  # without a head, pages on disks stay valid
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=FINGERPRINT_BYTES).digest()


def _head_facts(config: ResolvedConfig) -> tuple[object, ...]:
    """Return what the keys and values of an EAGLE-3 head depend on, which pages hold, too."""
    if config.speculation is None or not config.speculation.paged:
        return ()
    source, stored = config.speculation.source, config.runner.load_format == "safetensors"
    assert source.spec is not None
    weights = digest_of(Path(source.path)) if stored else ""
    return weights, source.spec.wiring, source.spec.layers, source.taps


def step_participants(
    network: EngineNetwork,
    table: RequestTable,
    sampling: SamplingTable,
    device: torch.device,
    copies: Copies,
    speculator: Speculator | None,
) -> list[Participant[Any]]:
    """Return the participants of each step, in order: drafts are made after the tokens before them
    are known."""
    participants: list[Participant[Any]] = [
        PromptLogprobs(network, table, copies),
        Pooling(network, copies),
        OutputTokens(network, table, sampling, device, copies, speculator),
    ]
    return participants if speculator is None else [*participants, speculator]


def best_copies(device: torch.device) -> Copies:
    """Return the best copies for a device. On a CPU, asynchronous copies gain nothing."""
    return AtOnce() if device.type == "cpu" else PinnedCopies()
