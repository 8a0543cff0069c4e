"""From deltas to text: stop strings, siblings, endings, and faults of single requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, FinishReason, RequestDelta, RequestReport, TokenLogprobs
from kvik.engine.output import OutputProcessor
from kvik.text.detokenizer import Detokenizer, StopTable
from kvik.text.tokenizer import Tokenizer

REPORT = RequestReport(1.0, 2.0, 3.0, 7.0, num_cached_tokens=4, num_preemptions=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return one with a token per byte, in the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return Tokenizer(library)


def start(tokenizer, *, streaming=True, name="a", **params) -> OutputProcessor:
    processor = OutputProcessor(tokenizer)
    processor.add(EngineRequest(name, [1, 2], SamplingParams(**params)), "p", streaming=streaming)
    return processor


def feed(processor, tokenizer, text: str, reason=None, index=0, name="a", **extra):
    """Feed one delta per byte; the last one has the end."""
    ids = tokenizer.encode(text)
    shown, finished, to_end = "", [], []
    for i, token in enumerate(ids):
        last = i == len(ids) - 1
        delta = RequestDelta(
            name,
            index,
            [token],
            finish_reason=reason if last else None,
            report=REPORT if last and reason else None,
            **extra,
        )
        out = processor.process([delta])
        shown += "".join(d.text for d in out.deltas)
        finished += out.finished
        to_end += out.to_end
    return shown, finished, to_end


@pytest.mark.parametrize("streaming", [True, False])
def test_text_is_whole_at_the_end(tokenizer, streaming):
    processor = start(tokenizer, streaming=streaming)
    shown, (output,), _ = feed(processor, tokenizer, "naïve 🦊!", FinishReason.LENGTH)
    assert output.text == "naïve 🦊!"
    assert shown == ("naïve 🦊!" if streaming else "")
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].token_ids == tokenizer.encode("naïve 🦊!")
    assert (output.num_cached_tokens, output.num_preemptions) == (4, 1)
    assert (output.metrics.ttft, output.metrics.e2e) == (2.0, 6.0)
    assert output.metrics.tpot(5) == 1.0
    assert output.metrics.tpot(1) is None


def test_token_ids_may_need_more_than_sixteen_bits():
    """Many tokens in deltas of one and of several."""
    ids = [*range(9000), 65_535, 65_536, 200_000, *range(9000)]
    processor = start(None, streaming=False)
    for i in range(0, len(ids), 7):
        processor.process([RequestDelta("a", 0, ids[i : i + 7])])
    end = RequestDelta("a", 0, [7], finish_reason=FinishReason.LENGTH, report=REPORT)
    (output,) = processor.process([end]).finished
    assert output.outputs[0].token_ids == [*ids, 7]
    assert output.text == ""


def test_incomplete_characters_are_never_delivered(tokenizer):
    processor = start(tokenizer)
    for token in tokenizer.encode("🦊")[:3]:
        out = processor.process([RequestDelta("a", 0, [token])])
        assert [d.text for d in out.deltas] == [""]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_across_tokens(tokenizer, streaming, include):
    processor = start(
        tokenizer, streaming=streaming, stop=("END",), include_stop_str_in_output=include
    )
    shown, finished, to_end = feed(processor, tokenizer, "ab EN EN")
    assert not finished
    more, _, ended = feed(processor, tokenizer, "D more")
    assert to_end == []
    assert ended == [("a", 0, FinishReason.STOP, None)]
    out = processor.process([RequestDelta("a", 0, [], FinishReason.STOP, report=REPORT)])
    (output,) = out.finished
    expected = "ab EN END" if include else "ab EN "
    assert output.text == expected
    assert shown + more == (expected if streaming else shown + more)
    assert output.outputs[0].stop_reason == "END"
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids == tokenizer.encode("ab EN END")


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_matches_tokens_that_are_marked(streaming, include):
    library = Library(models.BPE(vocab={c: i for i, c in enumerate("abc")}, merges=[]))
    library.decoder = decoders.Fuse()
    library.add_tokens([AddedToken("<x>", special=False), AddedToken("<y>", special=True)])
    tokenizer = Tokenizer(library)
    processor = OutputProcessor(tokenizer)
    params = SamplingParams(stop=("<y>", "<x>b"), include_stop_str_in_output=include)
    request = EngineRequest("a", [1, 2], params)
    processor.add(request, "p", streaming=streaming, marks={3: "X", 4: "Y"})
    tokens = [0, 4, 3, 0, 3, 1, 2]  # "<y>" is skipped, and its mark is no part of the text
    out = processor.process(
        [RequestDelta("a", 0, tokens, finish_reason=FinishReason.LENGTH, report=REPORT)]
    )
    completion = out.finished[0].outputs[0]
    assert completion.text == ("aYXaXb" if include else "aYXa")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "<x>b")


def test_text_withheld_for_a_stop_string_is_released_at_the_end(tokenizer):
    processor = start(tokenizer, stop=("END",))
    shown, (output,), to_end = feed(processor, tokenizer, "the EN", FinishReason.LENGTH)
    assert shown == output.text == "the EN"
    assert to_end == []


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("min_tokens", "text", "found"),
    [
        (0, "a", "END"),
        (3, "a", "END"),  # the fourth token ends it
        (4, "aENDb", "END"),  # the first one ended too early
        (8, "aENDbEND", None),
    ],
)
def test_a_stop_string_that_begins_before_min_tokens(tokenizer, min_tokens, text, found, at_once):
    """Each character is a token. As in vLLM, a stop string counts if it ends after min_tokens."""
    processor = start(tokenizer, stop=("END",), min_tokens=min_tokens)
    ids = tokenizer.encode("aENDbEND")
    deltas = [RequestDelta("a", 0, ids)] if at_once else [RequestDelta("a", 0, [i]) for i in ids]
    deltas.append(RequestDelta("a", 0, [], FinishReason.LENGTH, report=REPORT))
    out = processor.process(deltas)
    (output,) = out.finished
    assert "".join(delta.text for delta in out.deltas) == output.text == text
    assert output.outputs[0].stop_reason == found


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_the_stopping_token_is_counted_but_not_shown(tokenizer, include, text):
    processor = start(tokenizer, include_stop_str_in_output=include)
    shown, (output,), _ = feed(processor, tokenizer, "abc", FinishReason.STOP)
    assert shown == output.text == text
    assert len(output.outputs[0].token_ids) == 3


def test_siblings_are_gathered_in_order(tokenizer):
    processor = start(tokenizer, n=2)
    _, finished, _ = feed(processor, tokenizer, "second", FinishReason.LENGTH, index=1)
    assert not finished
    _, (output,), _ = feed(processor, tokenizer, "first", FinishReason.STOP, index=0)
    assert [c.text for c in output.outputs] == ["firs", "second"]
    assert [c.index for c in output.outputs] == [0, 1]


def test_cached_tokens_are_those_of_the_sibling_that_computed_the_prompt(tokenizer):
    processor = start(tokenizer, n=2)
    for index, cached in ((1, 9), (0, 4)):  # the sibling with the shared prompt ends first
        report = replace(REPORT, num_cached_tokens=cached)
        out = processor.process([RequestDelta("a", index, [3], FinishReason.STOP, report=report)])
    assert out.finished[0].num_cached_tokens == 4
    assert out.finished[0].num_preemptions == 2


def test_a_failing_detokenizer_ends_its_request_alone(tokenizer, monkeypatch):
    processor = start(tokenizer, name="bad")
    processor.add(EngineRequest("good", [1], SamplingParams()), None, streaming=True)
    genuine = Detokenizer.push
    poison = tokenizer.encode("x")[0]

    def broken(self, ids):
        if poison in ids:
            raise UnicodeError("no such character")
        return genuine(self, ids)

    monkeypatch.setattr(Detokenizer, "push", broken)
    ok = tokenizer.encode("y")
    out = processor.process([RequestDelta("bad", 0, [poison]), RequestDelta("good", 0, ok)])
    assert out.to_end == [
        ("bad", 0, FinishReason.ERROR, "UnicodeError: no such character"),
    ]
    assert {d.request_id: d.text for d in out.deltas} == {"bad": "", "good": "y"}
    out = processor.process(
        [
            RequestDelta("bad", 0, ok),  # sent before the end was known
            RequestDelta("bad", 0, [], FinishReason.ERROR, report=REPORT),
            RequestDelta("good", 0, ok, FinishReason.LENGTH, report=REPORT),
        ]
    )
    by_name = {o.request_id: o.outputs[0] for o in out.finished}
    assert by_name["bad"].finish_reason == "error"
    assert by_name["bad"].error == "UnicodeError: no such character"
    assert by_name["good"].text == "yy"


def test_logprobs_are_gathered(tokenizer):
    processor = start(tokenizer, logprobs=0, prompt_logprobs=0)
    found = TokenLogprobs(5, -0.5, 1)
    prompt = [TokenLogprobs(2, -1.5, 3)]
    processor.process([RequestDelta("a", 0, [], prompt_logprobs=prompt)])
    _, (output,), _ = feed(processor, tokenizer, "ab", FinishReason.LENGTH, logprobs=[found])
    assert output.outputs[0].logprobs == [found, found]
    assert output.prompt_logprobs == [None, *prompt]


def test_deltas_of_a_discarded_request_are_dropped(tokenizer):
    processor = start(tokenizer)
    processor.discard("a")
    out = processor.process([RequestDelta("a", 0, [3], FinishReason.STOP, report=REPORT)])
    assert (out.deltas, out.finished, out.to_end) == ([], [], [])


@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH, FinishReason.STOP])
@pytest.mark.parametrize("min_tokens", [0, 4])
def test_a_stop_string_cuts_inside_a_delta(tokenizer, reason, min_tokens):
    processor = start(tokenizer, stop=("b",), min_tokens=min_tokens, logprobs=0)
    ids = tokenizer.encode("abcabca")
    logprobs = [TokenLogprobs(token, -float(i), 1) for i, token in enumerate(ids)]
    report = None if reason is None else REPORT
    deltas = [RequestDelta("a", 0, ids, reason, logprobs=logprobs, report=report)]
    out = processor.process(deltas)
    kept = 5 if min_tokens else 2
    (shown,) = out.deltas
    assert (shown.token_ids, shown.logprobs) == (ids[:kept], logprobs[:kept])
    if reason is None:
        assert out.to_end == [("a", 0, FinishReason.STOP, None)]
        out = processor.process([RequestDelta("a", 0, [], FinishReason.STOP, report=REPORT)])
    (output,) = out.finished
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "b")
    assert (completion.token_ids, completion.logprobs) == (ids[:kept], logprobs[:kept])
    assert output.text == shown.text == ("abca" if min_tokens else "a")


def test_the_automaton_of_stop_strings_is_made_once(tokenizer, monkeypatch):
    """Building it for 16 strings of 1 KiB takes 10 ms, which 128 completions would multiply."""
    made = []

    class Counted(StopTable):
        def __init__(self, stop):
            made.append(stop)
            super().__init__(stop)

    monkeypatch.setattr("kvik.engine.output.StopTable", Counted)
    processor = OutputProcessor(tokenizer)
    for i in range(4):
        params = SamplingParams(n=8, stop=("END", f"{i % 2}"))
        processor.add(EngineRequest(f"r{i}", [1], params), "p", streaming=True)
    assert made == [("END", "0"), ("END", "1")]
    for i in range(4):
        processor.discard(f"r{i}")
    assert not processor._stop_tables
