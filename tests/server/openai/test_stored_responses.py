"""Responses that the server keeps, and requests that continue them, with the real client."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import httpx2
import openai
import pytest
from helpers.http_server import ask, until
from helpers.raw_http import connect, post, read_until
from helpers.served_engine import FakeExecutor, gated_executor
from helpers.serving import Served, served
from helpers.story_site import site_fixture
from helpers.tools import MESSAGES, WEATHER
from openai.types.responses import ResponseItem, ResponseItemList
from pydantic import TypeAdapter

from kvik.config.server_config import ServerConfig
from kvik.server.access import read_keys
from kvik.server.app import openai_routes

PATH = "/v1/responses"
RESET = b"\1\0\0\0\0\0\0\0"  # to close at once, not only the sending half
TEMPLATE = MESSAGES + "{% if add_generation_prompt %}assistant: {% endif %}"
LETTERS = "{% for m in messages %}{{ m.content }}{% endfor %}"  # the fictitious model has no others

site = site_fixture(openai_routes, template=TEMPLATE)


def create(client: openai.OpenAI, text: Any, **changes: Any) -> Any:
    body: dict[str, Any] = {"max_output_tokens": 8, "temperature": 0, "model": "stories", **changes}
    return client.responses.create(input=text, **body)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def listed(client: openai.OpenAI, response_id: str) -> list[Any]:
    """Return all items of the input in their order."""
    return list(client.responses.input_items.list(response_id, order="asc"))


def refusal(status: int, call: Any) -> Any:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    assert caught.value.status_code == status
    return caught.value


# -- conversations -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_continues_as_if_it_were_sent_in_full(
    client: openai.OpenAI, stream: bool
) -> None:
    def turn(text: Any, **changes: Any) -> Any:
        answer = create(client, text, stream=stream, **changes)
        return [*answer][-1].response if stream else answer

    first = turn("Who is it?", instructions="Be brief.")
    second = turn([said("user", "Why?")], previous_response_id=first.id)
    third = turn("When?", previous_response_id=second.id, instructions="Be kind.")
    assert second.previous_response_id == first.id and first.previous_response_id is None
    assert first.store and first.status == "incomplete"
    conversation = [
        said("user", "Who is it?"),
        said("assistant", first.output_text),
        said("user", "Why?"),
        said("assistant", second.output_text),
        said("user", "When?"),
    ]
    for answer, items, instructions in (
        (second, conversation[:3], None),  # those of the first are not carried over
        (third, conversation, "Be kind."),
    ):
        whole = create(client, items, store=False, instructions=instructions)
        assert answer.output_text == whole.output_text and not whole.store
        assert answer.usage.input_tokens == whole.usage.input_tokens
    assert texts(listed(client, third.id)) == [item["content"] for item in conversation]
    for answer in (first, second, third):
        assert client.responses.retrieve(answer.id) == answer


def test_the_result_of_a_call_follows_the_call(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
    choice = {"type": "function", "name": "get_weather"}
    asked = create(client, "Is it warm?", tools=tools, tool_choice=choice, max_output_tokens=150)
    (call,) = asked.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
    told = create(client, [result], previous_response_id=asked.id)
    question, earlier, given = listed(client, told.id)
    assert (question.type, earlier.type) == ("message", "function_call")
    assert (earlier.arguments, earlier.id) == (call.arguments, call.id)
    assert (given.type, given.call_id, given.output) == (*result.values(),)
    whole = [
        said("user", "Is it warm?"),
        call.to_dict(mode="json"),
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call_output", "call_id": call.call_id, "output": "cold"},
    ]
    again = create(client, whole)
    assert again.output_text == told.output_text
    assert again.usage.input_tokens == told.usage.input_tokens
    unrelated = refusal(400, lambda: create(client, [result], previous_response_id=told.id + "x"))
    assert unrelated.param == "previous_response_id"


@pytest.mark.parametrize("stream", [False, True])
def test_items_that_a_client_refers_to(client: openai.OpenAI, stream: bool) -> None:
    """As Vercel's AI SDK does."""
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
    choice = {"type": "function", "name": "get_weather"}
    more = {"tools": tools, "tool_choice": choice, "max_output_tokens": 150, "stream": stream}
    asked = create(client, "Is it warm?", **more)
    asked = [*asked][-1].response if stream else asked
    (call,) = asked.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
    said_first = create(client, "Hello").output[0]
    for reference in ({"type": "item_reference", "id": call.id}, {"id": call.id}):
        known = {"type": "item_reference", "id": said_first.id}
        told = create(client, [said("user", "Hello"), known, reference, result])
        whole = [said("user", "Hello"), said_first.to_dict(mode="json")]
        again = create(client, [*whole, call.to_dict(mode="json"), result], store=False)
        assert told.output_text == again.output_text
        assert told.usage.input_tokens == again.usage.input_tokens
        kinds = [item.type for item in listed(client, told.id)]
        assert kinds == ["message", "message", "function_call", "function_call_output"]
    unstored = create(client, "Hello", store=False).output[0]
    for unknown in (unstored.id, call.id + "0", said_first.id[:-1] + "1", asked.id, "x"):
        refused = refusal(404, partial(create, client, [{**known, "id": unknown}]))
        assert refused.param == "input.0.id" and refused.code == "item_not_found"


def test_pages_of_input_items(client: openai.OpenAI, http: httpx2.Client) -> None:
    words = [f"Word {i}" for i in range(7)]
    kept = create(client, [said("developer", "Count."), *(said("user", word) for word in words)])
    part = {"type": "output_text", "text": "8"}
    last = [{**said("assistant", ""), "content": [part]}, said("assistant", "9")]
    answer = create(client, last, previous_response_id=kept.id)
    path = f"{PATH}/{answer.id}/input_items"
    expected = ["Count.", *words, kept.output_text, "8", "9"]
    assert texts(listed(client, answer.id)) == expected
    newest_first = client.responses.input_items.list(answer.id, limit=3)
    assert texts(newest_first) == expected[::-1] and newest_first.has_more
    pages = [*client.responses.input_items.list(answer.id, order="asc", limit=5).iter_pages()]
    assert [len(page.data) for page in pages] == [5, 5, 1] and not pages[-1].has_more
    page = http.get(path, params={"after": pages[0].data[2].id, "order": "asc", "limit": 2}).json()
    assert ResponseItemList.model_validate(page, strict=True).data == pages[0].data[3:5]
    assert (page["first_id"], page["last_id"]) == tuple(item["id"] for item in page["data"])
    assert (
        http.get(path, params={"after": page["last_id"], "limit": 100}).json()["has_more"] is False
    )
    every = http.get(path, params={"limit": 100}).json()
    assert [
        item.content[0].text
        for item in TypeAdapter(list[ResponseItem]).validate_python(every["data"], strict=True)
    ] == expected[::-1]
    for name, value in (
        ("limit", 0),
        ("limit", 101),
        ("limit", "x"),
        ("order", "up"),
        ("after", "y"),
    ):
        wrong = http.get(path, params={name: value})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, name)


def test_a_deleted_response_is_gone_but_not_for_those_that_continue_it(
    client: openai.OpenAI,
) -> None:
    first = create(client, "One")
    second = create(client, "Two", previous_response_id=first.id)
    client.responses.delete(first.id)
    for call in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.input_items.list(first.id),
    ):
        assert refusal(404, call).param == "response_id"
    gone = refusal(400, lambda: create(client, "Three", previous_response_id=first.id))
    assert (gone.code, gone.param) == ("previous_response_not_found", "previous_response_id")
    third = create(client, "Three", previous_response_id=second.id)
    expected = ["One", first.output_text, "Two", second.output_text, "Three"]
    assert texts(listed(client, third.id)) == expected


def test_what_is_not_kept(client: openai.OpenAI) -> None:
    unkept = create(client, "One", store=False)
    for response_id in (unkept.id, "resp_1", "é"):
        refusal(404, lambda: client.responses.retrieve(response_id))  # noqa: B023
        gone = refusal(400, lambda: create(client, "Two", previous_response_id=response_id))  # noqa: B023
        assert gone.code == "previous_response_not_found"
    kept = create(client, "One")
    assert refusal(400, lambda: client.responses.cancel(kept.id)).param == "response_id"
    assert refusal(404, lambda: client.responses.cancel(unkept.id)).param == "response_id"
    replayed = refusal(400, lambda: client.responses.retrieve(kept.id, stream=True))
    assert replayed.param == "stream"


# -- limits --------------------------------------------------------------------------------------


@contextmanager
def keeping(num_bytes: int, executor: FakeExecutor | None = None, *keys: str) -> Iterator[Served]:
    config = ServerConfig(stored_response_bytes=num_bytes, kv_token="0123456789abcdef")
    given = read_keys(keys) if keys else None
    with served(
        openai_routes, executor, template=LETTERS, server_config=config, keys=given
    ) as server:
        yield server


def turn(server: Served, previous: str | None = None, key: str = "", **changes: Any) -> str:
    """Return the id of a response."""
    body = {"input": "Hi", "max_output_tokens": 2, "previous_response_id": previous, **changes}
    reply = ask(server.http, "POST", PATH, body, authorization=f"Bearer {key}")
    assert reply.status == 200, reply.body
    return str(reply.json["id"])


def is_kept(server: Served, response_id: str, key: str = "") -> bool:
    reply = ask(server.http, "GET", f"{PATH}/{response_id}", authorization=f"Bearer {key}")
    assert reply.status in (200, 404)
    return reply.status == 200


def test_nothing_is_kept_without_memory() -> None:
    with keeping(0) as server:
        reply = ask(server.http, "POST", PATH, {"input": "Hi", "store": True})
        assert reply.status == 200 and reply.json["store"] is False
        assert not is_kept(server, reply.json["id"])
        assert server.parts.stored.num_responses == 0


def test_each_turn_takes_the_same_memory() -> None:
    with keeping(1 << 20) as server:
        stored = server.parts.stored
        sizes, last = [0], None
        for _ in range(20):
            last = turn(server, last)
            sizes.append(stored.num_bytes)
        steps = [after - before for before, after in pairwise(sizes)]
        assert max(steps) - min(steps) < 100  # the digits of its numbers, and the previous id


def test_the_least_recently_used_conversation_is_dropped_from_its_end() -> None:
    with keeping(1 << 20) as server:
        turn(server)
        size = server.parts.stored.num_bytes
    with keeping(6 * size + size // 2) as server:
        old = [turn(server)]
        old += [turn(server, old[0])]
        new = [turn(server)]
        new += [turn(server, new[0])]
        assert is_kept(server, old[1])  # used just now, and so is what it continues
        more = [turn(server), turn(server)]
        another = turn(server)  # one too many
        kept = [is_kept(server, one) for one in (*old, *new, *more, another)]
        assert kept == [True, True, True, False, True, True, True]
        assert server.parts.stored.num_bytes <= server.parts.stored.max_bytes
        long = turn(server, input="Hi" * 100, metadata={"a": "x" * 6 * size})
        assert not is_kept(server, long)  # it alone is too large
        assert server.parts.stored.num_responses == 6


def test_a_flood_of_one_key_drops_nothing_of_another() -> None:
    with keeping(20_000, None, "ada", "bob") as server:
        mine = turn(server, key="ada")
        flood = [turn(server, key="bob") for _ in range(20)]
        assert is_kept(server, mine, "ada") and is_kept(server, flood[-1], "bob")
        assert not is_kept(server, flood[0], "bob")
        assert not is_kept(server, mine, "bob") and not is_kept(server, flood[-1], "ada")
        reply = ask(
            server.http,
            "POST",
            PATH,
            {"input": "Hi", "previous_response_id": mine},
            authorization="Bearer bob",
        )
        assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found")
        path = f"{PATH}/{mine}"
        assert ask(server.http, "DELETE", path, authorization="Bearer bob").status == 404
        assert ask(server.http, "DELETE", path, authorization="Bearer ada").json["deleted"] is True
        assert not is_kept(server, mine, "ada")


def test_deleted_responses_are_freed_with_the_last_that_continues_them() -> None:
    with keeping(1 << 20) as server:
        first = turn(server)
        second = turn(server, first)
        branches = [turn(server, second), turn(server, second)]
        for response_id in (second, first, *branches):
            assert server.parts.stored.num_responses == 4 - (response_id == branches[1])
            assert ask(server.http, "DELETE", f"{PATH}/{response_id}").status == 200
        assert server.parts.stored.num_responses == server.parts.stored.num_bytes == 0


# -- ends ----------------------------------------------------------------------------------------


def test_what_is_dropped_meanwhile_is_kept_with_its_continuation() -> None:
    executor = FakeExecutor()
    with keeping(1 << 20, executor) as server:
        first = turn(server)
        executor.gate.clear()
        with connect(server.http.port) as sock:
            post(sock, PATH, {"input": "Hi", "max_output_tokens": 2, "previous_response_id": first})
            until(lambda: server.parts.generations.live)
            assert ask(server.http, "DELETE", f"{PATH}/{first}").status == 200
            assert server.parts.stored.num_responses == 0
            executor.gate.set()
            until(lambda: server.parts.stored.num_responses == 2)
        assert not is_kept(server, first)


def test_only_its_own_server_continues_a_stored_response() -> None:
    executor = FakeExecutor()
    with keeping(1 << 20, executor) as server, ThreadPoolExecutor() as threads:
        first = turn(server)
        for previous in (None, first):
            executor.gate.clear()
            body = {"input": "Hi", "max_output_tokens": 2, "previous_response_id": previous}
            asked = threads.submit(ask, server.http, "POST", PATH, body, x_kvik_moves="1")
            (generation,) = until(lambda: [*server.parts.generations.live.values()])
            executor.gate.set()
            assert asked.result().status == 200
            assert generation.transfer.moves and generation.moves_now is (previous is None)


def test_a_stream_whose_client_is_gone_leaves_nothing() -> None:
    executor = gated_executor(after=4)
    with keeping(1 << 20, executor) as server:
        with connect(server.http.port) as sock:
            post(sock, PATH, {"input": "Hi", "stream": True, "max_output_tokens": 20})
            read_until(sock, b"output_text.delta")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        until(lambda: not server.parts.generations.live)
        executor.gate.set()
        server.at_rest()
        assert server.parts.stored.num_responses == server.parts.stored.num_bytes == 0


def test_a_stream_that_fails_is_kept_with_its_error() -> None:
    executor = gated_executor(after=4)
    with keeping(1 << 20, executor) as server, connect(server.http.port) as sock:
        post(sock, PATH, {"input": "Hi", "stream": True, "max_output_tokens": 20})
        begun = read_until(sock, b"output_text.delta").decode()
        response_id = begun.partition('"id":"')[2].partition('"')[0]
        executor.raises = RuntimeError("a secret")
        executor.gate.set()
        read_until(sock, b"event: error")
        found = ask(server.http, "GET", f"{PATH}/{response_id}").json
        assert found["status"] == "failed" and found["error"]["code"] == "server_error"
        assert "secret" not in found["error"]["message"]
        assert found["output"][0]["status"] == "incomplete" and found["usage"] is None
        assert turn(server, response_id)
