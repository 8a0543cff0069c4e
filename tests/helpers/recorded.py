"""A recording of a small, busy engine with all kinds of events that a server may see."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from kvik.config.config import EngineConfig
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, FinishReason, Pin
from kvik.engine.recorder import MAGIC, Event, FrameWriter, Header, encode
from kvik.engine.stats import EngineStats
from kvik.launch import resolve_config, start


def record_flight(
    path: Path,
    *,
    requests: int = 24,
    seed: int = 0,
    lose: Callable[[], None] | None = None,
    **config: Any,
) -> EngineStats:
    """Record an engine with random requests of several kinds and too few blocks for them.

    Args:
        lose: called after half of the requests to lose a process of the engine, which ends the
            recording.
    """
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 128}
    wishes = {"device": "cpu", "threads": 1, "num_blocks": 12, **sizes, **config}
    rng = random.Random(seed)
    shared = [rng.randrange(5, 200) for _ in range(40)]
    unsent = [_request(i, rng, shared) for i in range(requests)]
    kinds = {request.request_id: request.pooling for request in unsent}
    serving: set[str] = set()
    with closing(start(resolve_config(EngineConfig(**wishes)), record=path).loop) as loop:
        while (unsent or loop.has_work) and not loop.lost:
            if lose is not None and serving and len(unsent) < requests / 2:
                lose()
                lose = None
            for _ in range(rng.choice((0, 0, 1, 3))):
                if unsent:
                    request = unsent.pop()
                    loop.add(request)
                    serving.add(request.request_id)
            if serving and rng.random() < 0.05:
                loop.end(rng.choice(sorted(serving)))
            for delta in loop.poll():
                assert delta.error is None or delta.resendable
                if delta.finish_reason is not None and not delta.resendable:
                    serving.discard(delta.request_id)
                    computed = delta.finish_reason is FinishReason.STOP
                    pooled = kinds[delta.request_id] is not None
                    assert (delta.embedding is not None) == (pooled and computed)
        return loop.stats()


def written(header: Header, events: list[Event]) -> bytes:
    """Return the bytes of a recording of these events."""
    frames = FrameWriter()
    return MAGIC + b"".join(frames.frame(encode(event)) for event in [header, *events])


def _request(i: int, rng: random.Random, shared: list[int]) -> EngineRequest:
    prompt = shared[: rng.randrange(41)] + [rng.randrange(5, 200) for _ in range(1 + i % 30)]
    params = SamplingParams(
        n=rng.choice((1, 1, 1, 2)),
        temperature=rng.choice((0.0, 0.8, 1.0)),
        max_tokens=rng.randrange(10, 60),
        seed=rng.choice((None, None, 7)),
        logprobs=rng.choice((None, None, 1)),
        repetition_penalty=rng.choice((1.0, 1.1)),
    )
    pooling = rng.choice((None, None, None, "mean", "last")) if params.n == 1 else None
    return EngineRequest(
        f"r{i}",
        prompt,
        params,
        priority=i % 3,
        cache_salt="ab"[i % 2],
        tenant=("", "one", "another")[i % 3],
        deadline=time.monotonic() + 0.05 if i % 8 == 0 else None,
        pins=(Pin(16, 0.1),) if i % 5 == 0 else (),
        pooling=pooling,
    )
