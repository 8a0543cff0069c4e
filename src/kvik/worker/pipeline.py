"""Steps of a model whose layers are divided among stages (Huang et al. 2019, GPipe, section 2.3).

The engine's process is the last stage. It plans, hands the inputs of a step to the earlier stages,
and computes its own layers after theirs, while they compute later steps. So a step's inputs are
prepared when it is begun, and its forward here runs when its tokens are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvik.core.plan import SchedulerOutput
from kvik.worker.graphs import EngineNetwork, Graph, StepOutput
from kvik.worker.group import CutKeys, EarlierStages, SentStep
from kvik.worker.input_batch import InputBatch, put_step
from kvik.worker.step_inputs import StepInputs, packed

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


class StageSteps:
    """The forwards of a stage, over inputs given by name."""

    def __init__(
        self, network: EngineNetwork, graph: Graph, inputs: StepInputs, block_size: int
    ) -> None:
        self._graph, self._inputs = graph, inputs
        self._num_groups, self._block_size = len(network.groups), block_size

    def run(self, arrays: Arrays, entered: bytes) -> StepOutput:
        """Run a step.

        Args:
            entered: results of the stage before; see `EnteredStates.put`; b"" in the first stage.
        """
        self._graph.prepare()
        if self._inputs.states is not None:
            self._inputs.states.put(entered)
        return self._graph.forward(
            put_step(arrays, self._inputs, self._num_groups, self._block_size)
        )

    def idle_step(self) -> bool:
        """See `Graph.idle_step`."""
        return self._graph.idle_step()


class Pipeline(Graph):
    """The last stage, which hands steps to the earlier ones."""

    def __init__(self, steps: StageSteps, stages: EarlierStages) -> None:
        self.inputs = CollectedInputs()
        self._steps, self._stages = steps, stages
        self._begun: deque[Arrays] = deque()  # steps whose forward has not run here yet

    def idle_step(self) -> bool:
        return self._steps.idle_step()

    def begin(self, plan: SchedulerOutput, cuts: Sequence[CutKeys]) -> None:
        """Hand the step whose inputs were just put to the other stages.

        Raises:
            GroupLost: one of them is gone.
        """
        arrays = self.inputs.take()
        step = SentStep(packed(arrays), list(cuts), plan.block_copies, plan.state_copies)
        self._stages.send(step)
        self._begun.append(arrays)

    def run(self, batch: InputBatch) -> StepOutput:
        """Run the oldest step that was begun, which must be the one of the batch.

        Raises:
            GroupLost: a stage is gone.
        """
        try:
            entered = self._stages.entered()
            return self._steps.run(self._begun.popleft(), entered)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: it is unknown which step comes next
            self._stages.give_up("a step of all stages was interrupted in the last stage")
            raise
