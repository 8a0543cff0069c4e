"""Headers by which servers share prompts and move requests."""

from __future__ import annotations

import random
from array import array

import pytest

from kvik.core.types import (
    NEVER,
    FinishReason,
    Handover,
    PageSource,
    RequestDelta,
    RequestReport,
    TokenLogprobs,
)
from kvik.engine.output import OutputSoFar
from kvik.server.errors import HttpError
from kvik.server.transfer import (
    ALONE,
    MAX_MOVED_TOKENS,
    MAX_RESUMPTION,
    MOVES_HEADER,
    PREFILL_HEADER,
    RESUMED_HEADER,
    SOURCE_HEADER,
    MovedOutput,
    Resumption,
    moved_size,
    prompt_digest,
    read_signed,
    signed,
    transfer_of,
)

SOURCE = PageSource("10.0.0.1", 9000, "gen-1", 192)
TOKEN = b"sixteen characters"


def test_a_ticket_has_the_location_of_a_prompt() -> None:
    ticket = signed(SOURCE, TOKEN)
    assert read_signed(ticket, PageSource, TOKEN) == SOURCE
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
        signed(SOURCE, b"another secret ..."),
        signed(SOURCE, TOKEN)[:-4],
        "A" + signed(SOURCE, TOKEN)[1:],
        signed(SOURCE, TOKEN)[:-8] + "AAAAAAAA",
    ],
)
def test_a_forged_ticket_is_ignored(ticket: str, caplog: pytest.LogCaptureFixture) -> None:
    assert transfer_of({SOURCE_HEADER: ticket}, "decode", TOKEN).source is None
    assert "kv_token" in caplog.text


@pytest.mark.parametrize("role", ["both", "decode"])
def test_only_a_prefill_server_computes_prompts_for_others(role: str) -> None:
    with pytest.raises(HttpError, match="--role prefill"):
        transfer_of({PREFILL_HEADER: "1"}, role, TOKEN)
    assert transfer_of({PREFILL_HEADER: "1"}, "prefill", TOKEN).lends


REPORT = RequestReport(90.0, 95.0, None, 100.0, 16, 1)


def scored(tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Return log probabilities of 32 bits, as samplers compute them."""
    draw = random.Random(len(tokens))
    values = iter(array("f", [-20 * draw.random() for _ in range(len(tokens) * (1 + top))]))
    return [
        TokenLogprobs(
            token,
            next(values),
            1 + draw.randrange(5),
            tuple((draw.randrange(250_000), next(values)) for _ in range(top)),
        )
        for token in tokens
    ]


def resumption(*outputs: MovedOutput) -> Resumption:
    return Resumption("gen-1", 7, prompt_digest([1, 2]), None, True, list(outputs))


def moved(
    tokens: list[int], num_sent: int = 0, top: int | None = None, index: int = 0
) -> MovedOutput:
    """Return an output that continues."""
    made = OutputSoFar(tokens, [] if top is None else scored(tokens, top), False)
    return MovedOutput.of(
        index, made, Handover(tokens, 1 << 63, SOURCE, REPORT, index), 100.0, num_sent
    )


def some_tokens(count: int) -> list[int]:
    return [(i * 7919) % 250_000 for i in range(count)]


def test_times_are_converted_to_the_clock_of_the_other_server() -> None:
    tokens = some_tokens(50)
    header = signed(resumption(moved(tokens, NEVER)), TOKEN)
    move = transfer_of({RESUMED_HEADER: header, MOVES_HEADER: "1"}, "both", TOKEN)
    assert move.moves
    (handover,) = move.resumed.handovers(1000.0)
    assert handover.output_token_ids == tokens and handover.source == SOURCE
    report = handover.report
    assert (report.arrival, report.first_scheduled, report.first_token) == (990.0, 995.0, None)
    assert move.resumed.prompt == prompt_digest([1, 2]) != prompt_digest([1, 3])


@pytest.mark.parametrize(("n", "top"), [(1, None), (1, 0), (1, 20), (16, None), (16, 5), (64, 0)])
def test_the_largest_move_fits_a_header(n: int, top: int | None) -> None:
    each = next(c for c in range(9000, 0, -1) if moved_size(n, n * c, top) <= MAX_MOVED_TOKENS)
    outputs = [moved(some_tokens(each), 0, top, i) for i in range(n)]
    assert len(signed(resumption(*outputs), TOKEN)) <= MAX_RESUMPTION


@pytest.mark.parametrize("top", [None, 0, 3])
@pytest.mark.parametrize("num_sent", [0, 4, 9, NEVER])
def test_the_deltas_of_an_output_are_repeated(num_sent: int, top: int | None) -> None:
    tokens = list(range(9))
    known, lacking = moved(tokens, num_sent, top).deltas("gen-1", 0.0)
    assert [t for d in known for t in d.token_ids] == tokens[:num_sent]
    assert [t for d in lacking for t in d.token_ids] == tokens[num_sent:]
    shown = [one for d in lacking for one in d.logprobs or ()]
    assert shown == ([] if top is None else scored(tokens, top)[num_sent:])
    assert not any(d.logprobs or d.finish_reason for d in known)


@pytest.mark.parametrize("by_text", [False, True])
@pytest.mark.parametrize(("num_sent", "has_end"), [(0, False), (3, False), (NEVER, True)])
def test_an_output_that_has_ended_ends_again(num_sent: int, has_end: bool, by_text: bool) -> None:
    """Its last token arrives with its end, except when a stop string ended it."""
    made = OutputSoFar(list(range(5)), [], by_text)
    last = RequestDelta("gen-1", 1, [4], FinishReason.STOP, 4, report=REPORT, complete=True)
    output = MovedOutput.of(1, made, last, 100.0, num_sent)
    assert resumption(moved([]), output).handovers(0.0) == resumption(moved([])).handovers(0.0)
    known, lacking = output.deltas("gen-1", 1000.0)
    assert [t for d in (*known, *lacking) for t in d.token_ids] == list(range(5))
    end = (known if has_end else lacking)[-1]
    assert (end.finish_reason, end.stop_reason, end.complete) == (FinishReason.STOP, 4, True)
    assert end.token_ids == ([] if by_text else [4])
    assert end.report.arrival == 990.0


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("", TOKEN),
        ("nothing", TOKEN),
        (signed(resumption(moved([1])), b"another secret ..."), TOKEN),
        (signed(resumption(moved([1])), b""), b""),
        (signed(SOURCE, TOKEN), TOKEN),
        ("A" + signed(resumption(moved([1])), TOKEN)[1:], TOKEN),
    ],
)
def test_requests_to_continue_need_the_secret(header: str, token: bytes) -> None:
    with pytest.raises(HttpError, match="kv_token") as error:
        transfer_of({RESUMED_HEADER: header}, "both", token)
    assert error.value.status == 409


def test_a_server_without_the_secret_moves_no_request() -> None:
    assert transfer_of({MOVES_HEADER: "1"}, "both", TOKEN).moves
    assert not transfer_of({MOVES_HEADER: "1"}, "both", b"").moves
