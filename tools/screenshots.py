"""Takes the pictures of the playground in docs/images: python tools/screenshots.py

Needs Chromium, and starts a server of the bundled model. Where pngquant is installed it makes the
pictures smaller. The bundled model writes stories, so Markdown is shown by an example.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # for what the tests drive a browser with

from helpers import chromium  # noqa: E402
from helpers.server_process import ServerProcess, server_process  # noqa: E402

IMAGES = ROOT / "docs" / "images"
QUESTION = "Tell me a story about a fox who lost her way"
EXAMPLE_QUESTION = "How does a paged KV cache work? Sketch the pool in Python, and list the costs."
EXAMPLE = """\
A **paged KV cache** keeps the keys and values of a sequence in *blocks* of a fixed number of \
tokens. A request takes a block when it needs one.

### Parts

1. A pool of physical blocks
2. A *block table* for each request, from logical to physical blocks
   - requests with the same prefix point to the same block
   - a block is free when its reference count is 0

```python
class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.free = deque(range(1, num_blocks))

    def take(self) -> int:
        if not self.free:
            raise OutOfBlocks("preempt a request")
        return self.free.popleft()
```

| operation | time | writes |
|:--|:-:|--:|
| take a block | O(1) | 1 |
| find a prefix | O(blocks) | 0 |
| end a request | O(blocks) | 1 per block |

See the [PagedAttention paper](https://arxiv.org/abs/2309.06180).
"""
# Puts the example among the conversations that the browser keeps.
KEEP = """(async () => {
  const { Conversation } = await import('/ui/conversation.js');
  const made = new Conversation('example');
  made.add(made.add(made.root, 'user', QUESTION), 'assistant', ANSWER);
  localStorage.setItem('kvik.conversation.example', JSON.stringify(made)) })()"""


def company(server: ServerProcess) -> list[threading.Thread]:
    """Start other clients' requests, so that the pages show a busy server."""
    threads = []
    for i in range(14):
        body = {
            "prompt": f"Once upon a time there was {'a very old ' * (i * 3)}tree. " * 2,
            "max_tokens": 700,
            "ignore_eos": True,
            "n": 1 + i % 2,
        }
        threads.append(threading.Thread(target=server.post, args=("/v1/completions", body)))
        threads[-1].start()
        time.sleep(0.12)
    return threads


def picture(browser: chromium.Browser, name: str) -> None:
    """Take a picture of the page after its animations."""
    browser.evaluate("new Promise(done => setTimeout(done, 600))")
    path = IMAGES / name
    browser.screenshot(path)
    if shutil.which("pngquant"):
        command = ["pngquant", "--force", "--skip-if-larger", "--output", str(path), str(path)]
        subprocess.run(command, check=False)


def ready(browser: chromium.Browser, url: str) -> None:
    browser.go(url)
    browser.wait("document.querySelector('#state').innerText === 'ready'")


def main() -> None:
    program = chromium.find()
    if program is None:
        sys.exit("there is no Chromium")
    IMAGES.mkdir(exist_ok=True)
    flags = ("--max-num-seqs", "12", "--max-model-len", "1024", "--kv-cache-memory", "24m")
    with server_process(*flags) as server, chromium.Browser(program, 1440, 900) as browser:
        ready(browser, server.url + "/")
        keep = KEEP.replace("QUESTION", json.dumps(EXAMPLE_QUESTION))
        browser.evaluate(keep.replace("ANSWER", json.dumps(EXAMPLE)))
        browser.go(server.url + "/docs")
        ready(browser, server.url + "/")
        threads = company(server)
        browser.type("#say", QUESTION)
        browser.press("Enter", 13, "\r")
        browser.wait("document.querySelector('#messages > :last-child').innerText.length > 300")
        picture(browser, "playground.png")
        for thread in threads:
            thread.join()
        browser.scheme("dark")
        browser.go(server.url + "/docs")
        ready(browser, server.url + "/#example")
        browser.evaluate("document.querySelector('#log').scrollTop = 0")
        picture(browser, "playground-dark.png")
        browser.resize(390, 780, 2, phone=True)
        browser.scheme("light")
        picture(browser, "playground-phone.png")


if __name__ == "__main__":
    main()
