"""Capture and replay on a CPU: a forward as one sequence of native calls."""

from __future__ import annotations

from kvik.attention.base import StepLayout
from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.recording import Recording
from kvik.worker.graphs import EngineNetwork, StepOutput
from kvik.worker.group import Others, RunStep
from kvik.worker.input_batch import InputBatch
from kvik.worker.step_inputs import PARTS, FixedInputs


class CpuTape:
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
        self._planted = False  # the inputs have trees of drafts
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
        layouts = [
            StepLayout(
                query_start_loc=inputs.whole("query_start_loc"),
                seq_lens=inputs.whole("seq_lens"),
                block_table=inputs.whole(f"block_table {group}"),
                slot_mapping=inputs.whole(f"slot_mapping {group}"),
                num_scheduled=(),  # known only in a replay
                contexts=(),
                block_size=block_size,
                tree=inputs.whole("tree") if inputs.sizes.trees else None,
                state_rows=inputs.whole("state_rows"),
                first_keys=inputs.whole(f"first_keys {group}") if of.budgeted else None,
            )
            for group, of in enumerate(network.groups)
        ]
        with native.record({sizes.tokens: 0, sizes.seqs: 1, sizes.samples: 2}) as recording:
            output = network.forward(
                inputs.whole("input_ids"),
                inputs.whole("positions"),
                layouts,
                inputs.whole("logits_indices"),
                inputs.entered,
            )
        return CpuTape(native, recording, output, network, inputs)

    def prepare(self) -> None:
        pass

    def rest(self) -> bool:
        return False

    def run(self, batch: InputBatch) -> StepOutput:
        """Run a step. The batch must be in the recorded inputs."""
        return self.replay(*_size(batch))

    def replay(self, step: RunStep, planted: bool) -> StepOutput:
        """Run a step whose inputs are in the recorded memory.

        Args:
            planted: it has trees of drafts.
        """
        tokens, samples = step.tokens, step.samples
        self.plant(planted)
        self.native.replay(self.recording, (tokens, step.seqs, samples))
        part = self._parts.get((tokens, samples))
        return self._cut(tokens, samples) if part is None else part

    def plant(self, planted: bool) -> None:
        """Clear trees that an earlier step left in the inputs, if this step has none."""
        if self.inputs.sizes.trees:
            if self._planted and not planted:
                self.inputs.whole("tree").zero_()
            self._planted = planted

    def _cut(self, tokens: int, samples: int) -> StepOutput:
        if len(self._parts) == PARTS:
            self._parts.clear()
        output = self.output
        part = StepOutput(
            output.hidden[:tokens],
            output.logits[:samples],
            output.top[:samples],
            output.top_ids[:samples],
        )
        self._parts[tokens, samples] = part
        return part


class GroupTape:
    """A recorded forward of the first process, which starts each step in the others too."""

    def __init__(self, tape: CpuTape, others: Others) -> None:
        self._tape, self._others = tape, others

    def prepare(self) -> None:
        self._tape.prepare()

    def rest(self) -> bool:
        return self._tape.rest()

    def run(self, batch: InputBatch) -> StepOutput:
        """
        Raises:
            GroupLost: one of the other processes is gone.
        """
        return self.replay(*_size(batch))

    def replay(self, step: RunStep, planted: bool) -> StepOutput:
        """See `CpuTape.replay`, and `run`."""
        self._tape.plant(planted)
        with self._others.together(step):
            return self._tape.replay(step, planted)


def _size(batch: InputBatch) -> tuple[RunStep, bool]:
    """Return how large a step is, and whether it has trees of drafts."""
    tokens, samples = batch.input_ids.shape[0], batch.logits_indices.shape[0]
    return RunStep(tokens, len(batch.slots), samples), batch.layouts[0].tree is not None
