"""The headers by which servers share prompts."""

from __future__ import annotations

import pytest

from kvik.core.types import PageSource
from kvik.server.errors import HttpError
from kvik.server.transfer import (
    ALONE,
    PREFILL_HEADER,
    SOURCE_HEADER,
    make_ticket,
    read_ticket,
    transfer_of,
)

SOURCE = PageSource("10.0.0.1", 9000, "gen-1", 192)
TOKEN = b"sixteen characters"


def test_a_ticket_says_where_a_prompt_lies() -> None:
    ticket = make_ticket(SOURCE, TOKEN)
    assert read_ticket(ticket, TOKEN) == SOURCE
    assert transfer_of({SOURCE_HEADER: ticket}, "decode", TOKEN).source == SOURCE
    for role in ("both", "prefill"):
        assert transfer_of({SOURCE_HEADER: ticket}, role, TOKEN) == ALONE


@pytest.mark.parametrize(
    "ticket",
    [
        "",
        "ticket",
        "\xff",
        "=" * 5000,
        make_ticket(SOURCE, b"another secret ..."),
        make_ticket(SOURCE, TOKEN)[:-4],
        "A" + make_ticket(SOURCE, TOKEN)[1:],
        make_ticket(SOURCE, TOKEN)[:-8] + "AAAAAAAA",
    ],
)
def test_one_that_another_made_is_not_followed(
    ticket: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert transfer_of({SOURCE_HEADER: ticket}, "decode", TOKEN).source is None
    assert "kv_token" in caplog.text


@pytest.mark.parametrize("role", ["both", "decode"])
def test_only_a_prefill_server_computes_prompts_for_others(role: str) -> None:
    with pytest.raises(HttpError, match="--role prefill"):
        transfer_of({PREFILL_HEADER: "1"}, role, TOKEN)
    assert transfer_of({PREFILL_HEADER: "1"}, "prefill", TOKEN).lends
