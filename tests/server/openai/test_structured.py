"""Answers that satisfy a schema, a regular expression or a grammar, over both routes."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any, Literal

import httpx2
import openai
import pytest
from helpers.story_site import Site
from jsonschema import validate
from pydantic import BaseModel

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["x", "tags"],
    "additionalProperties": False,
}
WARM = {"temperature": 1.2, "seed": 7, "max_tokens": 200}
# Nearly as large as a schema may be: a fast machine builds 5,000 properties in time.
MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8500)}}


class Verdict(BaseModel):
    sure: bool
    grade: Literal["a", "b"] | None


def complete(http: httpx2.Client, **body: Any) -> httpx2.Response:
    return http.post("/v1/completions", json={"prompt": "Once", **WARM, **body})


# Constraints of a request, and a check of the text.
WAYS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, r"\{.*"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}}, "5"),
    ({"response_format": {"type": "json_object", "schema": {"const": "é"}}}, '"é"'),
    ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
    ({"structured": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_json": {"enum": ["a", "b"]}}, '"[ab]"'),
    ({"guided_json": '{"enum": ["a", "b"]}'}, '"[ab]"'),
    ({"guided_json_object": True}, r"\{.*"),
    ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"guided_grammar": 'start: "(" /[xy]/ ")"'}, r"\([xy]\)"),
    ({"json_schema": {"type": "boolean"}}, "true|false"),
    ({"regex": "(ab)+c"}, "(ab)+c"),
    ({"ebnf": 'root ::= "p" | "q"'}, "p|q"),
    ({"grammar": 'root ::= "p" | "q"'}, "p|q"),
    ({"grammar": {"type": "regex", "value": "z{2}"}}, "zz"),
    ({"grammar": {"type": "json", "value": {"type": "null"}}}, "null"),
]


@pytest.mark.parametrize(("body", "pattern"), WAYS, ids=lambda one: str(one)[:50])
def test_every_form_of_constraint(http: httpx2.Client, body: dict[str, Any], pattern: str) -> None:
    answer = complete(http, **body)
    assert answer.status_code == 200, answer.text
    assert "x-kvik-ignored-fields" not in answer.headers
    (choice,) = answer.json()["choices"]
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["text"], re.DOTALL)
    else:
        assert choice["text"].startswith("{")


@pytest.mark.parametrize(
    "others",
    [
        {"n": 4},
        {"logprobs": 2},
        {"min_tokens": 150, "ignore_eos": True},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 2.0},
        {"logit_bias": {str(i): 5.0 for i in range(5, 60)}},
        {"top_k": 1, "min_p": 0.9},
        {"bad_words": ["a"], "dry_multiplier": 1.0},
        {"stream": True},
        {"prompt_logprobs": 0},
    ],
    ids=str,
)
def test_a_schema_holds_with_all_other_fields(http: httpx2.Client, others: dict[str, Any]) -> None:
    for seed in range(2):
        answer = complete(http, guided_json=POINT, **{**others, "seed": seed})
        assert answer.status_code == 200, answer.text
        if others.get("stream"):
            events = [line[6:] for line in answer.text.split("\n\n") if "{" in line]
            chunks = [one for event in events for one in json.loads(event)["choices"]]
            choices = [{**chunks[-1], "text": "".join(one["text"] for one in chunks)}]
        else:
            choices = answer.json()["choices"]
        for choice in choices:
            assert choice["finish_reason"] == "stop"
            validate(json.loads(choice["text"]), POINT)
            if "logprobs" in others:
                assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_a_stop_string_or_the_limit_may_cut_it(http: httpx2.Client) -> None:
    cut = complete(http, guided_json=POINT, stop=["tags"]).json()["choices"][0]
    assert cut["finish_reason"] == "stop" and cut["text"].endswith('"')
    short = complete(http, guided_json=POINT, max_tokens=2).json()["choices"][0]
    assert short["finish_reason"] == "length"


def test_the_client_parses_into_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="stories",
        messages=[{"role": "user", "content": "Is it?"}],
        response_format=Verdict,
        max_tokens=100,
        seed=3,
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Verdict)
    with client.chat.completions.stream(
        model="stories",
        messages=[{"role": "user", "content": "Is it?"}],
        response_format=Verdict,
        max_tokens=100,
        seed=3,
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_constraints_that_are_not_enforced_are_reported(http: httpx2.Client) -> None:
    schema = {"type": "object", "properties": {"é\r\n": {"not": {}}, "b": {"format": "iri"}}}
    for stream in (False, True):
        answer = complete(http, guided_json=schema, stream=stream, max_tokens=1)
        unenforced = answer.headers["kvik-unenforced"]
        assert unenforced == r"not at /properties/\xe9\r\n; format iri at /properties/b"
    assert "kvik-unenforced" not in complete(http, guided_json=POINT, max_tokens=1).headers


def test_two_fields_contradict_each_other(http: httpx2.Client) -> None:
    answer = complete(http, guided_regex="a", guided_choice=["a"])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("guided_choice: contradicts guided_regex")


def test_one_constraint_may_have_two_names(http: httpx2.Client) -> None:
    """As guidance sends its grammars, for older and newer versions of vLLM."""
    grammar = {"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'}}
    answer = complete(http, **grammar)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "a"


@pytest.mark.full
def test_hostile_constraints_delay_no_other_request(http: httpx2.Client, site: Site) -> None:
    """Another stream continues while each is refused. Both take longer on a busy machine, so the
    test counts lines of the stream, not seconds."""
    seen: list[float] = []
    over = threading.Event()

    def read() -> None:
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx2.Client(base_url=site.url, timeout=60) as other:
            while not over.is_set():
                with other.stream("POST", "/v1/completions", json=body) as answer:
                    seen.extend(time.monotonic() for _ in answer.iter_lines())

    def lines(**body: Any) -> int:
        """Return how many the stream had while a body was refused."""
        started = time.monotonic()
        answer = complete(http, **body)
        ended = time.monotonic()
        assert answer.status_code == 400, answer.text[:200]
        assert [answer.json()["error"]["param"]] == list(body)
        return sum(started < at < ended for at in list(seen))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        # About 1000 lines for the first; none if the event loop is blocked. The reader itself may
        # be delayed once.
        assert any(lines(guided_json={**MANY, "title": f"{turn}"}) > 20 for turn in range(3))
        assert any(lines(guided_regex="(a{1,1000}){1,1000}" + "b" * turn) > 20 for turn in range(3))
        answer = complete(http, guided_json={**MANY, "title": "0"})  # is cached
        assert answer.json()["error"]["code"] == "schema_too_complex"
    finally:
        over.set()
        reader.join(60)
    assert not reader.is_alive()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("rules", "param"),
    [
        ({"allowed_token_ids": [65], "bad_words": [[65]]}, "allowed_token_ids"),
        ({"guided_regex": "[a-z]+", "allowed_token_ids": [0]}, "guided_regex"),
        ({"guided_choice": ["a.b"], "stop_token_ids": [18]}, "guided_choice"),
    ],
)
def test_rules_that_allow_no_token_are_client_errors(
    http: httpx2.Client, rules: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "stream": stream, **rules}
    answer = http.post("/v1/completions", json=body)
    if answer.status_code == 200:  # the stream had begun
        error = json.loads(answer.text.split("data: ")[-1])["error"]
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert error["param"] == param and "leaves no token" in error["message"]
