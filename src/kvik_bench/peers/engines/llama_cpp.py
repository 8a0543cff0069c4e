"""llama.cpp through llama-cpp-python, its C interface stepped here. The model is a GGUF file.

Options: fields of `llama_context_params`, such as n_ubatch = 512.
"""

from __future__ import annotations

from typing import Any

from .protocol import Answer, Clock, EngineFailure, Job, Prompts, measure


class LlamaCpp:
    def __init__(self, job: Job) -> None:
        import llama_cpp

        llama_cpp.llama_backend_init()
        self.name = f"llama-cpp-python {llama_cpp.__version__}"
        model = llama_cpp.llama_model_load_from_file(
            job.model.encode(), llama_cpp.llama_model_default_params()
        )
        if not model:
            raise EngineFailure(f"llama.cpp cannot load {job.model}")
        context_size = job.max_batch * job.max_len
        wishes = {
            "n_ctx": context_size,
            "n_batch": context_size,
            "n_seq_max": job.max_batch,
            "n_threads": job.threads,
            "n_threads_batch": job.threads,
            **job.options,
        }
        params = llama_cpp.llama_context_default_params()
        for name, value in wishes.items():
            setattr(params, name, value)
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise EngineFailure("llama.cpp cannot make a context of these options")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(context_size, 0, 1)

    def generate(self, prompts: Prompts, output: int, clock: Clock) -> None:
        import llama_cpp

        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        prompt = len(prompts[0])
        last = self._step(prompts, 0)
        for row, token in enumerate(last):
            clock.tokens(row, [token])
        for position in range(prompt, prompt + output - 1):
            last = self._step([[token] for token in last], position)
            for row, token in enumerate(last):
                clock.tokens(row, [token])

    def _step(self, rows: Prompts, position: int) -> list[int]:
        """Compute each row's tokens from `position`; return the likeliest next token of each."""
        import llama_cpp
        import numpy as np

        ends = []
        at = 0
        for row, tokens in enumerate(rows):
            for offset, token in enumerate(tokens):
                self._put(at, token, position + offset, row, last=offset == len(tokens) - 1)
                at += 1
            ends.append(at - 1)
        self._batch.n_tokens = at
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code != 0:
            raise EngineFailure(f"llama_decode failed with {code}")
        best = []
        for end in ends:
            logits: Any = llama_cpp.llama_get_logits_ith(self._context, end)  # [vocabulary]
            best.append(int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax()))
        return best

    def _put(self, at: int, token: int, position: int, row: int, *, last: bool) -> None:
        batch = self._batch
        batch.token[at], batch.pos[at] = token, position
        batch.n_seq_id[at] = 1
        batch.seq_id[at][0] = row
        batch.logits[at] = last


def run(job: Job) -> Answer:
    return measure(LlamaCpp(job), job)
