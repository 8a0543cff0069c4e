"""Programs, on an `LLM` and on a server by its URL."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.story_site import story_site
from pydantic import BaseModel, Field

from kvik import (
    LLM,
    Choice,
    Grammar,
    JsonSchema,
    KvikError,
    ParamError,
    Regex,
    SamplingParams,
    lang,
)
from kvik.engine.loop import EngineLoop
from kvik.server import llama_server
from kvik.server.app import openai_routes

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", device="cpu", threads=1, max_model_len=512) as made:
        made.tokenizer.chat_template = TEMPLATE
        yield made


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    routes = lambda server: [*openai_routes(server), *llama_server.routes(server)]  # noqa: E731
    with story_site(routes, template=TEMPLATE) as site:
        yield site.url
        site.at_rest()


@pytest.fixture(params=["llm", "url"])
def model(request: pytest.FixtureRequest) -> LLM | str:
    return request.getfixturevalue(request.param)


def story(s: lang.State, animal: str = "fox") -> None:
    s += f"Once upon a time there was a {animal}"
    s.gen("rest", **GREEDY)
    s += " The end."


def test_text_and_generated_parts(model: LLM | str, llm: LLM) -> None:
    state = lang.run(story, model, animal="cat")
    prompt = "Once upon a time there was a cat"
    (right,) = llm.generate(prompt, SamplingParams(**GREEDY))
    assert state["rest"] == right.text and "rest" in state
    assert state.text == f"{prompt}{right.text} The end."
    # The engine's tokens stay, even if the text would be tokenised otherwise.
    ids = [*right.prompt_token_ids, *right.outputs[0].token_ids]
    assert state.token_ids[: len(ids)] == ids
    assert llm.tokenizer.decode(state.token_ids) == state.text


def test_text_after_a_token_is_tokenised_as_a_whole(model: LLM | str, llm: LLM) -> None:
    def program(s: lang.State) -> None:
        s += "The fo"
        assert len(s.token_ids) > 1  # tokenised up to here
        s += "x sat"

    assert lang.run(program, model).token_ids == llm.tokenizer.encode("The fox sat")


# What `structured` may be, by a pattern of the texts.
STRUCTURED = {
    "[0-9]{3}": Regex("[0-9]{3}"),
    "red|blue": Choice(["red", "blue"]),
    "a{2,3}": Grammar("start: /a{2,3}/"),
    "true|false": JsonSchema({"type": "boolean"}, strict=True),
    "x{4}": {"regex": "x{4}"},
}


def test_generated_parts_may_be_structured(model: LLM | str) -> None:
    class Animal(BaseModel, extra="forbid"):
        legs: int = Field(ge=0, le=9)

    def program(s: lang.State) -> None:
        s += "The animal: "
        s.gen("kind", choices=["cat", "dog"], **GREEDY)
        s.gen("number", regex="[0-9]{2}", **GREEDY)
        s.gen("animal", schema=Animal, temperature=1.0, seed=1, max_tokens=60)
        for name, structured in STRUCTURED.items():
            s.gen(name, structured=structured, seed=np.int64(1), temperature=1.0)

    state = lang.run(program, model)
    assert state["kind"] in ("cat", "dog") and len(state["number"]) == 2
    for name, structured in STRUCTURED.items():
        assert re.fullmatch(name, state[name]), structured
    Animal.model_validate_json(state["animal"])


def test_a_stop_string_ends_the_text_before_it(model: LLM | str) -> None:
    def program(s: lang.State) -> None:
        s += "Once upon a time"
        s.gen("first", temperature=0.0, max_tokens=60, stop=["."])
        s += "!"

    state = lang.run(program, model)
    assert state["first"] and "." not in state["first"]
    assert state.text == f"Once upon a time{state['first']}!"


@pytest.mark.parametrize("method", ["mean", "sum", "greedy", "unconditional"])
def test_select_scores_the_tokens_of_choices(model: LLM | str, llm: LLM, method: Any) -> None:
    choices = [" a time", " a little time", " xylophone"]

    def program(s: lang.State) -> None:
        s += "Once upon"
        s.select("next", choices, method)

    state = lang.run(program, model)
    prefix = llm.tokenizer.encode("Once upon")
    rows = [llm.tokenizer.encode("Once upon" + choice) for choice in choices]
    scored = llm.score(rows)
    logprobs = [[p.logprob for p in row.prompt_logprobs[len(prefix) :] if p] for row in scored]
    found = list(state.scores["next"].values())
    if method == "sum":
        assert found == pytest.approx([sum(row) for row in logprobs], abs=1e-3)
    if method == "mean":
        assert found == pytest.approx([sum(row) / len(row) for row in logprobs], abs=1e-3)
    if method == "unconditional":
        alone = llm.score([row[len(prefix) :] for row in rows])
        for one, row, other in zip(found, logprobs, alone, strict=True):
            without = sum(p.logprob for p in other.prompt_logprobs or [] if p)
            assert one == pytest.approx((sum(row) - without) / len(row), abs=1e-3)
    assert state["next"] == choices[found.index(max(found))]
    assert state["next"] == " a time" or method == "unconditional"
    assert state.text == "Once upon" + state["next"]


def test_a_conversation_is_rendered_by_the_template(model: LLM | str, llm: LLM) -> None:
    def program(s: lang.State) -> None:
        s.system("Be brief.")
        s.user("Who?")
        s.gen("who", **GREEDY)
        s.user("Why?")
        with s.assistant():
            s += "Because"
            s.gen("why", **GREEDY)

    state = lang.run(program, model)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    (right,) = llm.chat(asked, SamplingParams(**GREEDY))
    assert state["who"] == right.text
    assert state.messages[-1] == {"role": "assistant", "content": "Because" + state["why"]}
    assert state.text == llm.render_chat(state.messages[:-1]) + "Because" + state["why"]


def test_an_exception_ends_the_turn_and_the_conversation_goes_on(model: LLM | str) -> None:
    def program(s: lang.State) -> None:
        s.user("Who?")
        with pytest.raises(ParamError):
            s.gen(temperature=-1.0)
        s.user("Why?")
        with pytest.raises(ZeroDivisionError), s.assistant():
            s += "Because"
            raise ZeroDivisionError
        s.user("Really?")
        s.gen("last", **GREEDY)

    state = lang.run(program, model)
    roles = [message["role"] for message in state.messages]
    assert roles == ["user", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in state.messages[2::2]] == ["Because", state["last"]]


def test_the_common_prefix_of_forks_is_computed_once(llm: LLM) -> None:
    def branch(s: lang.State, number: int) -> None:
        s += f" Number {number}"
        s.gen("rest", temperature=0.0, max_tokens=4)

    def program(s: lang.State) -> None:
        s += "There was a fox and it ran. " * 40
        for number, fork in enumerate(s.fork(5, branch)):
            assert fork.text == f"{s.text} Number {number}{fork['rest']}"
        assert "rest" not in s

    llm.reset_prefix_cache()
    before = llm.stats().work.prefill_tokens
    state = lang.run(program, llm)
    computed = llm.stats().work.prefill_tokens - before
    block = llm.resolved.cache.block_size
    assert computed < len(state.token_ids) + 5 * (block + 10)


def test_a_branch_that_fails_ends_the_others(llm: LLM) -> None:
    begun, rounds = threading.Event(), []

    def branch(s: lang.State, number: int) -> None:
        if number:
            begun.wait(20)
            raise ZeroDivisionError
        for _ in range(10_000):
            s.fork(1)[0].gen(max_tokens=20, ignore_eos=True)
            rounds.append(1)
            begun.set()

    def program(s: lang.State) -> None:
        s += "Once"
        s.fork(2, branch)

    with pytest.raises(ZeroDivisionError):
        lang.run(program, llm)
    assert len(rounds) < 10_000


def test_a_batch_keeps_its_order_and_its_errors(model: LLM | str) -> None:
    def program(s: lang.State, animal: str) -> None:
        if not animal:
            s.gen("rest", temperature=-1.0)
        story(s, animal)

    states = lang.run_batch(program, model, [{"animal": a} for a in ("fox", "", "owl")])
    assert [state.error is None for state in states] == [True, False, True]
    assert isinstance(states[1].error, KvikError)
    assert states[0].text == lang.run(story, model, animal="fox").text


def test_a_stream_yields_the_text_as_it_grows(
    model: LLM | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is slowed down unless the pieces are read."""
    step, read = EngineLoop.step, threading.Semaphore(3)
    pieces: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(EngineLoop, "step", lambda loop: (read.acquire(timeout=0.5), step(loop))[1])
        for piece in lang.stream(story, model, animal="owl"):
            pieces.append(piece)
            read.release(2)
    assert "".join(pieces) == lang.run(story, model, animal="owl").text
    assert len(pieces) > 3


def test_a_closed_stream_ends_its_program(llm: LLM) -> None:
    ended: list[bool] = []

    def program(s: lang.State) -> None:
        try:
            s += "Once"
            s.gen("rest", max_tokens=400, ignore_eos=True)
        finally:
            ended.append(True)

    reader = lang.stream(program, llm)
    assert next(reader) == "Once" and next(reader)
    reader.close()
    assert ended
    with pytest.raises(ParamError, match="temperature"):
        list(lang.stream(lambda s: s.gen("rest", temperature=-1.0), llm))
    with pytest.raises(SystemExit):
        list(lang.stream(lambda s: sys.exit(1), llm))


async def asynchronous(s: lang.State) -> None:
    s += "Once"


def test_select_takes_more_choices_than_a_request(model: LLM | str) -> None:
    def program(s: lang.State) -> None:
        s += "Once"
        s.select("word", [f" {number}" for number in range(130)])

    assert len(lang.run(program, model).scores["word"]) == 130


@pytest.mark.parametrize(
    ("program", "field"),
    [
        (lambda s: s.select("x", []), "choices"),
        (lambda s: s.select("x", ["a", "a"]), "choices"),
        (lambda s: (s.__iadd__("b"), s.select("x", "ab")), "choices"),
        (lambda s: (s.__iadd__("b"), s.select("x", ["a", 5])), "choices"),
        (lambda s: (s.__iadd__("b"), s.select("x", {"a", "c"})), "choices"),
        (lambda s: (s.__iadd__("A"), s.select("x", ["b", "nd"])), "choices"),
        (lambda s: s.select("x", ["a"], "best"), "method"),
        (lambda s: s.fork(-1), "n"),
        (lambda s: s.gen("x"), "prompt"),
        (lambda s: (s.__iadd__("b"), s.gen("x", n=2)), "n"),
        (lambda s: (s.__iadd__("b"), s.gen("x", num_return_sequences=2)), "n"),
        (lambda s: (s.__iadd__("b"), s.gen("x", best_of=2)), "best_of"),
        (lambda s: (s.__iadd__("b"), s.gen("x", max_token=2)), "max_token"),
        (lambda s: s.__iadd__(5), "text"),
        (lambda s: (s.user("a"), s.__iadd__("b")), "text"),
        (lambda s: (s.__iadd__("b"), s.user("a")), "user"),
        (lambda s: (s.__iadd__("b"), s.gen("x", top_p=7.0)), "top_p"),
        (lambda s: (s.__iadd__("b"), s.gen("x", schema=5)), "schema"),
        (lambda s: (s.__iadd__("b"), s.gen("x", regex="a", choices=["b"])), "structured"),
        (asynchronous, "program"),
        (lambda s: (yield s), "program"),
    ],
)
def test_bad_calls_name_the_field(model: LLM | str, program: Any, field: str) -> None:
    with pytest.raises(KvikError) as caught:
        lang.run(program, model)
    assert caught.value.field == field


def test_a_batch_needs_threads(llm: LLM) -> None:
    for threads in (0, -1):
        with pytest.raises(ParamError, match="^threads: "):
            lang.run_batch(story, llm, [], threads=threads)


def test_only_an_llm_or_a_url_is_a_model() -> None:
    with pytest.raises(ParamError, match="model"):
        lang.run(story, None)


def test_an_unreachable_server() -> None:
    with pytest.raises(KvikError, match="url"):
        lang.run(story, "http://127.0.0.1:9")
