"""Structured texts of `LLM` satisfy their constraints, whatever else the engine does."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.configs import small
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from kvik import LLM, SamplingParams
from kvik.core.structured import Choice, JsonSchema, Regex
from kvik.errors import ParamError
from kvik.server.tools import AnswerForm, Function, ToolUse
from kvik.text.answer_format import MarkedFormat
from kvik.text.dialects import DIALECTS, ToolFormat
from kvik.text.tokenizer import Tokenizer

PROMPTS = ["Once upon a time", "The fox", "A list:"]


NAMES = ["name", "age", "tags", "é", 'say "hi"', "x y"]
SCALARS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -20, "maximum": 300},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "string", "maxLength": 15},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"},
    {"type": "string", "format": "date"},
    {"enum": ["red", "green", 7, None]},
    {"const": "fixed text"},
]


def drawn_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of at most this nesting depth."""
    kind = dice.random() if depth else 0.0
    if kind < 0.4:
        return dice.choice(SCALARS)
    if kind < 0.6:
        least = dice.randint(0, 2)
        items = drawn_schema(dice, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
    if kind < 0.7:
        return {"anyOf": [drawn_schema(dice, depth - 1) for _ in range(dice.randint(1, 3))]}
    names = dice.sample(NAMES, dice.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: drawn_schema(dice, depth - 1) for name in names},
        "required": [name for name in names if dice.random() < 0.6],
        "additionalProperties": False,
    }


class Animal(BaseModel):
    name: str = Field(max_length=20)
    legs: int = Field(ge=0, le=8)
    wild: bool


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    load, loads = Tokenizer.load, list[object]()
    with (
        pytest.MonkeyPatch.context() as patch,
        LLM(device="cpu", threads=1, max_model_len=512, max_num_seqs=16) as made,
    ):
        patch.setattr(Tokenizer, "load", lambda path: loads.append(path) or load(path))
        yield made
    assert not loads  # grammars share the tokenizer of the frontend


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_sampled_texts_satisfy_their_schema(llm: LLM, count: int) -> None:
    """At a temperature at which the model generates nonsense."""
    dice = random.Random(count)
    schemas = [drawn_schema(dice) for _ in range(count)]
    params = [
        SamplingParams(temperature=1.2, seed=i, max_tokens=400, structured=JsonSchema(schema))
        for i, schema in enumerate(schemas)
    ]
    ended = 0
    for schema, output in zip(schemas, llm.generate(["Once"] * count, params), strict=True):
        (completion,) = output.outputs
        assert completion.error is None
        if completion.finish_reason == "stop":
            ended += 1
            value = json.loads(completion.text)
            assert Draft202012Validator(schema).is_valid(value), (schema, completion.text)
            if not re.search(r"[\\.]|-0", completion.text):  # texts with several spellings
                assert completion.text == json.dumps(value, ensure_ascii=False)
    assert ended > 0.9 * count


def test_a_pydantic_model_is_a_schema(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=200, seed=1), schema=Animal)
    animals = [Animal.model_validate_json(output.outputs[0].text) for output in outputs]
    assert len(animals) == len(PROMPTS)
    (chat,) = llm.chat([{"role": "user", "content": "Which?"}], schema=Animal)
    assert Animal.model_validate_json(chat.outputs[0].text)
    with pytest.raises(ParamError, match=r"schema: contradicts params\.structured"):
        llm.generate("a", SamplingParams(structured=Regex("a")), schema=Animal)
    with pytest.raises(ParamError, match="schema: a JSON Schema is an object"):
        llm.generate("a", schema=5)


def test_free_texts_of_the_same_batch_do_not_change(llm: LLM) -> None:
    free = SamplingParams(temperature=0.8, seed=5, max_tokens=30)
    held = free.with_changes(structured=Regex("[a-z ]{40,60}"))
    alone = [llm.generate(prompt, free)[0].outputs[0].token_ids for prompt in PROMPTS]
    mixed = llm.generate([*PROMPTS, *PROMPTS], [free] * 3 + [held] * 3)
    assert [output.outputs[0].token_ids for output in mixed[:3]] == alone


def test_a_stream_is_the_whole_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=200, seed=3, structured=JsonSchema(Animal))
    with llm.stream("Once", params) as stream:
        text = "".join(delta.text for delta in stream)
    assert text == stream.output.outputs[0].text
    assert Animal.model_validate_json(text)
    assert stream.output.outputs[0].finish_reason == "stop"


def test_siblings_are_sampled_independently(llm: LLM) -> None:
    params = SamplingParams(n=8, temperature=2.0, seed=1, structured=Choice(["a", "b", "c", "d"]))
    (output,) = llm.generate("Choose", params)
    texts = [completion.text for completion in output.outputs]
    assert set(texts) <= {"a", "b", "c", "d"} and len(set(texts)) > 1


def test_a_complete_answer_takes_no_further_step(llm: LLM) -> None:
    (output,) = llm.generate("a", SamplingParams(structured=Regex("[xyz]"), max_tokens=50))
    (completion,) = output.outputs
    assert len(completion.token_ids) == 1 and completion.text in ("x", "y", "z")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_a_dead_end_is_the_error_of_one_request(llm: LLM) -> None:
    bad = SamplingParams(structured=Regex("[a-z]+"), allowed_token_ids=(0,))
    good = SamplingParams(structured=Regex("[a-z]{3}"))
    first, second = llm.generate(["a", "b"], [bad, good])
    assert first.outputs[0].finish_reason == "error" and first.outputs[0].error
    assert second.outputs[0].finish_reason == "stop"


def test_constraints_that_are_not_enforced_are_warned_of(llm: LLM) -> None:
    with pytest.warns(UserWarning, match="not enforced: format iri at /"):
        llm.generate("a", SamplingParams(max_tokens=5), schema={"format": "iri", "type": "string"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate("a", SamplingParams(max_tokens=5), schema={"type": "string"})
    with pytest.raises(ParamError, match=r"is strict, and this cannot be enforced: format iri"):
        strict: dict[str, Any] = {"json": {"format": "iri"}, "strict": True}
        llm.generate("a", SamplingParams(structured=strict))


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small()))
    bare = LLM(str(tmp_path), load_format="random", device="cpu", threads=1)
    with bare, pytest.raises(ParamError, match="structured: needs a tokenizer"):
        bare.generate([[1, 2]], SamplingParams(structured=Regex("a")))


@pytest.mark.full
def test_required_calls_are_valid_in_every_dialect(llm: LLM) -> None:
    """Whatever the model would generate otherwise. One batch has the requests of all dialects."""
    forms = [MarkedFormat(form=ToolFormat.of(dialect, llm.tokenizer)) for dialect in DIALECTS]
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "size": {"enum": ["big", "small"]},
            "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["size"],
        "additionalProperties": False,
    }
    function = Function("look", parameters=schema)
    uses = [ToolUse.of(form, [function], choice="required", single=True) for form in forms]
    checked = [
        SamplingParams(temperature=1.2, seed=i, max_tokens=160, structured=use.constraint())
        for use in uses
        for i in range(4)
    ]
    outputs = llm.generate(["Once"] * len(checked), checked)
    for number, dialect in enumerate(DIALECTS):
        ended = 0
        for output in outputs[4 * number : 4 * number + 4]:
            parser = AnswerForm(uses[number], forms[number]).parser()
            deltas = parser.push(output.text, ends=True)
            assert parser.num_calls == 1, dialect.name
            if output.outputs[0].finish_reason == "stop":  # else the text is a partial call
                ended += 1
                assert not any(delta.text for delta in deltas), dialect.name
                arguments = json.loads("".join(delta.arguments for delta in deltas))
                assert Draft202012Validator(schema).is_valid(arguments), output.text
        assert ended, dialect.name
