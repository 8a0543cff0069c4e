"""transformers on the same shape, with random weights too: Llama-3-8B in bf16.

One request at a time: SDPA, a static cache and a compiled forward pass. Many: its continuous
batching, with kvik's load in models.py, timed from the start of the first request to the end of the
last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from notes import Notes
from place import DEVICE, REHEARSED, sized, synchronize
from shapes import LOAD, SHAPES

CONTEXT, TOKENS = sized((1024, 64), (8, 3))


def compiled(notes: Notes) -> None:
    from transformers import GenerationConfig

    model = _model()
    ids = torch.randint(100, (1, CONTEXT), device=DEVICE)

    def generate(tokens: int) -> float:
        config = GenerationConfig(
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            max_length=None,
            pad_token_id=0,
        )
        synchronize()
        started = time.perf_counter()
        found = model.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
        synchronize()
        if found.shape[1] != CONTEXT + tokens:
            raise RuntimeError(f"{found.shape[1] - CONTEXT} tokens, not {tokens}")
        return time.perf_counter() - started

    started = time.perf_counter()
    # The same length, so that the cache has the size that the forward pass was compiled for.
    for _ in range(2):
        generate(TOKENS)
    notes.fact("transformers compiled in", time.perf_counter() - started)
    whole = min(generate(TOKENS) for _ in range(3))
    with torch.inference_mode():
        model(ids, use_cache=False, logits_to_keep=1)
        synchronize()
        started = time.perf_counter()
        model(ids, use_cache=False, logits_to_keep=1)
        synchronize()
    prefill = time.perf_counter() - started
    moved = 2.0 * sum(
        p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n
    ) + _key_bytes() * (CONTEXT + TOKENS / 2)
    notes.rate(
        "transformers, decode 1 x 1k",
        (whole - prefill) / (TOKENS - 1),
        "read",
        moved=moved,
        prefill=prefill,
    )


def batches(notes: Notes) -> None:
    import transformers
    from transformers import GenerationConfig

    model = _model()
    try:
        generate = model.generate_batch
    except AttributeError:
        version = transformers.__version__
        notes.missed("transformers in batches", f"transformers {version} has no generate_batch")
        return
    requests, prompt, tokens = LOAD
    prompts = [[(13 * i + 7 * j) % 100 for j in range(prompt)] for i in range(requests)]

    def run(prompts: list[list[int]], tokens: int) -> list[Any]:
        config = GenerationConfig(
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=-1,  # none: every answer has its full length
            pad_token_id=0,
            max_length=None,
        )
        with _room() as options:
            found = list(generate(inputs=prompts, generation_config=config, **options).values())
        errors = [one.error for one in found if one.error is not None]
        made = sum(len(one.generated_tokens) for one in found)
        if errors or made != len(prompts) * tokens:
            raise RuntimeError(f"{made} tokens, not {len(prompts) * tokens}: {errors[:1]}")
        return found

    run(prompts[:8], 2)  # libraries are set up
    started = time.perf_counter()
    found = run(prompts, tokens)
    seconds = time.perf_counter() - started
    notes.fact("transformers load", requests * tokens / seconds)  # should the next line fail
    # Excludes the setup before the first request: each call allocates its memory anew.
    lives = [one.lifespan for one in found]
    begun, ended = min(start for start, _ in lives), max(end for _, end in lives)
    if 0 < ended - begun <= seconds:
        notes.fact("transformers load", requests * tokens / (ended - begun))


@contextmanager
def _room() -> Iterator[dict[str, object]]:
    """Yield further arguments of `generate_batch`: none; in a rehearsal, sizes that fit a CPU's
    memory, which it cannot detect without psutil."""
    if not REHEARSED:
        yield {}
        return
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import cache

    found = DEVICE, 1 << 34, 0, 0  # bytes in total, reserved, and allocated
    with mock.patch.object(cache, "get_device_and_memory_breakdown", lambda: found):
        few = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)
        yield {"continuous_batching_config": few}


def _model():
    from transformers import LlamaConfig, LlamaForCausalLM

    known = {k: v for k, v in SHAPES["8b"].items() if k not in ("architectures", "model_type")}
    config = LlamaConfig(**known, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def _key_bytes() -> float:
    shape = SHAPES["8b"]
    layers, heads = int(str(shape["num_hidden_layers"])), int(str(shape["num_key_value_heads"]))
    return 2.0 * 2 * layers * heads * int(str(shape["head_dim"]))
