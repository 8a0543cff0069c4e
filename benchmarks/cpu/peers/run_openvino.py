"""OpenVINO GenAI, its pipeline with continuous batching.

Options: `properties` of the device, such as INFERENCE_PRECISION_HINT, and `scheduler`, fields of
`SchedulerConfig`.
"""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai as genai
from adapter import Clock, Job, measure


class OpenVINO:
    def __init__(self, job: Job) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = job.max_batch
        scheduler.max_num_batched_tokens = job.max_batch * job.max_len  # a prompt in one step
        for name, value in job.options.get("scheduler", {}).items():
            setattr(scheduler, name, value)
        properties = {"INFERENCE_NUM_THREADS": job.threads, **job.options.get("properties", {})}
        self._pipeline = genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)
        self._requests = 0

    def generate(self, prompts: list[list[int]], output: int, clock: Clock) -> None:
        config = genai.GenerationConfig(max_new_tokens=output, ignore_eos=True, do_sample=False)
        handles = []
        for prompt in prompts:
            ids = openvino.Tensor(np.array([prompt], np.int64))
            handles.append(self._pipeline.add_request(self._requests, ids, config))
            self._requests += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for row, handle in enumerate(handles):
                while handle.can_read():
                    for made in handle.read().values():
                        clock.tokens(row, len(made.generated_ids))


if __name__ == "__main__":
    measure(OpenVINO)
