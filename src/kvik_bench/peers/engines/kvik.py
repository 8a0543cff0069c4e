"""kvik through `kvik.LLM`. Options: any field of `EngineConfig`, such as quantization = "int8"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .protocol import Answer, Clock, EngineFailure, Job, Prompts, measure

if TYPE_CHECKING:
    from kvik.engine.output import TextDelta


class Kvik:
    def __init__(self, job: Job) -> None:
        from kvik import LLM, __version__

        wishes = {"device": "cpu", "enable_prefix_caching": False, **job.options}
        self.name = f"kvik {__version__}"
        self._llm = LLM(
            job.model,
            threads=job.threads,
            max_model_len=job.max_len,
            max_num_seqs=job.max_batch,
            **wishes,
        )

    def generate(self, prompts: Prompts, output: int, clock: Clock) -> None:
        from kvik import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        streams = [self._llm.stream(prompt, params) for prompt in prompts]
        for oldest, leader in enumerate(streams):  # the oldest stream gets a token in every step
            for delta in leader:
                count(clock, oldest, delta)
                for row, stream in enumerate(streams):
                    while stream.pending:
                        count(clock, row, next(stream))


def count(clock: Clock, row: int, delta: TextDelta) -> None:
    if delta.error is not None:
        raise EngineFailure(f"row {row}: {delta.error}")
    clock.tokens(row, delta.token_ids)


def run(job: Job) -> Answer:
    return measure(Kvik(job), job)
