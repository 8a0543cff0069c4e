"""A GPU worker without a GPU: Triton's platform on CPU tensors, with simulated graph capture, and
results that arrive late, as on an asynchronous device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvik.attention.triton import TritonAttention
from kvik.config.config import ResolvedConfig
from kvik.config.graph_sizes import decoding_sizes, drafting_sizes
from kvik.worker import platforms
from kvik.worker.captures import NO_CAPTURE_PEERS, Captured, CapturePeers
from kvik.worker.step_inputs import Arrival
from kvik.worker.worker import Worker


class CalledAgain:
    """Replaces `CudaCapturer`."""

    def __init__(self, device: torch.device) -> None:
        pass

    def capture(self, call: Callable[[], None], peers: CapturePeers = NO_CAPTURE_PEERS) -> Captured:
        call()
        return Captured(call, 0, 0)


class LateCopies:
    """Replaces `PinnedCopies`."""

    depth = 2

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        copies = [tensor.clone() for tensor in tensors]
        return lambda: [copy.numpy() for copy in copies]


def rehearsed_worker(resolved: ResolvedConfig) -> Worker:
    """Return the worker. resolved: for a CPU, with torch's kernels; no user option gives this
    combination."""
    everywhere = frozenset({"cpu", "cuda"})
    TritonAttention.caps = replace(TritonAttention.caps, devices=everywhere)
    platforms.CudaCapturer = CalledAgain
    seqs, speculation = resolved.scheduler.max_num_seqs, resolved.speculation
    sizes = decoding_sizes(seqs)
    if speculation is not None:
        drafts = speculation.num_draft_tokens, speculation.max_draft_rows
        sizes += drafting_sizes(seqs, *drafts, tree=speculation.trees)
    runner = replace(
        resolved.runner,
        kernels="triton",
        attention_backend="triton",
        graph_sizes=sizes,
        graph_memory=1 << 30,  # these graphs take only the memory of their outputs
    )
    return Worker(replace(resolved, runner=runner), copies=LateCopies())
