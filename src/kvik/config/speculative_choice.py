"""How much is guessed ahead in one step, decided from wishes and the size of the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvik.config.built import check_draft
from kvik.config.config import EngineConfig
from kvik.config.errors import ConfigError
from kvik.config.heads_memory import HeadsFootprint
from kvik.config.kernels import ASKED, LANES, MAX_HEAD_DIM, Note
from kvik.config.kv_formats import AUTO
from kvik.config.kv_spec import KVGroup, KVKind
from kvik.config.memory import Footprint
from kvik.config.speculative import (
    DEFAULT_TOKENS,
    OFF,
    DraftSource,
    ResolvedSpeculation,
    SpeculativeConfig,
    Typical,
    speculative_wish,
)
from kvik.config.step_memory import TRITON_BACKENDS, StepSize

# Drafts of a step beyond which it is bound by arithmetic, so that wrong ones cost what right ones
# gain. Each is a row of logits.
MAX_DRAFT_ROWS: Mapping[str, int] = {"cpu": 128, "cuda": 512}


def wish_of(config: EngineConfig) -> SpeculativeConfig | None:
    """None: no speculation. Raises `ConfigError` for what is impossible."""
    return speculative_wish(
        config.speculative_config, config.spec_method, config.spec_model, config.spec_tokens
    )


def draft_tokens(wish: SpeculativeConfig) -> int:
    """Most drafts of a request in one step."""
    return wish.num_speculative_tokens or DEFAULT_TOKENS[wish.method]


def with_draft_rows(wish: SpeculativeConfig | None, size: StepSize, device: str) -> StepSize:
    """The step with as many drafts as are of use. Half of the tokens that decoding requests leave
    of it are kept for prompts, which could starve otherwise.

    Args:
        device: "cpu" or "cuda".
    """
    if wish is None:
        return size
    tokens, seqs = size.max_num_batched_tokens, size.max_num_seqs
    most = min(seqs * draft_tokens(wish), (tokens - seqs) // 2, MAX_DRAFT_ROWS[device])
    most = max(0, most)
    return replace(size, max_draft_rows=most, draft_tokens=min(most, draft_tokens(wish)))


def with_drafter(
    footprint: Footprint, wish: SpeculativeConfig | None, source: DraftSource
) -> Footprint:
    """What the engine takes with a draft model, or with heads.

    Raises:
        ConfigError: the draft model cannot run beside the target.
    """
    if wish is not None and source.heads is not None:
        heads = HeadsFootprint(source.heads, footprint.dtype, draft_tokens(wish))
        return replace(footprint, heads=heads)
    if wish is None or source.spec is None:
        return footprint
    _shared_group(footprint.groups)
    dim, backend = source.spec.head_dim, footprint.attention_backend
    large = backend in ("cpu", *TRITON_BACKENDS) and dim > MAX_HEAD_DIM
    if large or (backend == "cpu" and dim % LANES):
        raise ConfigError(
            "spec_model", f"its heads of {dim} need attention_backend sdpa, for both models"
        )
    built = source.spec.built
    if built is not None:
        check_draft(built, footprint.dtype, footprint.kernels, wish.quantization)
    draft = replace(
        footprint,
        spec=source.spec,
        quantization=built.quantization if built else wish.quantization,
        runtime=0,
        kv_format=AUTO,
        kv_skipped=(),
        mapped=built.weight_bytes if built else None,
    )
    return replace(footprint, draft=draft)


def _shared_group(groups: tuple[KVGroup, ...]) -> int:
    """The target's KV group that keeps every key."""
    for index, group in enumerate(groups):
        if group.spec.kind is KVKind.FULL:
            return index
    raise ConfigError(
        "spec_method",
        "draft_model needs a model with layers that see every key; ngram and suffix do not",
    )


def choose_speculation(
    wish: SpeculativeConfig | None,
    size: StepSize,
    groups: tuple[KVGroup, ...],
    source: DraftSource,
    note: Note,
) -> ResolvedSpeculation | None:
    """Args:
        size: of a step, its drafts included.
        groups: of the target's KV cache.

    Raises:
        ConfigError: a step has no room for drafts.
    """
    if wish is None:
        note("speculation", OFF, "the default: see spec_method")
        return None
    if size.max_draft_rows == 0:
        raise ConfigError(
            "max_num_batched_tokens",
            f"must be at least {size.max_num_seqs + 2} for {size.max_num_seqs} requests and their "
            f"drafts, not {size.max_num_batched_tokens}",
        )
    most = min(draft_tokens(wish), size.max_draft_rows)
    reason = ASKED if wish.num_speculative_tokens else f"{ASKED}, with the method's default"
    note("speculation", wish.method, f"{reason}: up to {most} tokens of a request in a step")
    rows = f"{size.max_draft_rows} drafts"
    note("max_draft_rows", rows, "of all requests in a step, with room left for prompts")
    typical = None
    if wish.typical_acceptance:
        typical = Typical(wish.typical_epsilon, wish.typical_delta)
        effect = "lossy: changes the distribution of requests that sample without a seed"
        note("typical_acceptance", "on", f"{effect}; {ASKED}")
    return ResolvedSpeculation(
        method=wish.method,
        num_draft_tokens=most,
        max_draft_rows=size.max_draft_rows,
        adaptive=wish.adaptive,
        # A draft model runs ahead in blocks that it shares with the target.
        num_lookahead_tokens=most if wish.method == "draft_model" else 0,
        source=source,
        draft_step=size.of_draft_model,
        draft_group=_shared_group(groups) if source.spec is not None else 0,
        quantization=wish.quantization,
        ngram_min=wish.ngram_min,
        ngram_max=wish.ngram_max,
        shared=wish.shared,
        typical=typical,
    )
