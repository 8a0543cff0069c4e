"""Commands that refuse what a user asks in one line, which begins with the flag or the field."""

from __future__ import annotations

import shlex

import pytest
from helpers.commands import Command


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("chat --n 2", "arguments: --n is not a flag of kvik chat"),
        ("chat --top-k -5", "--top-k: must be an integer in [-1, "),
        ("chat /no/such", "model: there is no folder"),
        ("chat one two", "arguments: 'two' is too much; it is kvik chat [options]"),
        ("chat --url ftp://here", "--url: must be like http://127.0.0.1:8000, not 'ftp://here'"),
        ("chat --url http://a..b", "--url: http://a..b cannot be reached: "),
        ("chat --url here --api-key 'a\nb'", "--api-key: must be "),
        ("chat --url here --max-num-seqs 4", "--max-num-seqs: is for an engine in this process"),
        ("chat --api-key mine", "--api-key: needs --url"),
        ("generate", "prompt:"),
        ("generate ''", "prompt:"),
        ("generate --temperature -1 x", "--temperature:"),
        ("generate --max-tokens 0 x", "--max-tokens:"),
        ("generate --stop '' x", "--stop:"),
        ("generate --logprobs 1 x", "--logprobs:"),
        ("generate --regex '' x", "--regex:"),
        ("generate --block-size 0 x", "--block-size:"),
        ("generate /no/such/folder x", "model:"),
        ("info /no/such", "model:"),
        ("info --block-size 0", "--block-size:"),
        ("info --max-model-len 9999999", "--max-model-len:"),
        ("info --policy lifo", "--policy:"),
        (
            """info --speculative-config '{"method": "ngram", "num_speculative_tokens": 0}'""",
            "--speculative-config: num_speculative_tokens must be an integer in [1, 64]",
        ),
        ("plan /no/such", "model:"),
        ("plan --context many", "--context:"),
        ("plan --hardware h2000", "--hardware:"),
        ("plan --dtype int3", "--dtype:"),
        ("plan --price free", "--price:"),
        ("plan --tokens-per-second 5", "--tokens-per-second:"),
        ("plan --draft /no/such --hardware t4", "--draft:"),
        ("plan --draft '' --hardware t4", "--draft:"),
        ("advise --draft '' --hardware t4", "--draft:"),
        ("plan --bogus", "arguments:"),
        ("eval --device cpu --threads 1 --window 1025", "--window: must be 2 to 1024"),
        ("eval --device cpu --threads 1 --window 64 --stride 65", "--stride: must be 1 to 64"),
        ("eval --device cpu --threads 1 --window many", "--window: "),
        ("eval --device cpu --threads 1 --data none.txt", "--data: none.txt cannot be read"),
        ("eval --device cpu --threads 1 --quantization int3", "--quantization: must be one of"),
        ("eval --device cpu --threads 1 --reference /no/model", "--reference: there is no folder"),
        (
            "eval --device cpu --threads 1 --max-num-seqs 4",
            "arguments: --max-num-seqs is not a flag of kvik ",
        ),
        ("top --once --url ftp://a", "--url:"),
        ("top --once --url http://", "--url:"),
        ("top --once --url http://no.such.host.invalid", "--url:"),
        ("top --once --api-key 'é'", "--api-key:"),
        ("top --once --interval 0", "--interval:"),
        ("top --once --interval x", "--interval:"),
    ],
)
def test_bad_input_is_one_line(words: str, line: str, command: Command) -> None:
    assert command.refusal(*shlex.split(words)).startswith(line)
