"""Capture and replay on a CPU: a forward as one sequence of native calls."""

from __future__ import annotations

from kvik.attention.layout import StepLayout
from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.recording import Recording
from kvik.worker.graphs import EngineNetwork, Graph, StepOutput
from kvik.worker.group import OtherRanks, RunStep
from kvik.worker.input_batch import StepTensors
from kvik.worker.step_inputs import PARTS, FixedInputs


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
        layouts = tuple(
            StepLayout(
                query_start_loc=inputs.full("query_start_loc"),
                seq_lens=inputs.full("seq_lens"),
                block_table=inputs.full(f"block_table {group}"),
                slot_mapping=inputs.full(f"slot_mapping {group}"),
                num_scheduled=(),  # known only in a replay
                contexts=(),
                block_size=block_size,
                tree=inputs.full("tree") if sizes.trees else None,
                state_rows=inputs.full("state_rows"),
                state_pending=inputs.full("state_pending") if sizes.logs else None,
                state_drafts=inputs.full("state_drafts") if sizes.logs else None,
                first_keys=inputs.full(f"first_keys {group}") if of.budgeted else None,
                adapters=inputs.full("adapters") if sizes.adapters else None,
            )
            for group, of in enumerate(network.groups)
        )
        with native.record({sizes.tokens: 0, sizes.seqs: 1, sizes.samples: 2}) as recording:
            output = network.forward(
                StepTensors(
                    inputs.full("input_ids"),
                    inputs.full("positions"),
                    layouts,
                    inputs.full("logits_indices"),
                    inputs.entered(sizes.tokens),
                )
            )
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
