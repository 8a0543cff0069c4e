"""The playground in a real browser, with the story model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import pytest
from helpers import chromium
from helpers.story_site import Site, every_route, site_fixture, story_site

from kvik.server.access import read_keys

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium"),
    pytest.mark.skipif(sys.platform != "linux", reason="tried on Linux alone"),
]


LAST = "#messages > :last-child"
NO_STORAGE = {
    "forbidden": (
        "Object.defineProperty(window, 'localStorage',"
        " {get() { throw new DOMException('no', 'SecurityError') }})"
    ),
    "full": (
        "Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError') }"
    ),
}


site = site_fixture()


@pytest.fixture(scope="module")
def shared() -> Iterator[chromium.Browser]:
    with chromium.Browser(chromium.find()) as found:
        yield found


@pytest.fixture
def browser(shared: chromium.Browser) -> chromium.Browser:
    shared.renew()
    return shared


def opened(browser: chromium.Browser, site: Site, page: str = "/") -> None:
    browser.go(site.url + page)
    browser.wait("document.querySelector('#state').innerText === 'ready'")


def at_peace(browser: chromium.Browser, site: Site) -> None:
    """Check that the console has no errors, and that only this server was contacted."""
    assert not browser.errors
    assert browser.urls and all(url.startswith(site.url) for url in browser.urls)


def asked(browser: chromium.Browser, text: str) -> str:
    """Send a message, and return the complete answer."""
    browser.type("#say", text)
    browser.press("Enter", 13, "\r")
    return answered(browser)


def answered(browser: chromium.Browser) -> str:
    browser.wait("document.querySelector('#stop-chat').hidden", 60)
    return browser.text(f"{LAST} .body")


def set_field(browser: chromium.Browser, name: str, value: object) -> None:
    browser.evaluate(
        f"(() => {{ const field = document.querySelector('#param-{name}');"
        f" if (field.type === 'checkbox') field.checked = {json.dumps(value)};"
        f" else field.value = {json.dumps(value)};"
        " field.dispatchEvent(new Event('input', {bubbles: true})) })()"
    )


def listed(browser: chromium.Browser) -> list[str]:
    """Return the titles of the stored conversations."""
    found: list[str] = browser.evaluate(
        "[...document.querySelectorAll('#conversations a span')].map((one) => one.textContent)"
    )
    return found


def seeded(browser: chromium.Browser, site: Site, text: str) -> None:
    """Open a conversation that ends with this answer."""
    script = (
        "(async () => { const { Conversation } = await import('/ui/conversation.js');"
        " const made = new Conversation('seeded');"
        " made.add(made.add(made.root, 'user', 'A question'), 'assistant', TEXT);"
        " localStorage.setItem('kvik.conversation.seeded', JSON.stringify(made)) })()"
    )
    opened(browser, site)
    browser.evaluate(script.replace("TEXT", json.dumps(text)))
    browser.go(site.url + "/docs")
    opened(browser, site, "/#seeded")


# -- the chat --------------------------------------------------------------------------------------


def test_a_conversation_is_streamed(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    answer = asked(browser, "A story about a fox")
    assert len(answer) > 20
    assert browser.evaluate("document.querySelectorAll('#messages > li').length") == 2
    assert "A story about a fox" in browser.text("#messages > li")
    assert "tokens" in browser.text(f"{LAST} .tools")
    at_peace(browser, site)
    site.at_rest()


FROM_THE_END = (
    "(() => { const log = document.querySelector('#log');"
    " return log.scrollHeight - log.scrollTop - log.clientHeight })()"
)


@pytest.mark.parametrize("scrolls_up", [False, True])
def test_a_long_answer_stays_in_view_unless_the_reader_scrolls_up(
    browser: chromium.Browser, site: Site, scrolls_up: bool
) -> None:
    browser.resize(360, 560, phone=True)  # few words per line
    opened(browser, site)
    set_field(browser, "ignore_eos", True)
    set_field(browser, "max_tokens", 300)
    if scrolls_up:  # after a part of the answer
        browser.evaluate(
            "new MutationObserver((changes, observer) => {"
            f" if (document.querySelector('{LAST}.assistant')?.innerText.length > 40) {{"
            " document.querySelector('#log').scrollTop = 0; observer.disconnect() } })"
            ".observe(document.querySelector('#messages'),"
            " {childList: true, characterData: true, subtree: true}); 0"
        )
    asked(browser, "A story about a fox.\n" * 25)  # more than the list can show
    browser.wait(f"document.querySelector('{LAST}.assistant')?.innerText.length > 400", 60)
    if scrolls_up:
        assert browser.evaluate("document.querySelector('#log').scrollTop") == 0
        assert browser.evaluate(FROM_THE_END) > 400
        browser.click("#to-end")
    assert browser.evaluate(FROM_THE_END) < 2
    at_peace(browser, site)


def test_enter_sends_shift_enter_does_not_and_escape_stops(
    browser: chromium.Browser, site: Site
) -> None:
    opened(browser, site)
    set_field(browser, "ignore_eos", True)
    browser.type("#say", "A story")
    browser.press("Enter", 13, "\r", modifiers=8)  # with Shift
    assert browser.evaluate("document.querySelector('#say').value") == "A story\n"
    browser.press("Enter", 13, "\r")
    browser.wait(f"document.querySelector('{LAST}.assistant')?.innerText.length > 40", 60)
    browser.press("Escape", 27)
    browser.wait("document.querySelector('#stop-chat').hidden")
    site.at_rest()
    assert browser.evaluate(f"!document.querySelector('{LAST} .end').hidden")
    at_peace(browser, site)


def test_an_answer_satisfies_the_schema_of_the_settings(
    browser: chromium.Browser, site: Site
) -> None:
    opened(browser, site)
    set_field(browser, "json_schema", '{"enum": [17, 23]}')
    assert asked(browser, "How many foxes?").strip() in ("17", "23")


def test_another_answer_and_an_edited_message_are_versions(
    browser: chromium.Browser, site: Site
) -> None:
    opened(browser, site)
    set_field(browser, "max_tokens", 20)
    first = asked(browser, "A story about a fox")
    browser.click(f"{LAST} .tools > button:nth-of-type(2)")
    second = answered(browser)
    assert second != first
    assert browser.text(f"{LAST} .versions").strip() == "2 / 2"
    browser.click(f"{LAST} .versions button:first-child")
    assert browser.text(f"{LAST} .body") == first

    browser.click(".user .tools > button:nth-of-type(2)")
    browser.evaluate("document.querySelector('.edit textarea').select()")
    browser.command("Input.insertText", text="A story about a cat")
    browser.press("Enter", 13, "\r")
    third = answered(browser)
    assert browser.text(".user .body") == "A story about a cat"
    assert browser.evaluate("document.querySelectorAll('#messages > li').length") == 2
    browser.click(".user .versions button:first-child")
    assert browser.text(".user .body") == "A story about a fox"
    assert browser.text(f"{LAST} .body") == first != third
    at_peace(browser, site)
    site.at_rest()


def test_several_answers_at_once_are_versions(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    set_field(browser, "n", 3)
    set_field(browser, "max_tokens", 12)
    set_field(browser, "logprobs", True)
    asked(browser, "A story about a fox")
    assert browser.text(f"{LAST} .versions").strip() == "1 / 3"
    tokens = f"document.querySelectorAll('{LAST} .tokens .token').length"
    assert browser.evaluate(tokens) > 5
    browser.click(f"{LAST} .versions button:last-child")
    assert browser.text(f"{LAST} .versions").strip() == "2 / 3"
    assert browser.evaluate(tokens) > 5
    at_peace(browser, site)


def test_conversations_run_at_the_same_time(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    set_field(browser, "ignore_eos", True)
    set_field(browser, "max_tokens", 200)
    for animal in ("fox", "cat"):
        browser.evaluate("document.querySelector('#new').click()")
        browser.type("#say", f"A story about a {animal}")
        browser.press("Enter", 13, "\r")
    whole = "document.querySelector('#stop-chat').hidden"
    for animal in ("fox", "cat"):
        title = f"A story about a {animal}"
        browser.evaluate(f"document.querySelector('#conversations [title=\"{title}\"]').click()")
        browser.wait(whole, 60)
        assert browser.text(".user .body") == title
        assert len(browser.text(f"{LAST} .body")) > 300
        assert "tokens" in browser.text(f"{LAST} .tools")
    at_peace(browser, site)
    site.at_rest()


def test_reasoning_is_folded_away(browser: chromium.Browser, site: Site) -> None:
    for text in ("<think>\nof *it*\n</think>\n\nThe answer", "of *it*\n</think>\n\nThe answer"):
        seeded(browser, site, text)
        assert not browser.evaluate(f"document.querySelector('{LAST} details').open")
        folded = f"document.querySelector('{LAST} details .prose').innerHTML"
        assert browser.evaluate(folded) == "<p>of <em>it</em></p>"
        assert browser.text(f"{LAST} .body > .prose") == "The answer"


ANSWER_WITH = """(() => {
  const asked = window.fetch;
  const lines = EVENTS.map((event) => `data: ${JSON.stringify(event)}\\n\\n`).join('');
  window.fetch = (path, options) =>
    path.includes('chat') ? Promise.resolve(new Response(lines)) : asked(path, options) })()"""


def choice(index: int, text: str, reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": reason}]}


def test_answers_come_in_any_order(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    events = [choice(2, "third"), choice(0, "fir"), choice(1, "second"), choice(0, "st", "length")]
    browser.evaluate(ANSWER_WITH.replace("EVENTS", json.dumps(events)))
    assert asked(browser, "A question") == "first"
    assert browser.text(f"{LAST} .versions").strip() == "1 / 3"
    assert browser.evaluate(f"!document.querySelector('{LAST} .end').hidden")
    shown = []
    for _ in range(2):
        browser.click(f"{LAST} .versions button:last-child")
        shown.append(browser.text(f"{LAST} .body"))
    assert sorted(shown) == ["second", "third"]


def test_reasoning_in_its_own_field_is_folded_away(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    thought = {"index": 0, "delta": {"reasoning_content": "hmm"}, "finish_reason": None}
    events = [{"choices": [thought]}, choice(0, "an "), choice(0, "answer", "stop")]
    browser.evaluate(ANSWER_WITH.replace("EVENTS", json.dumps(events)))
    assert "an answer" in asked(browser, "A question")
    assert "hmm" in browser.evaluate(f"document.querySelector('{LAST} details').textContent")


def test_text_before_an_error_is_kept(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    events = [choice(0, "half an"), {"error": {"message": "the engine stopped"}}]
    browser.evaluate(ANSWER_WITH.replace("EVENTS", json.dumps(events)))
    assert asked(browser, "A question") == "half an"
    assert browser.text(f"{LAST} .end") == browser.text("#error") == "the engine stopped"
    assert listed(browser) == ["A question"]


def test_a_refusal_is_shown_and_the_message_restored(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    browser.type("#say", "word " * 3000)
    browser.click("#send")
    browser.wait("!document.querySelector('#error').hidden")
    assert "context" in browser.text("#error")
    assert browser.evaluate("document.querySelector('#say').value.length") > 10_000
    assert not listed(browser)
    site.at_rest()


def test_stop_ends_the_request_in_the_engine(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    browser.click("#tab-completion")
    set_field(browser, "ignore_eos", True)  # so that it does not end
    browser.type("#prompt", "Once upon a time")
    browser.click("#complete")
    browser.wait("document.querySelector('#completions').innerText.length > 40")
    browser.click("#stop-completion")
    browser.wait("document.querySelector('#stop-completion').disabled")
    site.at_rest()
    at_peace(browser, site)


# -- storage ---------------------------------------------------------------------------------------


def test_conversations_and_settings_survive_a_reload(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    set_field(browser, "max_tokens", 20)
    answer = asked(browser, "A story about a fox")
    browser.command("Page.reload")
    time.sleep(0.2)
    opened(browser, site, browser.evaluate("'/' + location.hash"))
    assert browser.text(f"{LAST} .body") == answer
    assert browser.evaluate("document.querySelector('#param-max_tokens').value") == "20"
    browser.evaluate("document.querySelector('#new').click()")
    assert browser.evaluate("document.querySelectorAll('#messages > li').length") == 0
    asked(browser, "A story about a cat")
    assert listed(browser) == ["A story about a cat", "A story about a fox"]
    browser.evaluate("document.querySelectorAll('#conversations a')[1].click()")
    assert browser.text(f"{LAST} .body") == answer
    at_peace(browser, site)


def test_a_partial_answer_survives_a_reload(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    set_field(browser, "ignore_eos", True)
    browser.type("#say", "A story about a fox")
    browser.press("Enter", 13, "\r")
    browser.wait(f"document.querySelector('{LAST}.assistant')?.innerText.length > 40", 60)
    address = browser.evaluate("'/' + location.hash")
    browser.go(site.url + "/docs")
    opened(browser, site, address)
    assert len(browser.text(f"{LAST}.assistant .body")) > 20
    site.at_rest()


def test_conversations_are_deleted_and_restored(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    set_field(browser, "max_tokens", 8)
    asked(browser, "A story about a fox")
    kept = "Object.keys(localStorage).filter((key) => key.includes('conversation')).length"
    for selector in ("#conversations button", "#delete-all"):
        assert browser.evaluate(kept) == 1
        browser.evaluate(f"document.querySelector('{selector}').click()")
        assert browser.evaluate(kept) == 0
        assert not listed(browser)
        assert browser.evaluate("document.querySelectorAll('#messages > li').length") == 0
        browser.click("#undo")
        assert listed(browser) == ["A story about a fox"]


@pytest.mark.parametrize("storage", NO_STORAGE)
def test_it_works_without_storage(browser: chromium.Browser, site: Site, storage: str) -> None:
    browser.command("Page.addScriptToEvaluateOnNewDocument", source=NO_STORAGE[storage])
    opened(browser, site)
    before = browser.evaluate("document.querySelector('#history-note').textContent")
    assert len(asked(browser, "A story about a fox")) > 20
    assert listed(browser) == ["A story about a fox"]
    assert browser.evaluate("document.querySelector('#history-note').textContent") != before
    at_peace(browser, site)


def test_stored_conversations_are_bounded(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    found = browser.evaluate(
        """(async () => {
          const { Store } = await import('/ui/store.js');
          const { Conversation } = await import('/ui/conversation.js');
          const store = new Store(() => {});
          const save = (id, at, size) => {
            const made = new Conversation(id, at);
            made.add(made.root, 'user', 'x'.repeat(size));
            made.at = at;
            return store.save(made);
          };
          const kept = (key) => key.includes('conversation');
          const keys = () => Object.keys(localStorage).filter(kept);
          const size = () => keys().reduce((sum, key) => sum + localStorage[key].length, 0);
          const result = {};
          for (let i = 0; i < 150; i++) save(`small${i}`, i, 10);
          result.count = keys().length;
          result.oldest = Math.min(...keys().map((key) => Number(key.match(/[0-9]+$/)[0])));
          for (let i = 0; i < 10; i++) save(`large${i}`, 1000 + i, 300_000);
          result.size = size();
          result.newest = new Store(() => {}).conversations[0].id;
          const before = keys().length;
          result.giant = save('giant', 5000, 3_000_000);
          result.others = keys().length === before;
          result.shown = store.get('giant') !== null;
          localStorage.setItem('kvik.conversation.bad', '{"id": "bad", "at": 1, "root": {}}');
          localStorage.setItem('kvik.conversation.worse', 'no JSON');
          const again = new Store(() => {});
          result.bad = again.get('bad') ?? again.get('worse');
          return result })()"""
    )
    assert found["count"] == 100
    assert found["oldest"] == 50
    assert found["size"] <= 2_000_000
    assert found["newest"] == "large9"
    assert (found["giant"], found["others"], found["shown"]) == (False, True, True)
    assert found["bad"] is None


def test_a_key_is_used_and_not_stored(browser: chromium.Browser) -> None:
    keys = read_keys(("secret-of-mine",))
    with story_site(every_route, keys) as site:
        browser.go(site.url + "/")
        browser.type("#say", "Hello")
        browser.click("#send")
        browser.wait("!document.querySelector('#error').hidden")
        browser.click("#open-settings")
        browser.type("#key", "secret-of-mine")
        browser.evaluate("document.querySelector('#key').dispatchEvent(new Event('change'))")
        browser.click("#close-settings")
        browser.evaluate("document.querySelector('#say').setSelectionRange(5, 5)")
        browser.type("#say", " there")
        browser.click("#send")
        browser.wait(f"document.querySelector('{LAST}.assistant')?.innerText.length > 20")
        browser.wait("document.querySelector('#state').innerText === 'ready'")
        assert "Hello there" in browser.text(".user .body")
        stored = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        assert "Hello" in browser.evaluate(stored)
        assert "secret-of-mine" not in browser.evaluate(stored)


# -- the engine and the page -----------------------------------------------------------------------


def test_the_engine_is_shown_live(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    browser.wait("document.querySelector('#blocks-words').innerText.includes('used')")
    browser.wait("document.querySelector('#gauges').innerText.includes('running')")
    colours = (
        "(() => { const c = document.querySelector('#blocks');"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " return new Set(new Uint32Array(d.buffer)).size })()"
    )
    before = browser.text("#steps-words")
    browser.type("#say", "A story about a dog")
    browser.click("#send")
    browser.wait(f"document.querySelector('#steps-words').innerText !== {before!r}")
    browser.wait("document.querySelector('#stop-chat').hidden", 60)
    browser.wait(f"{colours} >= 3")  # between cells, free, cached
    browser.evaluate("document.querySelector('#requests-numbers').open = true")
    browser.wait("document.querySelectorAll('#requests-table tr').length > 0")
    at_peace(browser, site)


def test_the_map_shows_the_blocks_that_are_used(browser: chromium.Browser, site: Site) -> None:
    opened(browser, site)
    found = browser.evaluate(
        """(async () => {
          const { Blocks } = await import('/ui/blocks.js');
          const { RequestColours } = await import('/ui/canvas.js');
          const colours = new RequestColours();
          const running = [7, 8, 9].map((number) => ({ number }));
          colours.update(running);
          const blocks = new Blocks(colours);
          const height = (used) => {
            const cells = new Uint16Array(4096);
            for (let i = 0; i < used; i++) cells[i] = 4 + i % 3;
            const bytes = String.fromCharCode(...new Uint8Array(cells.buffer));
            const map = { num_blocks: 16384, blocks_per_cell: 4, num_free: 0, num_cached: 0 };
            blocks.clear();
            blocks.show({ blocks: { ...map, cells: btoa(bytes) }, running });
            return blocks.picture.canvas.clientHeight;
          };
          const painted = () => {
            const c = blocks.picture.canvas;
            const d = c.getContext('2d').getImageData(0, 20, c.width, c.height - 20).data;
            const whole = new Uint32Array(d.buffer).filter((v) => v !== 0);
            const free = whole.at(-1);
            return whole.filter((v) => v !== free).length / whole.length };
          const heights = [height(40), height(4000)];
          height(40);
          const part = painted();
          colours.update([9, 8, 20, 21, 22, 23, 24, 25].map((number) => ({ number })));
          const named = [8, 9, 20, 21, 22, 23, 24, 25].map((number) => colours.of(number));
          const words = document.querySelector('#blocks-part').textContent;
          return { heights, part, named, words } })()"""
    )
    assert found["part"] > 0.25, "a few blocks in use are a dot in a grey field"
    assert all(80 < height < 400 for height in found["heights"])
    named = found["named"]
    assert named[:2] == ["request1", "request2"]  # each keeps its colour
    assert named[-2:] == ["others", "others"]
    assert len(set(named)) == 7
    assert found["words"]


def test_every_control_has_a_name_for_screen_readers(browser: chromium.Browser, site: Site) -> None:
    seeded(browser, site, "An answer\n\n```py\ncode\n```")
    controls = {"button", "textbox", "spinbutton", "checkbox", "tab", "link", "combobox"}
    for settings in (False, True):
        if settings:
            browser.click("#open-settings")
        found = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in browser.accessible()
            if not node.get("ignored") and node["role"]["value"] in controls
        ]
        assert len(found) > 10
        assert not [role for role, name in found if not name.strip()]


ANSWER = (
    "# A heading\n\n" + "word " * 60 + "\n\n```\n" + "code " * 80 + "\n```\n\n"
    "| "
    + "a column | " * 12
    + "\n|"
    + "--|" * 12
    + "\n\n- "
    + "x" * 500
    + "\n\nhttps://a.example/"
    + "y" * 400
)


@pytest.mark.parametrize("width", [320, 360, 430, 800, 1100, 1400])
def test_the_page_fits_the_window(browser: chromium.Browser, site: Site, width: int) -> None:
    browser.resize(width, 780, phone=width < 500)
    seeded(browser, site, ANSWER)
    assert browser.text(f"{LAST} h3") == "A heading"
    wide = (
        "[document.documentElement, ...document.querySelectorAll('#log, #engine, #history')]"
        ".filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.id)"
    )
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(wide) == []
    for panel in ("history", "engine"):
        if browser.evaluate(f"document.querySelector('#{panel}').hidden"):
            browser.click(f"#toggle-{panel}")
        assert browser.evaluate(wide) == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.press("Escape", 27)
    assert browser.evaluate("document.querySelector('#history').hidden") == (width < 1248)
    box = "document.querySelector('#say').getBoundingClientRect()"
    assert browser.evaluate(f"{box}.bottom") <= 780
    assert browser.evaluate(f"{box}.width") > 180
