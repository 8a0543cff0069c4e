"""Bad words as token ids."""

from __future__ import annotations

import pytest

from kvik import LLM, ParamError, SamplingParams
from kvik.core.sampling_params import SamplingParams as Params
from kvik.text.tokenizer import spelled


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", device="cpu", threads=1, max_model_len=128) as llm:
        yield llm


def test_both_spellings_each_once(llm):
    tokenizer = llm.tokenizer
    ids = spelled(SamplingParams(bad_words=("fox", " fox", (5, 6))), tokenizer).bad_words
    assert set(ids) == {tuple(tokenizer.encode("fox")), tuple(tokenizer.encode(" fox")), (5, 6)}
    assert len(ids) == 3


def test_a_bad_word_is_not_written(llm):
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    (free,) = llm.generate("Once upon a time", greedy)
    word = max(free.text.split()[:8], key=len).strip(".,")
    (held,) = llm.generate("Once upon a time", greedy.with_changes(bad_words=[word]))
    assert word in free.text
    banned = spelled(SamplingParams(bad_words=(word,)), llm.tokenizer).bad_words
    tokens = held.outputs[0].token_ids
    for ids in banned:
        assert all(tuple(tokens[i : i + len(ids)]) != ids for i in range(len(tokens)))
    assert held.text != free.text


@pytest.mark.parametrize("word", ["", "   "])
def test_an_empty_word_is_refused(llm, word):
    with pytest.raises(ParamError, match="bad_words"):
        llm.generate("Once", SamplingParams(bad_words=[word]))


def test_without_a_tokenizer_only_ids():
    with pytest.raises(ParamError, match="no tokenizer"):
        spelled(SamplingParams(bad_words=("fox",)), None)
    assert spelled(SamplingParams(bad_words=((1, 2),)), None).bad_words == ((1, 2),)


def test_the_engine_takes_no_words():
    with pytest.raises(ParamError, match="bad_words"):
        Params(bad_words=("fox",)).check_against(100, 10)
