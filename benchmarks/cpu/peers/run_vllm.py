"""vLLM on a CPU, its engine stepped in this process. Options: any of `EngineArgs`.

Give it VLLM_ENABLE_V1_MULTIPROCESSING = "0" and VLLM_CPU_KVCACHE_SPACE (GiB) in `env`.
"""

from __future__ import annotations

from adapter import Clock, Job, measure
from vllm import EngineArgs, LLMEngine, SamplingParams


class VLLM:
    def __init__(self, job: Job) -> None:
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=job.model,
                max_model_len=job.max_len,
                max_num_seqs=job.max_batch,
                enable_prefix_caching=False,
                **job.options,
            )
        )
        self._requests = 0

    def generate(self, prompts: list[list[int]], output: int, clock: Clock) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        rows, made = {}, [0] * len(prompts)
        for row, prompt in enumerate(prompts):
            name = str(self._requests)
            rows[name] = row
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
            self._requests += 1
        while self._engine.has_unfinished_requests():
            for result in self._engine.step():
                row, total = rows[result.request_id], len(result.outputs[0].token_ids)
                clock.tokens(row, total - made[row])
                made[row] = total


if __name__ == "__main__":
    measure(VLLM)
