"""Events as bytes."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvik.server.responses import DONE, HEARTBEAT, HOLE, Template, event, json_event


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
    one = Template(Chunk(HOLE, 3))
    assert one.fill(text) == json_event(Chunk(text, 3))
    assert Template(Chunk(HOLE, 3), "named").fill(text) == json_event(Chunk(text, 3), "named")
    assert b"\n" not in one.fill(text)[:-2]
    assert json.loads(one.fill(text)[6:])["text"] == text


def test_a_template_must_have_its_hole():
    with pytest.raises(ValueError, match="hole"):
        Template(Chunk("x", 1))
