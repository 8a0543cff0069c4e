"""GuideLLM, a load generator, runs unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.story_site import Site

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("guidellm") is None, reason="pip install kvik[clients]"),
]

REQUESTS = 10
OUTPUT_TOKENS = 24


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_all_its_requests_are_answered(
    site: Site, tmp_path: Path, offline: Mapping[str, str], path: str
) -> None:
    out = tmp_path / "out.json"
    folder = site.engine.client.config.runner.model_path
    options = {
        "backend": f"kind=openai_http,target={site.url},model=stories,request_format={path}",
        "profile": "kind=concurrent,streams=3",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=hf_auto,model={folder}",
        "data": f"kind=synthetic_text,prompt_tokens=40,output_tokens={OUTPUT_TOKENS}",
        "output": f"kind=json,path={out}",
    }
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    for name, value in options.items():
        command += [f"--{name}", value]
    done = subprocess.run(
        command, check=False, env=offline, cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    # It requests this many tokens, and counts them by the usage in the answer.
    counted = benchmark["metrics"]["output_token_count"]["successful"]["total_sum"]
    assert counted == REQUESTS * OUTPUT_TOKENS
    site.at_rest()
