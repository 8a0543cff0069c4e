"""Thoughts, text and calls of an answer are separated in any chunks of the text."""

from __future__ import annotations

import pytest
from helpers.grammars import (
    FIRST_MARKER,
    STOP,
    MarkedGrammar,
    accepts,
    byte_vocabulary,
    matcher,
    structure,
    tokens_of,
)

from kvik.core.structured import Constraint
from kvik.text.answer_format import MarkedFormat
from kvik.text.dialects import BY_NAME, ToolFormat
from kvik.text.grammar import GrammarVocabulary, TokenBytes, translate
from kvik.text.matcher import GrammarMatcher
from kvik.text.thoughts import AnswerParser, Thought, ThoughtFormat
from kvik.text.tokenizer import Tokenizer
from kvik.text.tool_calls import AnswerDelta, ToolCallParser
from kvik.text.tool_grammar import AllowedCalls, ToolMode, tool_of

FORMAT = ThoughtFormat("<think>", "</think>")
TOKENS = ThoughtFormat("<think>", "</think>", {"<think>": 7, "</think>": 8})
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def parser(
    begun: bool | None, *, form: ThoughtFormat = FORMAT, tools: bool = False
) -> AnswerParser:
    calls = None
    if tools:
        tool, _ = tool_of("f", None, strict=False)
        calls = ToolCallParser(ToolFormat(BY_NAME["hermes"], {}, ()), {"f": tool})
    opener = "<tool_call>" if tools else ""
    return AnswerParser(form, begun, calls, opener)


def read(one: AnswerParser, *parts: str) -> tuple[str, str, str]:
    """Return thought, text and arguments."""
    deltas: list[AnswerDelta] = [delta for part in parts for delta in one.push(part)]
    deltas += one.push("", ends=True)
    return (
        "".join(delta.thought for delta in deltas),
        "".join(delta.text for delta in deltas),
        "".join(delta.arguments for delta in deltas),
    )


@pytest.mark.parametrize(
    ("begun", "text", "thought", "answer"),
    [
        (None, "<think>\nWell, 1 < 2.\n</think>\n\nYes.", "Well, 1 < 2.", "Yes."),
        (None, "\n<think>a</think>b", "a", "b"),
        (None, "Yes. <think> is a tag.", "", "Yes. <think> is a tag."),
        (None, "<thin air>", "", "<thin air>"),
        (None, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (None, "<think>no end", "no end", ""),
        (None, "", "", ""),
        (True, "So it is.\n</think>\n\nYes.", "So it is.", "Yes."),
        (True, "So it is </thin", "So it is </thin", ""),
        (True, "a</think>b</think>c", "a", "b</think>c"),
        (False, "<think>a</think>", "", "<think>a</think>"),
    ],
)
@pytest.mark.whole
@pytest.mark.parametrize("form", [FORMAT, TOKENS], ids=["spelled", "tokens"])
def test_thoughts_are_separated(
    begun: bool | None, text: str, thought: str, answer: str, form: ThoughtFormat
) -> None:
    for marker, token in form.ids.items():
        text = text.replace(marker, form.marks[token])
    assert read(parser(begun, form=form), text) == (thought, answer, "")
    assert read(parser(begun, form=form), *text) == (thought, answer, "")
    for cut in range(len(text)):
        parts = text[:cut], text[cut:]
        assert read(parser(begun, form=form), *parts) == (thought, answer, ""), cut


def test_markers_of_calls_in_a_thought_are_spelled_out() -> None:
    tool, _ = tool_of("f", None, strict=False)
    calls = ToolFormat(BY_NAME["hermes"], {"<tool_call>": 1, "</tool_call>": 2}, ())
    one = AnswerParser(TOKENS, True, ToolCallParser(calls, {"f": tool}), calls.marks[1])
    assert read(one, f"a{calls.marks[2]}b") == ("a</tool_call>b", "", "")


def test_calls_follow_thoughts_and_end_them() -> None:
    behind = f"<think>\nI <tool call?\n</think>\n\nNow:\n{CALL}"
    within = f"<think>\nI <tool call?\n{CALL}"
    for cut in range(len(behind)):
        found = read(parser(None, tools=True), behind[:cut], behind[cut:])
        assert found == ("I <tool call?", "Now:", '{"a": 1}'), cut
    for cut in range(len(within)):
        found = read(parser(None, tools=True), within[:cut], within[cut:])
        assert found == ("I <tool call?", "", '{"a": 1}'), cut


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
def test_the_opener_of_a_call_ends_a_thought(tokens: bool) -> None:
    """But not its budget, nor if calls are not allowed."""
    names = ["<think>", "</think>", "<tool_call>", "</tool_call>"] if tokens else []
    ids = {text: FIRST_MARKER + i for i, text in enumerate(names)}
    thoughts = ThoughtFormat("<think>", "</think>", dict(list(ids.items())[:2]))
    calls = ToolFormat(BY_NAME["hermes"], dict(list(ids.items())[2:]), ())
    form = MarkedFormat(thoughts, calls)
    tool, _ = tool_of("f", {}, strict=False)

    def allows(choice: ToolMode, text: str, begun: bool = False, budget: int | None = None) -> bool:
        thought = Thought(begun, budget)
        source = form.call_grammar(AllowedCalls([tool], choice), thought)
        whole = ToolFormat(BY_NAME["hermes"], ids, ())
        return MarkedGrammar(source, ids).allows(whole.split(text))

    for choice in ("auto", "required"):
        assert allows(choice, f"<think>so{CALL}") and allows(choice, f"so{CALL}", begun=True)
        assert allows(choice, f"<think>so</think>\n\n{CALL}") and allows(choice, CALL)
        assert not allows(choice, "so", begun=True)
        if tokens or choice == "required":  # spelled out, it may be text
            assert not allows(choice, "<think>so")
    assert allows("auto", "<think>so</think>yes") and not allows("required", "<think>a</think>b")
    assert not allows("none", f"<think>so{CALL}") and allows("none", "<think>so</think>yes")
    if tokens:
        assert allows("auto", f"<think>so{CALL}", budget=2)
        assert not allows("auto", f"<think>so {CALL}", budget=2)
        opener, close = ids["<tool_call>"], ids["</think>"]
        first = ids["<think>"]
        assert form.num_thought_tokens([first, 1, 2, opener, 4], None) == 3
        assert form.num_thought_tokens([first, 1, 2, opener, 4, close], None) == 3
        assert form.num_thought_tokens([first, 1, close, 4], None) == 3
        assert form.num_thought_tokens([1, 2], True) == 2
        assert form.num_thought_tokens([1, 2], None) == 0


def test_markers_that_are_tokens_only_count_as_tokens() -> None:
    first, last = TOKENS.marks[7], TOKENS.marks[8]
    text = f"{first}A </think> is a tag.{last}\n\nYes."
    assert read(parser(None, form=TOKENS), text) == ("A </think> is a tag.", "Yes.", "")
    assert read(parser(None, form=TOKENS), "<think>a</think>") == ("", "<think>a</think>", "")


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("user: hi\nassistant: <think>\n", True),
        ("user: hi\nassistant: <think>\n\n</think>\n\n", False),
        ("user: hi <think>\nassistant: ", None),
    ],
)
def test_the_end_of_the_prompt_tells_whether_one_is_open(prompt: str, begun: bool | None) -> None:
    assert FORMAT.begun(prompt) is begun


@pytest.mark.parametrize(
    ("begun", "allowed", "refused"),
    [
        (None, ["<think>so</think>\n\n12", "<think></think>3", "7"], ["<think>so</think>", "so 1"]),
        (True, ["so 1</think>\n\n12", "</think>4"], ["12", "so</think>x"]),
    ],
)
def test_constraints_on_an_answer_begin_after_the_thought(
    begun: bool | None, allowed: list[str], refused: list[str]
) -> None:
    for value in ({"regex": "[0-9]+"}, {"json": {"type": "integer"}}):
        rules = FORMAT.rules(Thought(begun is True))
        constraint = structure(value).within(f"start: thought @answer\n{rules}")
        grammar, _ = translate(constraint, byte_vocabulary())
        start = byte_vocabulary().build(grammar)

        def one() -> GrammarMatcher:
            return GrammarMatcher(start, byte_vocabulary().stop, [STOP])  # noqa: B023

        assert all(accepts(one(), text) for text in allowed)
        assert not any(accepts(one(), text) for text in refused)
    assert not accepts(matcher({"regex": "[0-9]+"}), "<think>so</think>1")


@pytest.mark.parametrize(
    ("template", "open_"),
    [
        ("{{ '<think>' }}{{ '</think>' }}", "<think>"),
        ("[THINK] {{ x }} [/THINK]", "[THINK]"),
        ("{{ x }}", None),
    ],
)
def test_markers_are_found_in_a_template(build, template: str, open_: str | None) -> None:
    found = ThoughtFormat.of(template, Tokenizer(build("byte-level")))
    assert (found and found.open) == open_


def test_a_budget_ends_a_thought_and_not_the_answer() -> None:
    texts = [bytes([i]) for i in range(256)] + [b"\xff<end>", b"\xff<think>", b"\xff</think>"]
    vocabulary = GrammarVocabulary(TokenBytes(texts, [256, 257, 258]))
    form = ThoughtFormat("<think>", "</think>", {"<think>": 257, "</think>": 258})
    rules = form.rules(Thought(budget=4))
    free = Constraint("lark", form.anything).within(f"start: thought @answer\n{rules}")
    start = vocabulary.build(translate(free, vocabulary)[0])
    for supposed in (False, True):
        one = GrammarMatcher(start, vocabulary.stop, [256], counts=True)
        one.append(257)
        for token in b"abcd":
            assert 258 in tokens_of(one, 259)
            one.append(token)
        drafts = [258, ord("x")] if supposed else []
        assert tokens_of(one, 259) == [258]
        assert len(tokens_of(one, 259, drafts)) > 100 or not supposed
        for token in [258, *b"and a long answer"]:
            one.append(token)
        assert 256 in tokens_of(one, 259)
