"""`kvik top`: show what a running server is doing, in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvik.cli.flags import Parser, number
from kvik.cli.terminal import output_console, visible
from kvik.config.units import show_bytes
from kvik.errors import KvikError
from kvik.remote_server import RemoteServer, add_key_flag

Frame = dict[str, Any]  # JSON of `EngineFacts`; parameters named `live` are its field of that name

MAX_ROWS, MAX_SHOWN_WAITING = 40, 8  # requests
BAR_WIDTH = 24  # characters: the line of a request then fits into 80
LEVELS = " ▁▂▃▄▅▆▇█"
SPANS = (("queued", "░", "yellow"), ("prefill", "▒", "cyan"), ("decode", "█", "green"))
STYLES = {
    "ready": "bold green",
    **dict.fromkeys(("starting", "restarting", "asleep"), "bold yellow"),
}


def picture(frame: Frame, width: int, rows: int = MAX_ROWS, trouble: str = "") -> RenderableType:
    """Return an answer of /v1/engine as text, with at most `rows` requests."""
    live = frame["live"]
    if live is None:
        return Group(header(frame, trouble), Text("no figures: the engine does not answer now"))
    return Group(
        header(frame, trouble),
        figures(live),
        kv_use(live),
        *replicas(frame.get("replicas", ())),
        *moves(live),
        *steps(live["steps"], width),
        requests(live, rows),
        queue(live),
    )


def header(frame: Frame, trouble: str = "") -> Text:
    state, live = str(frame["state"]), frame["live"]
    line = Text.assemble(
        (f"kvik {plain(frame['model'])}  ", "bold"),
        ("lost", "bold red") if trouble else (plain(state), STYLES.get(state, "bold red")),
    )
    if live is not None:
        spent = live["stats"]["time"]
        up = spent["executor"] + spent["host"] + spent["idle"]
        line.append(f"  up {duration(up)}  {live['stats']['steps']:,} steps")
    reason = trouble or plain(frame.get("reason", ""))
    return line.append(f"\n{reason}", "red") if reason else line


def figures(live: Frame) -> Text:
    rates, stats = live["rates"], live["stats"]
    looked_up = stats["prefix_queries"]
    hits = f"{stats['prefix_hits'] / looked_up:.0%}" if looked_up else "-"
    return Text.assemble(
        ("decode ", "dim"), f"{rates['decode_tokens']:,.0f} tok/s  ",
        ("prefill ", "dim"), f"{rates['prefill_tokens']:,.0f} tok/s  ",
        ("steps ", "dim"), f"{rates['steps']:,.0f}/s\n",
        ("running ", "dim"), f"{stats['num_running']}  ",
        ("waiting ", "dim"), f"{stats['num_waiting']}  ",
        ("prefix hits ", "dim"), f"{hits}  ",
        ("preemptions ", "dim"), f"{stats['preemptions']}",
        *((("  threads ", "dim"), f"{stats['threads']}") if stats.get("threads") else ()),
    )  # fmt: skip


def kv_use(live: Frame) -> Text:
    blocks, usage = live["blocks"], live["stats"]["kv_usage"]
    full = min(BAR_WIDTH, max(round(usage * BAR_WIDTH), usage > 0))
    style = "red" if usage > 0.9 else "green"
    num_returned = live["stats"].get("given_back_blocks", 0)  # a server may be older
    return Text.assemble(
        ("KV ", "dim"), ("█" * full, style), ("░" * (BAR_WIDTH - full), "dim"),
        f" {usage:.0%}: {blocks['num_blocks'] - blocks['num_free']:,} of"
        f" {blocks['num_blocks']:,} blocks, {blocks['num_cached']:,} cached"
        + (f", {num_returned:,} given back" if num_returned else ""),
    )  # fmt: skip


def replicas(frames: Sequence[Frame]) -> Iterator[Table]:
    """Yield a table if there are several engines."""
    if not frames:
        return
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for title in ("replica", "state", "running", "waiting", "KV", "hits", "decode", "prefill"):
        table.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
    for frame in frames:
        state, stats, rates = plain(frame["state"]), frame["stats"], frame["rates"]
        shown = "draining" if frame["draining"] and state == "ready" else state
        cells = ["-"] * 6
        if stats is not None:
            looked_up = stats["prefix_queries"]
            cells = [
                str(stats["num_running"]),
                str(stats["num_waiting"]),
                f"{stats['kv_usage']:.0%}",
                f"{stats['prefix_hits'] / looked_up:.0%}" if looked_up else "-",
                f"{rates['decode_tokens']:,.0f}/s",
                f"{rates['prefill_tokens']:,.0f}/s",
            ]
        table.add_row(str(frame["number"]), Text(shown, STYLES.get(state, "bold red")), *cells)
    yield table


def moves(live: Frame) -> list[Text]:
    """Return a line about the tiers of the KV cache, if there are any."""
    moves = live["stats"].get("moves")  # a server may be older
    if not moves:
        return []
    totals = moves["totals"]
    tiers = [
        plain(tier["name"])
        + (
            f" {show_bytes(tier['bytes'])} of {show_bytes(tier['capacity'])}"
            if tier["capacity"]
            else f" {tier['loaded']:,} pages"  # of other engines
        )
        + (f" at {tier['bytes_per_second'] / 1e9:.1f} GB/s" if tier["bytes_per_second"] else "")
        for tier in moves["tiers"]
    ]
    if moves["off"]:
        tiers.append(f"disk off: {plain(moves['off'])}")
    return [
        Text.assemble(
            ("tiers ", "dim"), f"{', '.join(tiers)}  ",
            ("loaded ", "dim"), f"{totals['loaded_tokens']:,} tokens  ",
            ("load or compute ", "dim"),
            f"{totals['load_choices']:,}/{totals['compute_choices']:,}  ",
            ("lent ", "dim"), f"{totals.get('lent_tokens', 0):,} tokens  ",
            ("swapped out, in ", "dim"), f"{totals['swapped_out']:,}, {totals['swapped_in']:,}",
        )
    ]  # fmt: skip


def steps(columns: Frame, width: int) -> tuple[Text, Text]:
    """Return a line for prompts and one for outputs: tokens of recent steps, newest at the
    right."""
    chart_width = max(1, width - 30)
    decode = columns["decode_tokens"][-chart_width:]
    prefill = columns["prefill_tokens"][-chart_width:]
    return (
        Text.assemble(("prefill ", "dim"), (sparkline(prefill), "cyan"), top_of(prefill)),
        Text.assemble(("decode  ", "dim"), (sparkline(decode), "green"), top_of(decode)),
    )


def sparkline(values: Sequence[int]) -> str:
    """Return a character for each value, blank only for 0."""
    peak = max(values, default=0) or 1
    return "".join(LEVELS[-(-value * (len(LEVELS) - 1) // peak)] for value in values)


def top_of(values: Sequence[int]) -> str:
    return f" up to {max(values, default=0):,} a step"


def requests(live: Frame, rows: int) -> Table:
    """Return the first `rows` running requests, on one time axis that ends now."""
    shown, now = live["running"][:rows], live["now"]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for title in ("request", "phase", "tokens", *(name for name, _, _ in SPANS)):
        table.add_column(title, justify="left" if title == "phase" else "right", no_wrap=True)
    since = min((request["arrival"] for request in shown), default=now)
    table.add_column(f"the last {duration(now - since)}", no_wrap=True)
    for request in shown:
        table.add_row(
            str(request["number"]),
            plain(request["phase"]),
            f"{request['prompt_tokens']}+{request['output_tokens']}",
            *(duration(end - begin) for begin, end in spans(request, now)),
            waterfall(request, since, now),
        )
    return table


def spans(request: Frame, now: float) -> tuple[tuple[float, float], ...]:
    """Return begin and end of the time in the queue, in prefill and in decode; a phase that has not
    begun is empty."""
    scheduled = request["first_scheduled"] if request["first_scheduled"] is not None else now
    token = request["first_token"] if request["first_token"] is not None else now
    return (request["arrival"], scheduled), (scheduled, token), (token, now)


def waterfall(request: Frame, since: float, now: float) -> Text:
    """Return a bar with at least one character for each span of positive length, if they fit."""
    scale = BAR_WIDTH / max(now - since, 1e-9)
    bar = Text()
    for (begin, end), (_, letter, style) in zip(spans(request, now), SPANS, strict=True):
        place = min(BAR_WIDTH - 1, int((begin - since) * scale))
        if end > begin:
            bar.append(" " * (place - len(bar)))
            bar.append(letter * (max(place + 1, round((end - since) * scale)) - len(bar)), style)
    return bar


def queue(live: Frame) -> Text:
    waiting, now, all_of_them = live["waiting"], live["now"], live["stats"]["num_waiting"]
    if not all_of_them:
        return Text("queue: empty", "dim")
    shown = [f"{r['number']} ({duration(now - r['arrival'])})" for r in waiting[:MAX_SHOWN_WAITING]]
    more = all_of_them - len(shown)
    return Text(f"queue: {', '.join(shown)}{f' and {more} more' if more > 0 else ''}")


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} m" if minutes >= 60 else f"{minutes} m {rest:02} s"


def plain(text: object) -> str:
    """Return text in one line of bounded length, without control characters."""
    return visible(" ".join(str(text)[:200].split()))


PATH = "/v1/engine"
TIMEOUT = 5.0  # seconds of silence of the server
MAX_BYTES = 1 << 24
MIN_INTERVAL, MAX_INTERVAL = 0.1, 3600.0
LINES_ABOVE = 12  # of a frame that are not rows of requests
MIN_ROWS = 3


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("top", "[--url URL]", "Watch a running server. q or Ctrl-C quits.")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)"
    )
    add_key_flag(parser, "key of an administrator, if the server has keys")
    parser.add_argument(
        "--interval",
        type=number,
        default=0.5,
        metavar="S",
        help="seconds between frames (default: %(default)s)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print one frame (the default without a terminal)"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    interval: float = arguments.interval
    if not MIN_INTERVAL <= interval <= MAX_INTERVAL:
        raise KvikError("interval", f"must be {MIN_INTERVAL} to {MAX_INTERVAL:.0f} seconds")
    server = RemoteServer.at(arguments.url, arguments.api_key)
    first = ask(server)
    console = output_console()
    if arguments.once or not console.is_terminal:
        console.print(picture(first, console.width))
        return 0
    with (
        suppress(KeyboardInterrupt),
        pressed_keys() as leaves,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        for frame, trouble in frames(lambda: ask(server), first, lambda: leaves(interval)):
            rows = max(MIN_ROWS, console.height - LINES_ABOVE)
            live.update(picture(frame, console.width, rows, trouble), refresh=True)
    return 0


def sleeps(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextmanager
def pressed_keys() -> Iterator[Callable[[float], bool]]:
    """Take keys without Enter and without echo until the block ends; yield leaves(seconds), which
    waits for a key that long and returns whether it was q."""
    if not sys.stdin.isatty():
        yield sleeps
        return
    keyboard = sys.stdin.fileno()

    def leaves(seconds: float) -> bool:
        ready, _, _ = select.select([keyboard], [], [], seconds)
        keys = os.read(keyboard, 1024) if ready else b" "
        return not keys or b"q" in keys.lower()  # no keys: the terminal hung up

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield leaves
    finally:
        termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)


def ask(server: RemoteServer) -> Frame:
    """Return a frame from the server; raise KvikError if there is no answer, or it is unusable."""
    try:
        connection = server.connection(TIMEOUT)
        try:
            connection.request("GET", server.target(PATH), headers=dict(server.headers))
            answer = connection.getresponse()
            status, body = answer.status, answer.read(MAX_BYTES)
        finally:
            connection.close()
    except (OSError, HTTPException, ValueError) as error:  # ValueError: an invalid host name
        reason = plain(str(error) or type(error).__name__)
        raise KvikError("url", f"no server answers at {plain(server.url)} ({reason})") from None
    return read(status, body)


def read(status: int, body: bytes) -> Frame:
    """Return the frame in an answer; raise KvikError if it has none."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if status == 200 and isinstance(answer, dict) and {"model", "state", "live"} <= answer.keys():
        return answer
    error = answer.get("error") if isinstance(answer, dict) else None
    fields = error if isinstance(error, dict) else {}
    message = plain(str(fields.get("message", "")))
    if status == 401 or fields.get("code") == "admin_key_needed":
        raise KvikError("api_key", message or "the server does not accept it")
    if status in (200, 404):
        raise KvikError("url", f"the server there has no {PATH}: it is not kvik")
    raise KvikError("url", f"the server answers with status {status} {message}".rstrip())


def frames(
    ask: Callable[[], Frame], first: Frame, leaves: Callable[[], bool]
) -> Iterator[tuple[Frame, str]]:
    """Yield, until the user leaves, the last frame and the reason why there is no newer one ("" if
    there is)."""
    frame, trouble = first, ""
    while True:
        yield frame, trouble
        if leaves():
            return
        try:
            frame, trouble = ask(), ""
        except KvikError as error:
            trouble = str(error)
