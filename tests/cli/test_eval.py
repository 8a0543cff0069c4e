"""`kvik eval`: from the command line to figures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from helpers.commands import Command

from kvik import LLM

CPU = ("--device", "cpu", "--threads", "1")
TEXT = "Once upon a time there was a fox. The fox lived by the river, and it was very old."


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def test_perplexity_is_that_of_scored_prompts(text: str, command: Command) -> None:
    facts = command.json("eval", *CPU, "--data", text)
    with LLM(device="cpu", threads=1, num_blocks=64) as llm:
        (output,) = llm.score([TEXT])
    losses = [-one.logprob for one in output.prompt_logprobs if one]
    assert facts["scored_tokens"] == len(losses)
    assert facts["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert facts["perplexity"] == pytest.approx(math.exp(facts["loss"]))
    assert (facts["window"], facts["stride"], facts["text"]) == (1024, 1024, text)
    assert facts["kl_divergence"] is facts["top1_agreement"] is None


@pytest.mark.parametrize(
    "rounding", [("--quantization", "int4"), ("--kv-cache-dtype", "int4")], ids=["weights", "KV"]
)
def test_the_reference_is_not_rounded(
    text: str, rounding: tuple[str, str], command: Command
) -> None:
    facts = command.json("eval", *CPU, "--data", text, "--reference", "same", *rounding)
    assert 0.001 < facts["kl_divergence"] < 0.5
    assert 0.5 < facts["top1_agreement"] < 1
    plain = command.json("eval", *CPU, "--data", text, "--reference", "same")
    assert plain["kl_divergence"] == pytest.approx(0, abs=1e-12)
    assert plain["top1_agreement"] == 1
    assert plain["perplexity"] != facts["perplexity"]


def test_the_report_lists_the_settings(command: Command) -> None:
    words = ["--window", "128", "--stride", "128", "--reference", "same"]
    out = command("eval", *words, *CPU).out
    for part in ("the story that ships", "128 tokens, every 128", "perplexity", "100.00%"):
        assert part in out
