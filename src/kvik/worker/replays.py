"""Forwards that are recorded once and replayed: a tape on a CPU, graphs of several sizes on a GPU.

On a CPU one recording of native calls serves steps of every size.

A decoding step on a GPU consists of hundreds of short kernels, and Python takes longer to launch
them than they run. A captured forward pass launches them together. It has one size (`GraphSize`),
so a step replays one that is at least as large, padded with requests that have no keys and tokens
that are not stored. With drafts, requests have different numbers of tokens: these are contiguous,
as in any step, and attention reads on the device where each request begins. After them may come
tokens of no request, for which attention writes nothing: the layers process whatever was in memory,
which affects no other row, and the result is ignored. Chunks of prompts run eagerly, because their
kernels are longer. `Captures` decides which sizes are captured when.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvik.attention.layout import StepLayout
from kvik.config.graph_sizes import GraphSize
from kvik.worker.captures import NO_CAPTURE_PEERS, CapturePeers, Captures, CudaCapturer, GraphMemory
from kvik.worker.graphs import Eager, EngineNetwork, Graph, StepOutput, zero_rows
from kvik.worker.group import OtherRanks, RunStep
from kvik.worker.input_batch import StepTensors
from kvik.worker.step_inputs import PARTS, DeviceInputs, FixedInputs, StepSizes

if TYPE_CHECKING:
    from kvik.kernels.cpu.native import Native
    from kvik.kernels.cpu.recording import Recording


def _fixed_step(
    network: EngineNetwork,
    sizes: StepSizes,
    take: Callable[[str], Tensor],
    entered: Sequence[Tensor],
    block_size: int,
    num_scheduled: tuple[int, ...] = (),
    contexts: tuple[int, ...] = (),
) -> StepTensors:
    """Return the inputs of a step in memory that every replay reads.

    Args:
        sizes: of the step.
        take: returns the memory of an input by its name.
        num_scheduled, contexts: (): kernels read both in each replay.
    """
    layouts = tuple(
        StepLayout(
            query_start_loc=take("query_start_loc"),
            seq_lens=take("seq_lens"),
            block_table=take(f"block_table {group}"),
            slot_mapping=take(f"slot_mapping {group}"),
            num_scheduled=num_scheduled,
            contexts=contexts,
            block_size=block_size,
            tree=take("tree") if sizes.trees else None,
            state_rows=take("state_rows"),
            state_pending=take("state_pending") if sizes.logs else None,
            state_drafts=take("state_drafts") if sizes.logs else None,
            first_keys=take(f"first_keys {group}") if of.budgeted else None,
            adapters=take("adapters") if sizes.adapters else None,
        )
        for group, of in enumerate(network.groups)
    )
    return StepTensors(
        take("input_ids"),
        take("positions"),
        layouts,
        take("logits_indices"),
        entered,
    )


class CpuTape(Graph):
    """A forward of the largest step as one sequence of native calls, for steps of every size."""

    def __init__(
        self,
        native: Native,
        recording: Recording,
        output: StepOutput,
        network: EngineNetwork,
        inputs: FixedInputs,
    ) -> None:
        """
        Args:
            network, inputs: what the recording points into; kept alive with it.
        """
        self.native = native
        self.recording = recording
        self.output = output
        self.network = network
        self.inputs = inputs
        # The other processes of a group, in which this one starts each step; None: there are none,
        # or this process does not direct them.
        self.ranks: OtherRanks | None = None
        self._has_trees = False  # the inputs have trees of drafts
        # Views of the output by (tokens, samples): most steps have the size of a recent one.
        self._parts: dict[tuple[int, int], StepOutput] = {}

    @staticmethod
    def capture(
        native: Native, network: EngineNetwork, inputs: FixedInputs, block_size: int
    ) -> CpuTape:
        """Record the network's forward over `inputs`.

        Raises:
            CaptureError: the model uses an operation that has no native kernel.
        """
        sizes = inputs.sizes
        entered = inputs.entered(sizes.tokens)
        step = _fixed_step(network, sizes, inputs.full, entered, block_size)
        with native.record({sizes.tokens: 0, sizes.seqs: 1, sizes.samples: 2}) as recording:
            output = network.forward(step)
        return CpuTape(native, recording, output, network, inputs)

    def forward(self, step: StepTensors) -> StepOutput:
        """Run a step, whose inputs are in the recorded memory.

        Raises:
            GroupLost: one of the other processes is gone.
        """
        tokens, samples = step.input_ids.shape[0], step.logits_indices.shape[0]
        layout = step.layouts[0]
        if self.inputs.sizes.trees:
            has_trees = layout.tree is not None
            if self._has_trees and not has_trees:
                self.inputs.full("tree").zero_()
            self._has_trees = has_trees
        size = tokens, len(layout.num_scheduled), samples
        if self.ranks is None:
            self.native.replay(self.recording, size)
        else:
            with self.ranks.jointly(RunStep(*size, self.network.drafts)):
                self.native.replay(self.recording, size)
        part = self._parts.get((tokens, samples))
        if part is None:
            if len(self._parts) == PARTS:
                self._parts.clear()
            part = self.output.first(tokens, samples)
            self._parts[tokens, samples] = part
        return part


class DecodeGraphs(Graph):
    def __init__(
        self,
        network: EngineNetwork,
        inputs: DeviceInputs,
        capturer: CudaCapturer,
        sizes: Sequence[GraphSize],
        block_size: int,
        max_context: int,
        clock: Callable[[], float],
        memory: GraphMemory,
        peers: CapturePeers = NO_CAPTURE_PEERS,
    ) -> None:
        """
        Args:
            inputs: memory of the batches, padded to the largest size.
            sizes: sizes that may be captured.
            max_context: most keys of a request.
            memory, peers: see `Captures`.
        """
        self.network = network
        self.inputs = inputs
        ordered = sorted(sizes, key=lambda size: (size.tokens, size.longest, size.rows))
        self._captures = Captures(capturer, ordered, self._laid_out, clock, memory, peers)
        self._memory = memory
        self._most_tokens = max(size.tokens for size in sizes)
        self._most_samples = max(size.samples for size in sizes)
        self._block_size = block_size
        self._max_context = max_context
        self._eager = Eager(network)
        self._output: StepOutput | None = None  # of every size, in the first rows

    @property
    def captured(self) -> Mapping[GraphSize, Callable[[], None]]:
        return self._captures.captured

    def prepare(self) -> None:
        """Capture a size if it is due; may overwrite the inputs."""
        self._captures.prepare()

    def idle_step(self) -> bool:
        return self._captures.idle_step()

    def capture(self, number: int) -> None:
        """Capture the size of this number, as the first process of the group does.

        Raises:
            Exception: a call or a replay failed.
        """
        self._captures.capture(self._captures.sizes[number])

    def forward(self, step: StepTensors) -> StepOutput:
        """Run the forward of a step, whose inputs are in `inputs`. All processes of a group choose
        the same size, because they have captured the same ones."""
        tokens, samples, output = len(step.input_ids), len(step.logits_indices), self._output
        replay = self._replay_of(step.layouts[0], tokens, samples)
        if replay is None or output is None:
            return self._eager.forward(step)
        replay()
        return output.first(tokens, samples)

    def _replay_of(
        self, layout: StepLayout, tokens: int, samples: int
    ) -> Callable[[], None] | None:
        """Return the replay of a captured size that fits a step; None: there is none."""
        if tokens > self._most_tokens:
            return None
        rows, tree = len(layout.num_scheduled), layout.tree is not None
        longest = 1 if tokens == rows else max(layout.num_scheduled)
        sizes = self._captures.sizes
        sizes = sizes[bisect_left(sizes, tokens, key=lambda size: size.tokens) :]
        fitting = (size for size in sizes if size.serves(rows, tokens, longest, samples, tree=tree))
        return self._captures.replay_of(fitting, lambda size: size.tokens)

    def _laid_out(self, size: GraphSize) -> Callable[[], None]:
        """Return the forward pass of a step that consists of padding."""
        self.inputs.clear()
        return lambda: self._forward(size)

    def _forward(self, size: GraphSize) -> None:
        """Run a step of this size and write its output to `_output`. The layouts give the most
        tokens and keys of a request; the actual numbers are read on the device."""
        inputs = self.inputs
        sizes = replace(
            inputs.sizes,
            tokens=size.tokens,
            seqs=size.rows,
            samples=size.samples,
            trees=size.tree,
        )
        counts = sizes.inputs(len(inputs.groups))
        step = _fixed_step(
            self.network,
            sizes,
            lambda name: inputs.padded(name, counts.get(name, size.rows)),
            inputs.entered(size.tokens),
            self._block_size,
            num_scheduled=(size.longest,) * size.rows,
            contexts=(self._max_context,) * size.rows,
        )
        output = self.network.forward(step)
        if self._output is None:  # one for all sizes: it is read before the next step
            tokens, samples = self._most_tokens, self._most_samples
            self._output = StepOutput(
                zero_rows(tokens, output.hidden),
                zero_rows(samples, output.logits),
                zero_rows(samples, output.top),
                zero_rows(samples, output.top_ids),
                tuple(zero_rows(tokens, states) for states in output.onward),
            )
            self._memory.share(sum(tensor.nbytes for tensor in self._output.tensors))
        for buffer, part in zip(self._output.tensors, output.tensors, strict=True):
            buffer[: len(part)].copy_(part)
