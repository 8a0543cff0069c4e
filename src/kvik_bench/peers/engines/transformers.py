"""transformers, `model.generate` on a static batch.

Options: dtype ("bfloat16"), attn_implementation ("sdpa"), device ("cpu").
"""

from __future__ import annotations

from typing import Any

from .protocol import Answer, Clock, Job, Prompts, measure


def load_model(job: Job) -> Any:
    """Load the model with the job's options, for greedy decoding that never stops early."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(
        job.model,
        dtype=job.options.get("dtype", "bfloat16"),
        attn_implementation=job.options.get("attn_implementation", "sdpa"),
    )
    # Replaces the model authors' defaults: penalties would change greedy answers too.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    return model.to(job.options.get("device", "cpu")).eval()


class Transformers:
    def __init__(self, job: Job) -> None:
        import transformers

        self.name = f"transformers {transformers.__version__}"
        self._model = load_model(job)

    def generate(self, prompts: Prompts, output: int, clock: Clock) -> None:
        import torch

        rows = len(prompts)
        ids = torch.tensor(prompts, device=self._model.device)  # [rows, prompt]

        def tick(input_ids: Any, scores: Any, **_: Any) -> Any:  # input_ids: [rows, so far]
            for row, token in enumerate(input_ids[:, -1].tolist()):
                clock.tokens(row, [token])
            return torch.zeros(rows, dtype=torch.bool, device=input_ids.device)

        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output,
                stopping_criteria=[tick],
            )


def run(job: Job) -> Answer:
    return measure(Transformers(job), job)
