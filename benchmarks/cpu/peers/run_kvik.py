"""kvik through `kvik.LLM`. Options: any field of `EngineConfig`, such as quantization = "int8"."""

from __future__ import annotations

from adapter import Clock, Job, measure

from kvik import LLM, SamplingParams, TextDelta


class Kvik:
    def __init__(self, job: Job) -> None:
        self._llm = LLM(
            job.model,
            threads=job.threads,
            max_model_len=job.max_len,
            max_num_seqs=job.max_batch,
            enable_prefix_caching=False,
            **job.options,
        )

    def generate(self, prompts: list[list[int]], output: int, clock: Clock) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        streams = [self._llm.stream(prompt, params) for prompt in prompts]
        for oldest, leader in enumerate(streams):  # the oldest gets a token in every step
            for delta in leader:
                count(clock, oldest, delta)
                for row, stream in enumerate(streams):
                    while stream.pending:
                        count(clock, row, next(stream))


def count(clock: Clock, row: int, delta: TextDelta) -> None:
    if delta.error is not None:
        raise SystemExit(f"row {row}: {delta.error}")
    clock.tokens(row, len(delta.token_ids))


if __name__ == "__main__":
    measure(Kvik)
