"""What a finished request looks like: one line for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence

from kvik.core.types import TokenLogprobs
from kvik.engine.output import RequestOutput


def stats_line(output: RequestOutput) -> str:
    """Tokens, times and the prefix-cache hit of one request."""
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
    return ", ".join(parts)


def as_json(output: RequestOutput, model: str) -> dict[str, object]:
    """Everything of a finished request in plain types."""
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
            }
            for completion in output.completions
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


def _figures(output: RequestOutput) -> dict[str, float | None]:
    """Seconds, and output tokens over the wall time of the request."""
    metrics, count = output.metrics, output.num_output_tokens
    longest = max(len(c.token_ids) for c in output.completions)
    return {
        "ttft": metrics.ttft,
        "tpot": metrics.tpot(longest),  # siblings run side by side
        "e2e": metrics.e2e,
        "tokens_per_second": count / metrics.e2e if metrics.e2e > 0 else None,
    }


def _logprobs(found: Sequence[TokenLogprobs | None] | None) -> list[object] | None:
    if found is None:
        return None
    return [
        entry
        and {
            "token_id": entry.token_id,
            "logprob": entry.logprob,
            "rank": entry.rank,
            "top": [[token, logprob] for token, logprob in entry.top],
        }
        for entry in found
    ]
