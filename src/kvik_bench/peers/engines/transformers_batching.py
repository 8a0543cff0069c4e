"""transformers, its continuous batching: the manager that `generate_batch` drives, streaming.

Options: those of transformers.py, and `batching`, fields of `ContinuousBatchingConfig`.
"""

from __future__ import annotations

from math import ceil

from .protocol import Answer, Clock, EngineFailure, Job, Prompts, measure
from .transformers import load_model

PAGE = 256  # tokens of a cache block; its default
PATIENCE = 1.0  # seconds to wait for a result before checking that the manager still runs


class TransformersBatching:
    def __init__(self, job: Job) -> None:
        import transformers
        from transformers import ContinuousBatchingConfig

        self.name = f"transformers {transformers.__version__}"
        model = load_model(job)
        wishes = {
            "allow_block_sharing": False,
            # As many as the rows need; by default it takes a minute to clear most of the memory.
            "num_blocks": job.max_batch * ceil(job.max_len / PAGE) + 1,
            "page_size": PAGE,
            "max_batch_tokens": job.max_batch * job.max_len,
            "max_requests_per_batch": job.max_batch,
            **job.options.get("batching", {}),
        }
        self._manager = model.init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(**wishes)
        )
        self._manager.start()

    def generate(self, prompts: Prompts, output: int, clock: Clock) -> None:
        rows = {
            self._manager.add_request(prompt, max_new_tokens=output, streaming=True): row
            for row, prompt in enumerate(prompts)
        }
        running = set(rows)
        while running:
            result = self._manager.get_result(timeout=PATIENCE)
            if result is None:
                if not self._manager.is_running():
                    raise EngineFailure("its continuous batching ended by itself")
                continue
            if result.error is not None:
                raise EngineFailure(f"its continuous batching failed: {result.error}")
            row = rows[result.request_id]
            clock.tokens(row, result.generated_tokens[len(clock.rows[row]) :])
            if result.is_finished():
                running.remove(result.request_id)

    def stop(self) -> None:
        """End the manager's thread, which would keep the process alive."""
        self._manager.stop(block=True, hard_stop=True)


def run(job: Job) -> Answer:
    engine = TransformersBatching(job)
    try:
        return measure(engine, job)
    finally:
        engine.stop()
