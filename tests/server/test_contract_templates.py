"""A model's chat template is untrusted code; its effects on a server, over HTTP."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.http_server import ask
from helpers.serving import served

from kvik.server import health
from kvik.server.app import openai_routes as openai
from kvik.server.route import Route
from kvik.server.server import Server

STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('Begin with the user. ' * 500) }}"
    "{% endif %}{% for m in messages %}{{ m.content }}.{% endfor %}"
)


def routes(parts: Server) -> list[Route]:
    return [*openai(parts), *health.routes(parts)]


def said(*roles: str) -> dict[str, object]:
    messages = [{"role": role, "content": "Hi"} for role in roles]
    return {"messages": messages, "max_tokens": 2, "ignore_eos": True}


def test_error_messages_of_the_template_are_passed_on_and_trimmed() -> None:
    with served(routes, template=STRICT) as server:
        assert ask(server.http, "POST", "/v1/chat/completions", said("user")).status == 200
        for roles in (("assistant",), ("assistant", "user"), ("system",)):
            reply = ask(server.http, "POST", "/v1/chat/completions", said(*roles))
            assert (reply.status, reply.error["param"]) == (400, "messages")
            assert "Begin with the user." in reply.error["message"]
            assert len(reply.error["message"]) <= 1000


@pytest.mark.full
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(10**9) %}x{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ ('a' * 10**6)|center(10**9) }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{{ 9**9**9**9 }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_explodes_fails_its_own_request_alone(template: str) -> None:
    with served(routes, template=template) as server, ThreadPoolExecutor() as pool:
        for _ in range(3):  # of which one is not delayed by other processes
            bomb = pool.submit(ask, server.http, "POST", "/v1/chat/completions", said("user"))
            slowest = 0.0
            while not bomb.done():
                start = time.monotonic()
                body = {"prompt": [1, 2], "max_tokens": 1}
                assert ask(server.http, "POST", "/v1/completions", body).status == 200
                assert ask(server.http, "GET", "/health").status == 200
                slowest = max(slowest, time.monotonic() - start)
                time.sleep(0.01)
            reply = bomb.result()
            assert (reply.status, reply.error["param"]) == (400, "messages")
            if slowest < 2:
                return
        raise AssertionError(f"other requests took up to {slowest} s")
