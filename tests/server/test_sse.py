"""Events as bytes."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvik.server.responses import DONE, HEARTBEAT, Template, event, json_event


def test_events():
    assert event(b"{}") == b"data: {}\n\n"
    assert event(b"{}", "ping") == b"event: ping\ndata: {}\n\n"
    assert json_event({"a": "ü\n"}, "x") == 'event: x\ndata: {"a":"ü\\n"}\n\n'.encode()
    assert DONE == b"data: [DONE]\n\n"
    assert HEARTBEAT.startswith(b":")
    assert HEARTBEAT.endswith(b"\n\n")


class Chunk(msgspec.Struct):
    text: object
    index: int
    more: object = None


@pytest.mark.parametrize("text", ["", "plain", 'a "quoted" \\ line\n', "é🦊\u2028\x00", "%b", "{}"])
def test_a_filled_template_is_the_event_it_stands_for(text):
    one = Template(Chunk("<text>", 3), ["<text>"])
    assert one.fill(text) == json_event(Chunk(text, 3))
    two = Template(Chunk("<text>", 3, "<more>"), ["<text>", "<more>"], "named")
    more = {"n": [1, None]}
    assert two.fill(text, more) == json_event(Chunk(text, 3, more), "named")
    assert b"\n" not in one.fill(text)[:-2]
    assert json.loads(one.fill(text)[6:])["text"] == text


def test_a_template_must_have_its_holes():
    with pytest.raises(ValueError, match="hole"):
        Template(Chunk("x", 1), ["<text>"])


def test_every_hole_must_be_filled():
    template = Template(Chunk("<text>", 3, "<more>"), ["<text>", "<more>"])
    with pytest.raises(ValueError):
        template.fill("a", "b", "c")
    with pytest.raises((ValueError, IndexError)):
        template.fill("a")
