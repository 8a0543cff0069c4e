"""The headers by which servers share prompts."""

from __future__ import annotations

import pytest

from kvik.core.types import Handover, PageSource, RequestReport
from kvik.server.errors import HttpError
from kvik.server.transfer import (
    ALONE,
    MAX_MOVED_TOKENS,
    MAX_RESUMPTION,
    MOVES_HEADER,
    PREFILL_HEADER,
    RESUMED_HEADER,
    SOURCE_HEADER,
    Resumption,
    make_resumption,
    make_ticket,
    prompt_digest,
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


def resumption(tokens: list[int]) -> Resumption:
    report = RequestReport(90.0, 95.0, None, 100.0, 16, 1)
    return Resumption.of(
        Handover(tokens, 1 << 63, SOURCE, report),
        100.0,
        name="gen-1",
        created=7,
        prompt=[1, 2],
        max_tokens=None,
        begun=True,
        num_sent=len(tokens),
    )


def test_what_another_server_is_told_fits_a_header_and_goes_by_its_own_clock() -> None:
    tokens = [(i * 7919) % 250_000 for i in range(MAX_MOVED_TOKENS)]
    header = make_resumption(resumption(tokens), TOKEN)
    assert len(header) <= MAX_RESUMPTION
    told = transfer_of({RESUMED_HEADER: header, MOVES_HEADER: "1"}, "both", TOKEN)
    assert told.moves and told.resumed is not None
    handover = told.resumed.handover(1000.0)
    assert handover.output_token_ids == tokens and handover.source == SOURCE
    report = handover.report
    assert (report.arrival, report.first_scheduled, report.first_token) == (990.0, 995.0, None)
    assert told.resumed.prompt == prompt_digest([1, 2]) != prompt_digest([1, 3])


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("", TOKEN),
        ("nothing", TOKEN),
        (make_resumption(resumption([1]), b"another secret ..."), TOKEN),
        (make_resumption(resumption([1]), b""), b""),
        (make_ticket(SOURCE, TOKEN), TOKEN),
        ("A" + make_resumption(resumption([1]), TOKEN)[1:], TOKEN),
    ],
)
def test_nobody_without_the_secret_lets_a_server_go_on(header: str, token: bytes) -> None:
    with pytest.raises(HttpError, match="kv_token") as error:
        transfer_of({RESUMED_HEADER: header}, "both", token)
    assert error.value.status == 409


def test_a_server_without_the_secret_gives_nothing_away() -> None:
    assert transfer_of({MOVES_HEADER: "1"}, "both", TOKEN).moves
    assert not transfer_of({MOVES_HEADER: "1"}, "both", b"").moves
