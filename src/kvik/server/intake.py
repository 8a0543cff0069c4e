"""From what a caller wants to what the engine is asked: checks, token ids, limits."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvik.config.errors import ParamError
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, Pin
from kvik.engine.async_client import AsyncEngineClient
from kvik.server.admission import Admission
from kvik.server.pressure import Degradation, KVUsage, pressure
from kvik.server.texts import Texts
from kvik.text.bad_words import bad_word_ids

MAX_PRIORITY = 1000
MAX_DEADLINE_MS = 86_400_000
MAX_BAD_WORD_CHARS = 1 << 16
_SALT = re.compile(r"[A-Za-z0-9_.:=+/-]{0,128}")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a caller wants, whatever the API it was said in.

    Attributes:
        prompt: text, or token ids.
        add_special_tokens: to a text; a rendered chat template has its own.
        priority: smaller is more urgent. Only the policy "priority" looks at it.
        cache_salt: prefix blocks are shared only under the same salt (and tenant).
        deadline_ms: after which the result is worthless, from now.
        pins: prefixes to keep in the prefix cache.
        pooling: "mean" or "last": an embedding is wanted, and no text.
        field: what the caller's request calls `prompt`, for errors.
    """

    prompt: str | Sequence[int]
    params: SamplingParams
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    deadline_ms: int | None = None
    pins: tuple[Pin, ...] = ()
    pooling: str | None = None
    field: str = "prompt"


@dataclass(slots=True)
class Draft:
    """A request on its way to the engine.

    Attributes:
        wanted_by: by the engine's clock, if its caller said so; its deadline may be sooner.
    """

    request: EngineRequest
    text: str | None
    degraded: str = ""
    wanted_by: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Attributes:
    request_timeout: seconds after which any request ends; None: no limit.
    share_prefix_cache: between tenants.
    """

    request_timeout: float | None = None
    share_prefix_cache: bool = False
    degradation: Degradation = field(default_factory=Degradation)


class Intake:
    """Makes engine requests.

    Args:
        clock: the engine's.
    """

    def __init__(
        self,
        engine: AsyncEngineClient,
        texts: Texts,
        admission: Admission,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._policy = engine.config.scheduler.policy
        self._texts = texts
        self._admission = admission
        self._limits = limits
        self._kv_usage = KVUsage(engine, clock)

    async def draft(self, wish: GenerationRequest, tenant: str, arrived: float) -> Draft:
        """Args:
            arrived: when, by the engine's clock.

        Raises:
            ParamError: something is impossible, whatever the engine says.
        """
        if not _SALT.fullmatch(wish.cache_salt):
            raise ParamError("cache_salt", "must be at most 128 letters, digits and _ . : = + / -")
        if not -MAX_PRIORITY <= wish.priority <= MAX_PRIORITY:
            raise ParamError("priority", f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
        if wish.priority and self._policy != "priority":
            raise ParamError(
                "priority",
                "Priority scheduling is not enabled: give 0, or start the server with --policy "
                f"priority instead of {self._policy}",
            )
        if wish.deadline_ms is not None and not 1 <= wish.deadline_ms <= MAX_DEADLINE_MS:
            raise ParamError("deadline_ms", f"must be in [1, {MAX_DEADLINE_MS}]")
        params, text = wish.params, None
        if params.stop and self._texts.tokenizer is None:
            raise ParamError("stop", "needs a tokenizer, and this model has none")
        if params.bad_words:
            params = params.with_changes(bad_words=await self._bad_words(params))
        if isinstance(wish.prompt, str):
            text = wish.prompt
            texts = self._texts.of(tenant)
            ids: Sequence[int] = await texts.encode(text, wish.add_special_tokens)
            if not text or not ids:  # some tokenizers put a token before nothing at all
                raise ParamError("prompt", "must not be empty")
        else:
            ids = wish.prompt
        params, degraded = self._degrade(params)
        salt = wish.cache_salt
        if not self._limits.share_prefix_cache:
            salt = f"{tenant}\0{salt}"
        request = EngineRequest(
            f"gen-{secrets.token_hex(12)}",
            ids,
            params,
            priority=wish.priority,
            cache_salt=salt,
            deadline=self._deadline(wish, arrived),
            tenant=tenant,
            pins=wish.pins,
            pooling=wish.pooling,
        )
        wanted_by = None if wish.deadline_ms is None else arrived + wish.deadline_ms / 1000
        return Draft(request, text, degraded, wanted_by)

    async def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if sum(len(word) for word in params.bad_words) > MAX_BAD_WORD_CHARS:
            raise ParamError("bad_words", f"at most {MAX_BAD_WORD_CHARS} characters in all")
        return await asyncio.to_thread(bad_word_ids, params.bad_words, self._texts.tokenizer)

    def _degrade(self, params: SamplingParams) -> tuple[SamplingParams, str]:
        policy = self._limits.degradation
        if policy.max_tokens is None:
            return params, ""
        fill, waiting = self._admission.fill, self._admission.num_waiting > 0
        changed = policy.apply(params, pressure(fill, self._kv_usage.read(), waiting=waiting))
        return changed, "" if changed is params else f"max_tokens={changed.max_tokens}"

    def _deadline(self, wish: GenerationRequest, arrived: float) -> float | None:
        limits = [] if wish.deadline_ms is None else [wish.deadline_ms / 1000]
        if self._limits.request_timeout is not None:
            limits.append(self._limits.request_timeout)
        return arrived + min(limits) if limits else None
