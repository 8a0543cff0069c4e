"""OpenVINO GenAI, its pipeline with continuous batching. The model is a converted folder.

Options: `properties` of the device, such as INFERENCE_PRECISION_HINT, and `scheduler`, fields of
`SchedulerConfig`.
"""

from __future__ import annotations

from .protocol import Answer, Clock, Job, Prompts, measure


class OpenVINO:
    def __init__(self, job: Job) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        wishes = {
            "enable_prefix_caching": False,
            "max_num_seqs": job.max_batch,
            "max_num_batched_tokens": job.max_batch * job.max_len,  # a prompt in one step
            **job.options.get("scheduler", {}),
        }
        for name, value in wishes.items():
            setattr(scheduler, name, value)
        properties = {"INFERENCE_NUM_THREADS": job.threads, **job.options.get("properties", {})}
        version, _, _ = genai.__version__.partition("-")
        self.name = f"openvino-genai {version}"
        self._pipeline = genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)
        self._requests = 0

    def generate(self, prompts: Prompts, output: int, clock: Clock) -> None:
        import numpy as np
        import openvino
        import openvino_genai as genai

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
                        clock.tokens(row, made.generated_ids)


def run(job: Job) -> Answer:
    return measure(OpenVINO(job), job)
