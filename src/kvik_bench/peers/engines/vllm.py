"""vLLM, its engine stepped in this process. Options: any of `EngineArgs`.

On a CPU give it VLLM_ENABLE_V1_MULTIPROCESSING = "0" and VLLM_CPU_KVCACHE_SPACE (GiB) in `env`.
"""

from __future__ import annotations

from .protocol import Answer, Clock, Job, Prompts, measure


class VLLM:
    def __init__(self, job: Job) -> None:
        import vllm

        wishes = {"enable_prefix_caching": False, **job.options}
        self.name = f"vllm {vllm.__version__}"
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=job.model, max_model_len=job.max_len, max_num_seqs=job.max_batch, **wishes
            )
        )
        self._requests = 0

    def generate(self, prompts: Prompts, output: int, clock: Clock) -> None:
        import vllm

        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        rows = {}
        for row, prompt in enumerate(prompts):
            name = str(self._requests)
            rows[name] = row
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
            self._requests += 1
        while self._engine.has_unfinished_requests():
            for result in self._engine.step():
                row = rows[result.request_id]
                clock.tokens(row, result.outputs[0].token_ids[len(clock.rows[row]) :])


def run(job: Job) -> Answer:
    return measure(VLLM(job), job)
