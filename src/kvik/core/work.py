"""The work of planned steps: tokens, query-key pairs, bytes read from the KV cache.

Counting a decoding row must be nearly free, since a step may have hundreds. So runs of single
tokens are counted when they end, in closed form. Chunks of a prompt, and rows with drafts, are
counted when planned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

from kvik.core.types import Request
from kvik.spec.kv import KVGroup
from kvik.spec.visible_keys import VisibleKeys


@dataclass(slots=True)
class Work:
    """Totals since the start, of steps as they were planned.

    Tokens of the prompt, and of a chunk that resumes a preempted request, are prefill; a single
    token of a row, with its drafts, is decode."""

    mixed_steps: int = 0  # steps with a chunk of a prompt
    decode_steps: int = 0  # steps without
    decode_step_tokens: int = 0  # tokens of `decode_steps`
    # prefill_tokens, decode_tokens: computed tokens, without those found in the prefix cache.
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0  # prefill tokens computed again after a preemption
    logit_rows: int = 0  # positions whose logits were computed
    # prefill_pairs, decode_pairs: (query, visible key) pairs, summed over the layers.
    prefill_pairs: int = 0
    decode_pairs: int = 0
    # prefill_kv_bytes, decode_kv_bytes: lower bound of the bytes read from the KV cache: each row
    # of a step reads once what any of its queries sees.
    prefill_kv_bytes: int = 0
    decode_kv_bytes: int = 0
    queued_steps: int = 0  # steps after whose planning requests still waited
    block_short_steps: int = 0  # of those, steps that had no KV blocks for the next request
    slot_short_steps: int = 0  # of those, steps with `max_num_seqs` requests running

    def since(self, earlier: Work) -> Work:
        """Return the difference to an earlier reading."""
        return Work(*(b - a for a, b in zip(astuple(earlier), astuple(self), strict=True)))


class WorkMeter:
    """Counts while the scheduler plans, for each request up to `num_metered_tokens`."""

    def __init__(self, groups: Iterable[KVGroup]) -> None:
        self.total = Work()
        kinds: dict[VisibleKeys, tuple[int, int]] = {}
        for group in groups:
            layers, size = kinds.get(group.visible, (0, 0))
            kinds[group.visible] = layers + group.readers, size + group.read_bytes_per_token
        # Which keys queries see, number of layers with it, bytes per token that they all read.
        self._kinds = [(visible, *sums) for visible, sums in kinds.items()]

    def start(self, request: Request) -> None:
        """Note that a request starts or resumes, perhaps with a cached prefix."""
        request.num_metered_tokens = request.num_computed_tokens
        # Rejected drafts were not lost; the last known token is always computed.
        request.num_lost_tokens = min(request.num_lost_tokens, len(request.token_ids) - 1)

    def chunk(self, request: Request, tokens: int) -> None:
        """Count a row of `tokens` prompt (or lost) tokens, already in `num_computed_tokens`."""
        first = self._begin(request, tokens)
        self.total.prefill_tokens += tokens
        self.total.recomputed_tokens += max(0, min(first + tokens, request.num_lost_tokens) - first)
        if request.params.prompt_logprobs is not None:
            last = min(first + tokens, request.num_prompt_tokens - 1)
            scored = max(first, request.params.prompt_logprobs_start - 1)
            self.total.logit_rows += max(0, last - scored)
        span = first, first + tokens, request.num_prompt_tokens
        for visible, layers, size in self._kinds:
            self.total.prefill_pairs += layers * visible.pairs(*span)
            self.total.prefill_kv_bytes += size * visible.keys_read(*span)

    def drafts(self, request: Request, tokens: int) -> None:
        """Count a row of one known token and its drafts, already in `num_computed_tokens`."""
        first = self._begin(request, tokens)
        self.total.decode_tokens += tokens
        self.total.logit_rows += tokens - 1
        span = first, first + tokens, request.num_prompt_tokens
        for visible, layers, size in self._kinds:
            self.total.decode_pairs += layers * visible.pairs(*span)
            self.total.decode_kv_bytes += size * visible.keys_read(*span)

    def step(self, tokens: int, chunks: int, samples: list[bool]) -> None:
        """Count a step whose rows are complete."""
        total = self.total
        if chunks:
            total.mixed_steps += 1
        else:
            total.decode_steps += 1
            total.decode_step_tokens += tokens
        total.logit_rows += samples.count(True)

    def left_waiting(self, *, blocks_short: bool, slots_short: bool) -> None:
        """Count a step during which requests wait for blocks, slots, or tokens of its budget."""
        self.total.queued_steps += 1
        self.total.block_short_steps += blocks_short
        self.total.slot_short_steps += slots_short

    def take_back(self, request: Request, rejected: int) -> None:
        """Note rejected drafts: their work counts, but the request continues before them."""
        request.num_metered_tokens -= rejected

    def settle(self, request: Request) -> None:
        """Count the tokens that the request has decoded one by one."""
        self._add_singles(self.total, request, request.num_computed_tokens)

    def lose(self, request: Request) -> None:
        """Note a preemption: the tokens of the request will be computed again."""
        self.settle(request)
        request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)

    def read(self, running: Iterable[Request]) -> Work:
        """Return the totals, with the uncounted tokens of running requests."""
        total = replace(self.total)
        for request in running:
            metered = request.num_metered_tokens
            self._add_singles(total, request, request.num_computed_tokens)
            request.num_metered_tokens = metered
        return total

    def _begin(self, request: Request, tokens: int) -> int:
        """Count all tokens before the row, and return the position of its first token."""
        first = request.num_computed_tokens - tokens
        self._add_singles(self.total, request, first)
        request.num_metered_tokens = first + tokens
        return first

    def _add_singles(self, total: Work, request: Request, end: int) -> None:
        first = request.num_metered_tokens
        if first == end:
            return
        request.num_metered_tokens = end
        # The last token of a prompt may be left for a row of its own.
        lost = request.num_lost_tokens
        middle = min(max(first, request.num_prompt_tokens, lost), end)
        total.prefill_tokens += middle - first
        total.recomputed_tokens += max(0, min(end, lost) - first)
        total.decode_tokens += end - middle
        for visible, layers, size in self._kinds:
            prompt = visible.pairs(first, middle, request.num_prompt_tokens)
            output = visible.pairs(middle, end, request.num_prompt_tokens)
            total.prefill_pairs += layers * prompt
            total.prefill_kv_bytes += size * prompt
            total.decode_pairs += layers * output
            total.decode_kv_bytes += size * output
