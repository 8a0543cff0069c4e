"""Messages on channels: parsed in any chunks, and constrained by the grammar."""

from __future__ import annotations

import json
import random

import pytest
from helpers.grammars import FIRST_MARKER, STOP, MarkedGrammar, tokens_of
from helpers.tools import WEATHER
from jsonschema import validate

from kvik.text.dialects import BY_NAME, ToolFormat
from kvik.text.harmony import MARKERS, HarmonyFormat
from kvik.text.thoughts import Thought
from kvik.text.tool_calls import AnswerDelta
from kvik.text.tool_grammar import AllowedCalls, ToolMode, tool_of

IDS = {marker: FIRST_MARKER + n for n, marker in enumerate(MARKERS)}
FORM = HarmonyFormat(IDS, ())
SPELLED = ToolFormat(BY_NAME["hermes"], IDS, ())  # for its `pieces` and `marked`
TOOLS = {"get_weather": tool_of("get_weather", WEATHER, strict=True)[0]}
FREE = Thought()
ARGUMENTS = '{"city": "Oslo", "days": 2}'

THOUGHT = "<|channel|>analysis<|message|>So 1 < 2.<|end|><|start|>assistant"
SAID = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It is warm."
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}"
LONG = "x" * 300
ROLE_CALL = f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}"


def read(text: str, cut: int = 0, begun: bool | None = None) -> tuple[str, str, str, str]:
    """Return thought, text, name and arguments."""
    text = SPELLED.marked(text)
    one = FORM.parser(begun, TOOLS)
    deltas: list[AnswerDelta] = [*one.push(text[:cut]), *one.push(text[cut:], ends=True)]
    assert len({delta.index for delta in deltas} - {-1}) == one.num_calls
    return (
        "".join(delta.thought for delta in deltas),
        "".join(delta.text for delta in deltas),
        "".join(delta.name for delta in deltas),
        "".join(delta.arguments for delta in deltas),
    )


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        (FINAL, None, ("", "It is warm.", "", "")),
        (THOUGHT + FINAL, None, ("So 1 < 2.", "It is warm.", "", "")),
        (THOUGHT + CALL, None, ("So 1 < 2.", "", "get_weather", ARGUMENTS)),
        (ROLE_CALL, None, ("", "", "get_weather", ARGUMENTS)),
        (THOUGHT + ROLE_CALL + "<|call|>", None, ("So 1 < 2.", "", "get_weather", ARGUMENTS)),
        (THOUGHT + SAID + CALL, None, ("So 1 < 2.", "Let me look.", "get_weather", ARGUMENTS)),
        (SAID + FINAL, None, ("", "Let me look.\n\nIt is warm.", "", "")),
        ("So.<|end|><|start|>assistant" + FINAL, True, ("So.", "It is warm.", "", "")),
        ("warm <|end|>", False, ("", "warm ", "", "")),
        # Other forms are text.
        ("to be or not", None, ("", "to be or not", "", "")),
        ("It is warm.", None, ("", "It is warm.", "", "")),
        ("", None, ("", "", "", "")),
        ("It is<|end|><|start|>assistant" + CALL, None, ("", "It is", "get_weather", ARGUMENTS)),
        (f"<|channel|>{LONG}<|message|>a", None, ("", f"<|channel|>{LONG}<|message|>a", "", "")),
        (f"<|start|>{LONG}<|end|>a", None, ("", f"<|start|>{LONG}a", "", "")),
        (
            "<|channel|>commentary to=functions.other<|message|>{}",
            None,
            ("", "<|channel|>commentary to=functions.other<|message|>{}", "", ""),
        ),
    ],
)
def test_messages_are_separated(
    text: str, begun: bool | None, expected: tuple[str, str, str, str]
) -> None:
    for cut in range(len(text) + 1):
        assert read(text, cut, begun) == expected, cut


def test_truncated_messages_are_no_errors() -> None:
    for text in (THOUGHT + SAID + CALL, ROLE_CALL):
        for end in range(len(text)):
            read(text[:end])
            read(text[:end] + "}<|end|>noise<|message|>" + text[end + 2 :])


def grammar(choice: ToolMode, thought: Thought = FREE) -> MarkedGrammar:
    source = FORM.call_grammar(AllowedCalls(list(TOOLS.values()), choice), thought)
    return MarkedGrammar(source, IDS)


@pytest.mark.parametrize(
    ("choice", "allowed", "refused"),
    [
        (
            "auto",
            [
                FINAL,
                THOUGHT + FINAL,
                CALL,
                THOUGHT + CALL,
                ROLE_CALL,
                SAID + CALL,
                THOUGHT + SAID + CALL,
            ],
            ["Text.", THOUGHT, SAID, CALL.replace("Oslo", "A very long name"), CALL + FINAL],
        ),
        ("required", [CALL, THOUGHT + ROLE_CALL], [FINAL, THOUGHT + FINAL, "", CALL[:-1]]),
        ("none", [FINAL, THOUGHT + FINAL], [CALL, SAID + CALL, ROLE_CALL]),
    ],
)
def test_the_grammar_allows_only_valid_calls(
    choice: ToolMode, allowed: list[str], refused: list[str]
) -> None:
    made = grammar(choice)
    for text in allowed:
        assert made.allows(SPELLED.split(text)), text
    for text in refused:
        assert not made.allows(SPELLED.split(text)), text


def test_a_budget_ends_a_thought_and_a_schema_applies_to_the_answer() -> None:
    made = grammar("auto", Thought(budget=9))
    assert made.allows(SPELLED.split(THOUGHT + FINAL))
    assert not made.allows(SPELLED.split(THOUGHT.replace("So", "Well, so") + FINAL))
    digits = "start: thought /[0-9]+/\n" + FORM.thought_rules(Thought(begun=True))
    inside = MarkedGrammar(digits, IDS)
    behind = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert inside.allows(SPELLED.split(f"So.{behind}12"))
    assert not inside.allows(SPELLED.split(f"So.{behind}twelve"))
    assert FORM.num_thought_tokens([1, 2, IDS["<|end|>"], 3], None) == 3


def test_a_required_call_is_valid_for_any_model() -> None:
    made = grammar("required")
    for seed in range(6):
        drawn = random.Random(seed)
        one, text = made.begin(), ""
        while not one.ended:
            token = drawn.choice(tokens_of(one, made.num_tokens))
            one.append(token)
            if token != STOP:
                text += (
                    chr(token)
                    if token < 128
                    else ""
                    if token < STOP
                    else MARKERS[token - FIRST_MARKER]
                )
            if len(text) > 3000:  # thoughts may be long
                break
        else:
            _, _, name, arguments = read(text)
            assert name == "get_weather"
            validate(json.loads(arguments), WEATHER)


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ({"reasoning_content": "So.", "content": "", "tool_calls": [1]}, "thinking"),
        (
            {
                "reasoning_content": "So.",
                "content": "",
            },
            None,
        ),
        ({"reasoning_content": "So.", "content": "Hm.", "tool_calls": [1]}, None),
    ],
)
def test_a_thought_before_a_call_is_shown_to_the_model(
    message: dict[str, object], key: str | None
) -> None:
    made = FORM.for_template(message)
    assert {**message, **({key: "So."} if key else {})} == made
