"""The playground in a real browser, against the story model."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from helpers import chromium
from helpers.story_site import Site, story_site

from kvik.server.access import read_keys
from kvik.server.app import all_routes
from kvik.server.metrics import RequestMetricsObserver

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium"),
    pytest.mark.skipif(sys.platform != "linux", reason="tried on Linux alone"),
]

LAST = "#messages > :last-child"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with story_site(lambda parts: all_routes(parts, RequestMetricsObserver())) as found:
        yield found


@pytest.fixture
def browser() -> Iterator[chromium.Browser]:
    program = chromium.find()
    assert program is not None
    with chromium.Browser(program) as found:
        yield found


def opened(browser: chromium.Browser, site: Site) -> None:
    browser.go(site.url + "/")
    browser.wait("document.querySelector('#state').innerText === 'ready'")


def at_peace(browser: chromium.Browser, site: Site) -> None:
    """No complaint in the console, and nothing asked of anybody else."""
    assert not browser.errors
    assert browser.urls and all(url.startswith(site.url) for url in browser.urls)


def test_a_conversation_is_streamed(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    browser.type("#say", "A story about a fox")
    browser.press("Enter", 13, "\r")
    browser.wait("document.querySelectorAll('#messages > li').length === 2")
    browser.wait(f"document.querySelector('{LAST}').innerText.length > 20")
    browser.wait("document.querySelector('#stop-chat').disabled", 60)
    assert "A story about a fox" in browser.text("#messages > li")
    assert "tok/s" in browser.text("#figures") or "tokens" in browser.text("#figures")
    at_peace(browser, site)
    site.at_rest()


FROM_THE_END = (
    "(() => { const log = document.querySelector('#messages');"
    " return log.scrollHeight - log.scrollTop - log.clientHeight })()"
)


@pytest.mark.parametrize("scrolls_up", [False, True])
def test_a_long_answer_stays_in_view_unless_the_reader_scrolls_up(
    browser: chromium.Browser, site: Site, scrolls_up: bool
) -> None:
    browser.resize(360, 780, phone=True)  # few words in a line
    opened(browser, site)
    browser.evaluate("document.querySelector('#param-ignore_eos').click()")
    browser.evaluate("document.querySelector('#param-max_tokens').value = 300")
    if scrolls_up:  # once some of the answer has come
        browser.evaluate(
            "new MutationObserver((changes, observer) => {"
            f" if (document.querySelector('{LAST}.assistant')?.innerText.length > 40) {{"
            " document.querySelector('#messages').scrollTop = 0; observer.disconnect() } })"
            ".observe(document.querySelector('#messages'), {childList: true, subtree: true}); 0"
        )
    browser.type("#say", "A story about a fox. " * 25)  # more than the list can show
    browser.press("Enter", 13, "\r")
    browser.wait(f"document.querySelector('{LAST}.assistant')?.innerText.length > 400", 60)
    browser.wait("document.querySelector('#stop-chat').disabled", 60)
    if scrolls_up:
        assert browser.evaluate("document.querySelector('#messages').scrollTop") == 0
        assert browser.evaluate(FROM_THE_END) > 400
    else:
        assert browser.evaluate(FROM_THE_END) < 2
    at_peace(browser, site)


def test_stop_ends_the_request_in_the_engine(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    browser.click("#tab-completion")
    browser.type("#prompt", "Once upon a time")
    browser.evaluate("document.querySelector('#params [type=checkbox]').click()")  # go on and on
    browser.click("#complete")
    browser.wait("document.querySelector('#completions').innerText.length > 40")
    browser.click("#stop-completion")
    browser.wait("document.querySelector('#stop-completion').disabled")
    site.at_rest()
    at_peace(browser, site)


def test_the_engine_is_shown_live(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    browser.wait("document.querySelector('#blocks-words').innerText.includes('held')")
    browser.wait("document.querySelector('#gauges').innerText.includes('running')")
    painted = (
        "(() => { const c = document.querySelector('#blocks');"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " return c.width > 100 && d.some(v => v !== 0) })()"
    )
    browser.wait(painted)
    before = browser.text("#steps-words")
    browser.type("#say", "A story about a dog")
    browser.click("#send")
    browser.wait(f"document.querySelector('#steps-words').innerText !== {before!r}")
    browser.wait("document.querySelector('#stop-chat').disabled", 60)
    browser.evaluate("document.querySelector('#requests-numbers').open = true")
    browser.wait("document.querySelectorAll('#requests-table tr').length > 0")
    at_peace(browser, site)


def test_a_refusal_is_shown(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    browser.type("#say", "word " * 3000)
    browser.click("#send")
    browser.wait("!document.querySelector('#error').hidden")
    assert "context" in browser.text("#error")
    site.at_rest()


def test_every_control_has_a_name_for_screen_readers(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    controls = {"button", "textbox", "spinbutton", "checkbox", "tab", "link", "combobox"}
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in browser.accessible()
        if not node.get("ignored") and node["role"]["value"] in controls
    ]
    assert len(found) > 15
    assert not [role for role, name in found if not name.strip()]


@pytest.mark.parametrize("width", [360, 800])
def test_it_fits_a_narrow_window(browser: chromium.Browser, site: Site, width: int) -> None:
    browser.resize(width, 780, phone=width < 500)
    opened(browser, site)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_a_key_opens_it(browser: chromium.Browser) -> None:
    keys = read_keys(("secret",))
    with story_site(lambda parts: all_routes(parts, RequestMetricsObserver()), keys) as site:
        browser.go(site.url + "/")
        browser.type("#say", "Hello")
        browser.click("#send")
        browser.wait("!document.querySelector('#error').hidden")
        browser.type("#key", "secret")
        browser.evaluate("document.querySelector('#key').dispatchEvent(new Event('change'))")
        browser.type("#say", " there")
        browser.click("#send")
        browser.wait(f"document.querySelector('{LAST}').innerText.length > 20")
        browser.wait("document.querySelector('#state').innerText === 'ready'")
        stored = "localStorage.length + sessionStorage.length + document.cookie.length"
        assert browser.evaluate(stored) == 0
