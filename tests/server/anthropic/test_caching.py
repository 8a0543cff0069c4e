"""`cache_control` over a real socket: marked prefixes are kept, and usage reports them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from helpers.served_engine import bundled, make_engine
from helpers.story_site import NAMES, Site, story_site

from kvik.core.types import Pin, PromptUse
from kvik.server.access import read_keys
from kvik.server.anthropic import UsageMeter, routes
from kvik.server.anthropic_prompt import FIVE_MINUTES
from kvik.server.anthropic_prompt import HOUR as HOUR_SECONDS

MODEL = NAMES[0]
FIVE: Any = {"type": "ephemeral"}
HOUR: Any = {"type": "ephemeral", "ttl": "1h"}
SIZE = 16  # tokens per block


def words(name: str, count: int = 120) -> str:
    """Return a text unique to `name`, of at least `count` tokens."""
    return f"{name} " * count


def block(text: str, control: Any = None) -> Any:
    return {"type": "text", "text": text, **({"cache_control": control} if control else {})}


def user(*blocks: Any) -> Any:
    return {"role": "user", "content": list(blocks)}


@contextmanager
def cache_of(num_blocks: int, **changes: float) -> Iterator[tuple[Site, Callable[..., Any]]]:
    """Provide a server with a small cache, and a function that makes clients by key."""
    config, executor = bundled()
    cache = replace(config.cache, num_blocks=num_blocks, **changes)
    engine = make_engine(replace(config, cache=cache), executor)
    with story_site(routes, read_keys(["a", "b"]), engine) as site:

        def client(key: str = "a") -> AbstractContextManager[anthropic.Anthropic]:
            return anthropic.Anthropic(base_url=site.url, api_key=key, max_retries=0)

        yield site, client
        site.at_rest()


def ask(client: anthropic.Anthropic, *blocks: Any, **more: Any) -> anthropic.types.Usage:
    """Return the usage of a short answer, checked to account for every prompt token."""
    asked: Any = {"model": MODEL, "messages": [user(*blocks)], **more}
    usage = client.messages.create(max_tokens=2, **asked).usage
    count = client.messages.count_tokens(**asked).input_tokens
    read, made = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert usage.input_tokens + read + made == count
    assert usage.input_tokens > 0
    return usage


def figures(usage: anthropic.types.Usage) -> tuple[int | None, int | None]:
    return usage.cache_read_input_tokens, usage.cache_creation_input_tokens


def churn(client: anthropic.Anthropic, prompts: int = 12) -> None:
    for i in range(prompts):
        ask(client, block(words(f"churn{i}")))


def test_a_marked_prefix_is_written_once_then_read() -> None:
    with cache_of(256) as (site, new), new() as client:
        system = [block(words("dog"), FIVE)]
        first = ask(client, block("Who?"), system=system)
        read, made = figures(first)
        assert read == 0 and made >= 112 and made % SIZE == 0
        assert first.cache_creation.ephemeral_5m_input_tokens == made
        assert first.cache_creation.ephemeral_1h_input_tokens == 0
        assert figures(ask(client, block("Where?"), system=system)) == (made, 0)
        pool = site.engine.core.scheduler.kv.pool
        assert pool.num_pinned == made // SIZE


def test_a_stream_reports_usage_at_its_start_and_end() -> None:
    with cache_of(256) as (_, new), new() as client:
        asked: Any = {"model": MODEL, "max_tokens": 4, "messages": [user(block("Who?"))]}
        asked["system"] = [block(words("cat"), HOUR)]
        seen = []
        for _ in range(2):
            with client.messages.stream(**asked) as stream:
                (start,) = [event.message for event in stream if event.type == "message_start"]
                final = stream.get_final_message().usage
            assert start.usage.cache_creation == final.cache_creation
            assert figures(final) == figures(start.usage)
            assert start.usage.cache_creation.ephemeral_1h_input_tokens == figures(final)[1]
            seen.append(figures(final))
        (read, made), again = seen
        assert read == 0 and made and again == (made, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cache_is_warmed_without_an_answer(stream: bool) -> None:
    with cache_of(256) as (_, new), new() as client:
        asked: Any = {"model": MODEL, "messages": [user(block(words("warm"), FIVE))]}
        if stream:
            with client.messages.stream(**asked, max_tokens=0) as events:
                names = [event.type for event in events]
                answer = events.get_final_message()
            assert names == ["message_start", "message_delta", "message_stop"]  # pings are hidden
        else:
            answer = client.messages.create(**asked, max_tokens=0)
        assert (answer.content, answer.stop_reason) == ([], "max_tokens")
        assert answer.usage.output_tokens == 0
        _, made = figures(answer.usage)
        assert made and made >= 112
        assert figures(client.messages.create(**asked, max_tokens=1).usage) == (made, 0)


@pytest.mark.full
def test_marked_prefixes_outlive_others() -> None:
    with cache_of(64) as (_, new), new() as client, new("b") as other:
        _, made = figures(ask(client, block(words("kept"), FIVE)))
        ask(client, block(words("plain")))
        churn(other)
        assert ask(client, block(words("plain"))).cache_read_input_tokens == 0
        assert figures(ask(client, block(words("kept"), FIVE)))[0] == made


def test_nothing_is_reported_as_written_beyond_the_quota() -> None:
    with cache_of(128, tenant_pinned_share=0.05) as (site, new), new() as client:
        assert figures(ask(client, block(words("long", 200), FIVE))) == (0, 0)
        assert site.engine.core.scheduler.kv.pool.num_pinned == 0


def test_two_lifetimes_are_distinguished() -> None:
    with cache_of(256) as (_, new), new() as client:
        usage = ask(client, block(words("more"), FIVE), system=[block(words("base"), HOUR)])
        split = usage.cache_creation
        assert split.ephemeral_1h_input_tokens >= 112 and split.ephemeral_5m_input_tokens >= 112
        total = split.ephemeral_1h_input_tokens + split.ephemeral_5m_input_tokens
        assert total == usage.cache_creation_input_tokens


def test_a_conversation_only_writes_its_new_turns() -> None:
    """Marked at the top level, each turn reads what the previous one wrote."""
    with cache_of(256) as (_, new), new() as client:
        messages: Any = [user(block(words("once", 60)))]
        read = made = 0
        for turn in range(3):
            answer = client.messages.create(
                model=MODEL,
                max_tokens=20,
                messages=messages,
                cache_control=FIVE,
            )
            now_read, now_made = figures(answer.usage)
            assert now_read >= read + made and (turn == 0) == (now_read == 0)
            assert now_made > 0
            read, made = now_read, now_made
            text = answer.content[0]
            assert text.type == "text"
            messages.append({"role": "assistant", "content": text.text or "..."})
            messages.append(user(block(words(f"turn{turn}", 20))))


def test_keys_share_no_cache() -> None:
    with cache_of(256) as (_, new), new("a") as one, new("b") as two:
        marked = block(words("secret"), FIVE)
        _, made = figures(ask(one, marked))
        assert figures(ask(two, marked)) == (0, made)


@pytest.mark.parametrize("count", [1, 4])
def test_several_marks_share_their_blocks(count: int) -> None:
    with cache_of(256) as (site, new), new() as client:
        blocks = [block(words(f"part{i}", 30), FIVE) for i in range(count)]
        _, made = figures(ask(client, *blocks))
        assert site.engine.core.scheduler.kv.pool.num_pinned == made // SIZE


# Usage from the engine's counts.


@pytest.mark.parametrize(
    ("num_prompt", "pins", "read", "written", "hour"),
    [
        (100, [(70, FIVE_MINUTES)], 0, 64, 0),
        (100, [(70, HOUR_SECONDS)], 0, 64, 64),
        (100, [(40, HOUR_SECONDS), (70, FIVE_MINUTES)], 0, 64, 32),
        (100, [(40, HOUR_SECONDS), (70, FIVE_MINUTES)], 16, 48, 16),
        (100, [(40, HOUR_SECONDS), (70, FIVE_MINUTES)], 48, 16, 0),  # the hour was cached
        (100, [(40, FIVE_MINUTES), (70, HOUR_SECONDS)], 0, 64, 64),
        (100, [(40, FIVE_MINUTES), (90, HOUR_SECONDS)], 0, 32, 0),  # no room for the longer one
        (96, [(96, HOUR_SECONDS)], 0, 96, 96),
        (96, [(96, HOUR_SECONDS)], 80, 16, 16),  # the last token is recomputed each time
        (100, [(70, HOUR_SECONDS)], 64, 0, 0),
    ],
)
def test_written_tokens_by_lifetime(
    num_prompt: int, pins: list[tuple[int, float]], read: int, written: int, hour: int
) -> None:
    meter = UsageMeter(num_prompt, [Pin(*pin) for pin in pins], 16)
    usage = meter.usage(PromptUse(read, written), 3)
    assert usage.input_tokens == num_prompt - read - written
    assert usage.cache_read_input_tokens == read
    assert usage.cache_creation_input_tokens == written
    assert usage.cache_creation.ephemeral_1h_input_tokens == hour
    assert usage.cache_creation.ephemeral_5m_input_tokens == written - hour
    assert usage.output_tokens == 3


def test_unknown_figures_are_left_out() -> None:
    usage = UsageMeter(100, [], 16).usage(None, 0)
    assert usage.input_tokens == 100
    assert usage.cache_read_input_tokens is usage.cache_creation_input_tokens is None
