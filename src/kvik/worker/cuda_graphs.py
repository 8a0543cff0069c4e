"""Decoding steps as replays of forward passes that were captured at several sizes.

A decoding step on a GPU consists of hundreds of short kernels, and Python takes longer to launch
them than they run. A captured forward pass launches them together. It has one size (`GraphSize`),
so a step replays one that is at least as large, padded with requests that have no keys and tokens
that are not stored. With drafts, requests have different numbers of tokens: these are contiguous,
as in any step, and attention reads on the device where each request begins. After them may come
tokens of no request, for which attention writes nothing: the layers process whatever was in memory,
which affects no other row, and the result is ignored. Chunks of prompts run eagerly, because their
kernels are longer.

`Captures` decides which sizes are captured when.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from kvik.attention.layout import StepLayout
from kvik.config.graph_sizes import GraphSize
from kvik.worker.captures import NO_CAPTURE_PEERS, CapturePeers, Capturer, Captures, GraphMemory
from kvik.worker.graphs import Eager, EngineNetwork, Graph, StepOutput, zero_rows
from kvik.worker.input_batch import StepTensors
from kvik.worker.step_inputs import DeviceInputs


class DecodeGraphs(Graph):
    def __init__(
        self,
        network: EngineNetwork,
        inputs: DeviceInputs,
        capturer: Capturer,
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
        inputs, sizes = self.inputs, self.inputs.sizes
        layouts = tuple(
            StepLayout(
                query_start_loc=inputs.padded("query_start_loc", size.rows + 1),
                seq_lens=inputs.padded("seq_lens", size.rows),
                block_table=inputs.padded(f"block_table {group}", size.rows),
                slot_mapping=inputs.padded(f"slot_mapping {group}", size.tokens),
                num_scheduled=(size.longest,) * size.rows,
                contexts=(self._max_context,) * size.rows,
                block_size=self._block_size,
                tree=inputs.padded("tree", size.tokens) if size.tree else None,
                state_rows=inputs.padded("state_rows", size.rows),
                state_pending=inputs.padded("state_pending", size.rows) if sizes.logs else None,
                state_drafts=inputs.padded("state_drafts", size.rows) if sizes.logs else None,
                first_keys=(
                    inputs.padded(f"first_keys {group}", size.rows)
                    if self.network.groups[group].budgeted
                    else None
                ),
                adapters=inputs.padded("adapters", size.tokens) if sizes.adapters else None,
            )
            for group in inputs.groups
        )
        output = self.network.forward(
            StepTensors(
                inputs.padded("input_ids", size.tokens),
                inputs.padded("positions", size.tokens),
                layouts,
                inputs.padded("logits_indices", size.samples),
                inputs.entered(size.tokens),
            )
        )
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
