"""Reports of a finished request: one line for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence

from kvik.cli.terminal import say
from kvik.config.config import ResolvedConfig
from kvik.core.types import RequestSpeculation, TokenLogprobs
from kvik.engine.output import RequestOutput
from kvik.spec.kv import AUTO, formats_of


def stats_line(output: RequestOutput) -> str:
    """Return tokens, times, prefix-cache hit and drafts of one request, in one line."""
    figures = _figures(output)
    prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
    parts = [f"{prompt} prompt + {output.num_output_tokens} output tokens"]
    if figures["ttft"] is not None:
        parts.append(f"TTFT {figures['ttft'] * 1e3:.0f} ms")
    if figures["tpot"] is not None:
        parts.append(f"TPOT {figures['tpot'] * 1e3:.2f} ms")
    if figures["tokens_per_second"] is not None:
        parts.append(f"{figures['tokens_per_second']:.1f} tokens/s")
    parts.append(f"prefix-cache hit {cached / prompt:.0%}" if prompt else "no prompt")
    parts += _guessed(output.speculation)
    return ", ".join(parts)


def say_decisions(resolved: ResolvedConfig) -> None:
    """Print each decision and its reason to standard error."""
    for decision in resolved.decisions:
        say(f"{decision.name} = {decision.value}: {decision.reason}", error=True)


def as_json(output: RequestOutput, model: str) -> dict[str, object]:
    """Return a finished request in plain types."""
    return {
        "model": model,
        "prompt": output.prompt,
        "completions": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "error": completion.error,
                "logprobs": _logprobs(completion.logprobs),
                "speculation": completion.speculation and completion.speculation.figures(),
            }
            for completion in output.outputs
        ],
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "output_tokens": output.num_output_tokens,
            "cached_tokens": output.num_cached_tokens,
            "preemptions": output.num_preemptions,
        },
        "seconds": _figures(output),
    }


def kv_format(resolved: ResolvedConfig) -> str:
    """Return the formats of the KV cache, in words."""
    formats = formats_of(resolved.cache.groups)
    names = (resolved.runner.dtype if name == AUTO else name for name in formats)
    return " and ".join(dict.fromkeys(names))


def _guessed(speculation: RequestSpeculation | None) -> list[str]:
    """Return the figures of speculation, if any drafts were made."""
    if speculation is None or not speculation.drafts.rows:
        return []
    drafts = speculation.drafts
    parts = [f"{drafts.accepted} of {drafts.drafts} drafts right"]
    parts.append(f"{drafts.mean_length:.2f} tokens a check")
    if speculation.speedup is not None:
        parts.append(f"speed-up by drafts {speculation.speedup:.2f} (estimated)")
    return parts


def _figures(output: RequestOutput) -> dict[str, float | None]:
    """Return the latencies in seconds, and the output rate."""
    metrics, count = output.metrics, output.num_output_tokens
    longest = max(len(c.token_ids) for c in output.outputs)
    return {
        "ttft": metrics.ttft,
        "tpot": metrics.tpot(longest),  # siblings run concurrently
        "e2e": metrics.e2e,
        "tokens_per_second": count / metrics.e2e if metrics.e2e > 0 else None,
    }


def _logprobs(entries: Sequence[TokenLogprobs | None] | None) -> list[object] | None:
    if entries is None:
        return None
    return [
        entry
        and {
            "token_id": entry.token_id,
            "logprob": entry.logprob,
            "rank": entry.rank,
            "top": [[token, logprob] for token, logprob in entry.top],
        }
        for entry in entries
    ]
