"""transformers, `model.generate` on a static batch. Options: dtype, attn_implementation."""

from __future__ import annotations

import torch
from adapter import Clock, Job, measure
from transformers import AutoModelForCausalLM


class Transformers:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            job.model,
            dtype=job.options.get("dtype", "bfloat16"),
            attn_implementation=job.options.get("attn_implementation", "sdpa"),
        ).eval()
        self._model.generation_config.eos_token_id = None  # never stop early

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], output: int, clock: Clock) -> None:
        rows = len(prompts)
        ids = torch.tensor(prompts)  # [rows, prompt]

        def tick(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            for row in range(rows):
                clock.tokens(row, 1)
            return torch.zeros(rows, dtype=torch.bool)

        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[tick],
        )


if __name__ == "__main__":
    measure(Transformers)
