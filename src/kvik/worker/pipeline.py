"""Steps of a model whose layers are divided among stages (Huang et al. 2019, GPipe, section 2.3).

The engine's process is the last stage. It plans, hands the inputs of a step to the earlier stages,
and computes its own layers after theirs, while they compute later steps. So a step's inputs are
prepared when it is begun, and its forward here runs when its tokens are needed.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from kvik.core.plan import SchedulerOutput
from kvik.worker.graphs import Graph, StepOutput
from kvik.worker.group import EarlierStages, RunStep, SentStep
from kvik.worker.input_batch import InputBatch
from kvik.worker.step_inputs import FixedInputs, StepInputs, packed

Arrays = dict[str, np.ndarray]


class CollectedInputs(StepInputs):
    """Inputs of a step that runs later, when the memory that kernels read is free."""

    fixed = False

    def __init__(self) -> None:
        self._arrays: Arrays = {}

    def put(self, name: str, array: np.ndarray) -> Tensor:
        self._arrays[name] = array
        return torch.from_numpy(array)

    def take(self) -> Arrays:
        """Return the arrays put since the last call."""
        arrays, self._arrays = self._arrays, {}
        return arrays


@runtime_checkable
class Tape(Protocol):
    """A recorded forward."""

    def replay(self, step: RunStep, has_trees: bool) -> StepOutput:
        """Run a step whose inputs are in the recorded memory.

        Args:
            has_trees: it has trees of drafts.
        """
        ...


class StageTape:
    """The recorded forward of a stage, over inputs given by name."""

    def __init__(self, tape: Tape, inputs: FixedInputs) -> None:
        self._tape, self._inputs = tape, inputs

    def run(self, arrays: Arrays, entered: bytes) -> StepOutput:
        """Run a step.

        Args:
            entered: results of the stage before; see `FixedInputs.enter`; b"" in the first stage.
        """
        for name, array in arrays.items():
            self._inputs.put(name, array)
        if entered:
            self._inputs.enter(entered)
        names = ("input_ids", "seq_lens", "logits_indices")
        tokens, seqs, samples = (len(arrays[name]) for name in names)
        return self._tape.replay(RunStep(tokens, seqs, samples), has_trees="tree" in arrays)


class Pipeline(Graph):
    """The last stage, which hands steps to the earlier ones."""

    def __init__(self, tape: StageTape, stages: EarlierStages) -> None:
        self.inputs = CollectedInputs()
        self._tape, self._stages = tape, stages
        self._begun: deque[Arrays] = deque()  # steps whose forward has not run here yet

    def begin(self, plan: SchedulerOutput) -> None:
        """Hand the step whose inputs were just put to the other stages.

        Raises:
            GroupLost: one of them is gone.
        """
        arrays = self.inputs.take()
        self._stages.send(SentStep(packed(arrays), plan.block_copies, plan.state_copies))
        self._begun.append(arrays)

    def run(self, batch: InputBatch) -> StepOutput:
        """Run the oldest step that was begun, which must be the one of the batch.

        Raises:
            GroupLost: a stage is gone.
        """
        try:
            entered = self._stages.entered()
            return self._tape.run(self._begun.popleft(), entered)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: it is unknown which step comes next
            self._stages.give_up("a step of all stages was interrupted in the last stage")
            raise
