"""The playground's Markdown in a real browser, also for hostile texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import chromium
from helpers.http_server import http_server

from kvik.config.server_config import ServerConfig
from kvik.server.access import read_keys
from kvik.server.app import App
from kvik.server.pages import playground_routes
from kvik.server.server import Drain

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium"),
    pytest.mark.skipif(sys.platform != "linux", reason="tried on Linux alone"),
]

# Renders TEXT, whole and as if streamed, into a new element of the page.
RENDER = """(async () => {
  const { Prose } = await import('/ui/prose.js');
  const made = () => document.body.appendChild(document.createElement('div'));
  const [whole, grown] = [made(), made()];
  new Prose(whole).text = TEXT;
  const prose = new Prose(grown);
  for (let i = 1; i <= TEXT.length; i += STEP) prose.text = TEXT.slice(0, i);
  prose.text = TEXT;
  const all = [...whole.querySelectorAll('*')];
  const result = {
    html: whole.innerHTML,
    text: whole.textContent,
    same: whole.innerHTML === grown.innerHTML,
    tags: [...new Set(all.map((one) => one.localName))],
    attributes: [...new Set(all.flatMap((one) => one.getAttributeNames()))],
    links: all.filter((one) => one.localName === 'a').map((one) => one.href),
    ran: window.ran === true,
  };
  whole.remove();
  grown.remove();
  return result })()"""

TAGS = {"p", "h3", "h4", "h5", "h6", "hr", "ul", "ol", "li", "blockquote", "div", "span", "button"}
TAGS |= {"pre", "code", "table", "thead", "tbody", "tr", "th", "td", "a", "strong", "em", "del"}
ATTRIBUTES = {"type", "class", "tabindex", "start", "href", "title", "target", "rel"}

SHOWN = {
    "headings": ("# One\n### Three ##", "<h3>One</h3><h5>Three</h5>"),
    "emphasis": (
        "*a* **b** ***c*** ~~d~~ _e_ f_g_h 2 * 3 * 4 **open",
        "<p><em>a</em> <strong>b</strong> <em><strong>c</strong></em> <del>d</del> <em>e</em> "
        "f_g_h 2 * 3 * 4 **open</p>",
    ),
    "inline code": ("`a` ``b`c`` `*d*` `open", None),
    "escapes": (r"\*a\* \# \\ \x", r"<p>*a* # \ \x</p>"),
    "lists": (
        "- a\n  - b\n    continued\n- c\n\n3. x\n4. y",
        "<ul><li>a<ul><li>b\ncontinued</li></ul></li><li>c</li></ul>"
        '<ol start="3"><li>x</li><li>y</li></ol>',
    ),
    "a list with code": ("1. a\n   ```\n   x\n     y\n   ```\n2. b", None),
    "tasks": (
        "- [ ] a\n- [x] b",
        '<ul><li class="task">☐ a</li><li class="task">☑ b</li></ul>',
    ),
    "quotes": (
        "> a\n> > b\n\nc",
        "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    ),
    "a year is no list": ("It was\n1984. A year", "<p>It was\n1984. A year</p>"),
    "a table": (
        "| a | b |\n|---|--:|\n| `x` | 1 \\| 2 |\n\nend",
        '<div class="wide" tabindex="0"><table><thead><tr><th>a</th><th class="right">b</th></tr>'
        '</thead><tbody><tr><td><code>x</code></td><td class="right">1 | 2</td></tr></tbody>'
        "</table></div><p>end</p>",
    ),
    "rules": ("a\n\n---\n***\n\nb", "<p>a</p><hr><hr><p>b</p>"),
    "products": ("17*20 + 17*3", "<p>17*20 + 17*3</p>"),
    "formulas": (
        r"\(a_1 * b_1\) costs $5, $$x_2*y_2$$ \(open",
        r'<p><code class="formula">\(a_1 * b_1\)</code> costs $5, '
        r'<code class="formula">$$x_2*y_2$$</code> \(open</p>',
    ),
    "code in colours": ("```py\nif x == 'a': # b\n    return 1\n" + '"' * 3 + "open", None),
    "lines of Windows": ("# a\r\nb\r\n\r\n```\r\nc\r\n```", None),
    "text below a heading": ("# a\nb\n- c\nd\n\ne", None),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    app = App(playground_routes(), read_keys([]), Drain(), ServerConfig(host=""))
    program = chromium.find()
    with http_server(app) as server, chromium.Browser(program) as found:
        found.go(server.url + "/")
        yield found


def rendered(browser: chromium.Browser, text: str, step: int = 1) -> dict[str, Any]:
    script = RENDER.replace("TEXT", json.dumps(text)).replace("STEP", str(step))
    return browser.evaluate(script)


@pytest.mark.parametrize("name", SHOWN)
def test_whole_and_streamed_texts_look_the_same(browser: chromium.Browser, name: str) -> None:
    text, html = SHOWN[name]
    found = rendered(browser, text)
    assert found["same"]
    if html is not None:
        assert found["html"] == html


def test_code_is_shown_unchanged_and_copied(browser: chromium.Browser) -> None:
    code = "def f():\n\n    return '<b>' & \"*x*\"\t# not a heading"
    found = rendered(browser, f"```python\n{code}\n```\nafter")
    assert found["text"] == f"pythonCopy{code}after"
    copied = browser.evaluate(
        """(async () => {
          const { Prose } = await import('/ui/prose.js');
          const box = document.body.appendChild(document.createElement('div'));
          let taken = null;
          Object.defineProperty(navigator, 'clipboard',
            { value: { writeText: async (text) => { taken = text } }, configurable: true });
          new Prose(box).text = '```\\nthe code\\n```';
          box.querySelector('.copy').click();
          await new Promise((done) => setTimeout(done, 50));
          box.remove();
          return taken })()"""
    )
    assert copied == "the code"


HOSTILE = {
    "script": "<script>window.ran = true</script>",
    "handler": "<img src=x onerror=\"window.ran = true\"> <svg onload='window.ran = true'>",
    "frame": '<iframe srcdoc="<script>parent.ran = true</script>"></iframe>',
    "script in code": "```html\n</code></pre><script>window.ran = true</script>",
    "coloured code": "```js\n// <script>window.ran = true</script>\n'<b onclick=x>' `</code>",
    "language": '```"><script>window.ran=true</script> x\ncode\n```',
    "in a table": "|<script>window.ran = true</script>|b|\n|--|--|\n|<b onclick=x>|y|",
    "in a link": '[<img src=x onerror=alert(1)>](https://a.example/"onclick="window.ran=true)',
    "title": '[a](https://a.example "x\\" onmouseover=\\"window.ran = true")',
    "picture": "![a](https://a.example/picture.png) ![b](data:image/png;base64,AAAA)",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_html_in_a_text_stays_text(browser: chromium.Browser, name: str) -> None:
    rendered(browser, "")  # loads its imports
    asked, complaints = len(browser.urls), len(browser.errors)
    found = rendered(browser, HOSTILE[name])
    assert found["same"]
    assert not found["ran"]
    assert set(found["tags"]) <= TAGS
    assert set(found["attributes"]) <= ATTRIBUTES
    assert len(browser.urls) == asked
    assert len(browser.errors) == complaints


@pytest.mark.parametrize(
    "address",
    [
        "javascript:window.ran=true",
        "JaVaScRiPt:window.ran=true",
        "java\\tscript:x",
        "java&#115;cript:x",
        "\x01javascript:x",
        "data:text/html,<script>x</script>",
        "vbscript:x",
        "file:///etc/passwd",
        "blob:x-y",
        "//a.example",
        "/v1/models",
        "?x",
        "https:",
    ],
)
def test_links_to_other_schemes_are_text(browser: chromium.Browser, address: str) -> None:
    for text in (f"[a]({address})", f"[a](<{address}>)", f"<{address}>", f"![a]({address})"):
        found = rendered(browser, text)
        assert found["links"] == []
        assert found["same"]


def test_links_are_addresses_of_pages_and_of_mail(browser: chromium.Browser) -> None:
    text = (
        "[a](https://a.example/x_(y)) <http://b.example> (see https://c.example/d.) "
        "[m](mailto:a@b.example) [out [in](https://e.example) er](https://f.example)"
    )
    found = rendered(browser, text)
    assert found["links"] == [
        "https://a.example/x_(y)",
        "http://b.example/",
        "https://c.example/d",
        "mailto:a@b.example",
        "https://e.example/",
        "https://f.example/",
    ]
    assert found["same"]


MANY = 100_000
LONG = {
    "a line": "x" * 1_000_000,
    "words": "word " * 200_000,
    "brackets": "[" * MANY,
    "closing brackets": "]" * MANY,
    "links without an end": "[a](http://x" * 20_000,
    "stars": "*a " * MANY,
    "nested stars": "**a*" * MANY,
    "underscores": "_a" * MANY,
    "backquotes": "".join("`" * (i % 60) + "x" for i in range(3000)),
    "quotes": ">" * MANY,
    "nested lists": "\n".join(" " * (2 * i) + "- x" for i in range(1000)),
    "items": "- a\n" * 30_000,
    "spaces": "# " + " " * 200_000 + "x",
    "bars": "| " * MANY + "\n" + "- " * MANY + "x",
    "rows": "a|b\n-|-\n" + "1|2\n" * 10_000,
    "fences": "```\n" * 30_001,
    "brackets of addresses": ("http://x.example/" + ")" * 1900 + " ") * 50,
    "backslashes": "\\" * MANY,
    "formulas without an end": "\\(\\[$" * 30_000,
    "code of escapes": "```js\n" + "'\\" * 24_000,
    "code of quotes": "```py\n" + ('"' * 3 + "'" * 3) * 8000,
    "code of comments": "```c\n" + "/*" * 24_000,
    "lines": "\n" * MANY,
}


@pytest.mark.parametrize("name", LONG)
def test_the_time_is_linear_in_the_text(browser: chromium.Browser, name: str) -> None:
    script = (
        "(async () => { const { parse } = await import('/ui/markdown.js');"
        " const began = performance.now(); parse(TEXT); return performance.now() - began })()"
    )
    spent = browser.evaluate(script.replace("TEXT", json.dumps(LONG[name])))
    assert spent < 3000  # milliseconds: a quadratic parser takes minutes


def test_complete_blocks_do_not_change_while_text_arrives(browser: chromium.Browser) -> None:
    found = browser.evaluate(
        """(async () => {
          const { Prose } = await import('/ui/prose.js');
          const box = document.body.appendChild(document.createElement('div'));
          const prose = new Prose(box);
          const text = '# a\\n\\n' + 'word *word* '.repeat(20) + '\\n\\n- b\\n- c\\n\\n';
          prose.text = text;
          const before = [...box.querySelectorAll('*')];
          const changed = new Set();
          const seen = { childList: true, characterData: true, attributes: true, subtree: true };
          const note = (all) => all.forEach((one) => changed.add(one.target));
          new MutationObserver(note).observe(box, seen);
          let grown = text + '```\\n';
          prose.text = grown;
          const code = box.querySelector('code');
          for (let i = 0; i < 100; i++) prose.text = grown += 'line ' + i + '\\n';
          await new Promise((done) => setTimeout(done));
          const result = {
            kept: before.every((one) => one.isConnected && !changed.has(one)),
            code: code.isConnected && code.textContent.split('\\n').length,
            changed: [...changed].map((one) => one.nodeName).sort(),
          };
          prose.text = 'another text';
          result.another = box.textContent;
          box.remove();
          return result })()"""
    )
    assert found["kept"]
    assert found["code"] == 101
    assert found["changed"] == ["#text", "DIV"] or found["changed"] == ["#text", "CODE", "DIV"]
    assert found["another"] == "another text"


def test_no_script_of_the_page_can_write_html(browser: chromium.Browser) -> None:
    with pytest.raises(AssertionError, match="TrustedHTML"):
        browser.evaluate("document.createElement('div').innerHTML = '<b>x</b>'")
