"""Prompts with a gap, for each family of models that can fill it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as Library

from kvik.core.sampling_params import SamplingParams
from kvik.errors import ParamError
from kvik.text.infill import FAMILIES, Infiller, Markers
from kvik.text.tokenizer import Tokenizer

BEFORE, AFTER = "def f(x):\n    ", "\n\nprint(f(5))"
FILES = [("a.py", "first = 1"), ("b.py", "second = 2")]


def of_family(library: Library, family: Markers, bos: str | None = None) -> Tokenizer:
    """Return a tokenizer whose vocabulary has all markers of a family."""
    copy = Library.from_str(library.to_str())
    names = [family.before, family.after, family.answer, *family.files[:1], *family.ends]
    copy.add_special_tokens([name for name in names if name is not None])
    if bos is not None:
        copy.add_special_tokens([bos])
        state = json.loads(copy.to_str())
        token = {"SpecialToken": {"id": bos, "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        tokens = {bos: {"id": bos, "ids": [copy.token_to_id(bos)], "tokens": [bos]}}
        state["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [token, text],
            "pair": [token, text],
            "special_tokens": tokens,
        }
        copy = Library.from_str(json.dumps(state))
    return Tokenizer(copy, bos_token=bos)


@pytest.fixture(scope="module")
def byte_level(build: Callable[[str], Library]) -> Library:
    return build("byte-level")


@pytest.fixture(params=FAMILIES, ids=lambda family: family.before)
def family(request: pytest.FixtureRequest) -> Markers:
    return request.param


@pytest.mark.parametrize("bos", [None, "<bos>"])
def test_prompts_are_spelt_as_the_model_was_trained(
    byte_level: Library, family: Markers, bos: str | None
) -> None:
    tokenizer = of_family(byte_level, family, bos)
    ids, _ = Infiller(tokenizer).ids(BEFORE, AFTER, answer="retu")
    before, after = family.before + BEFORE, family.after + AFTER
    parts = (after, before) if family.after_first else (before, after)
    text = f"{bos or ''}{''.join(parts)}{family.answer or ''}retu"
    assert ids == tokenizer.encode(text, False)


def test_all_markers_end_an_answer(byte_level: Library, family: Markers) -> None:
    tokenizer = of_family(byte_level, family)
    ended = Infiller(tokenizer).params(SamplingParams(stop_token_ids=[7]))
    names = {tokenizer.token(token) for token in ended.stop_token_ids[1:]}
    assert ended.stop_token_ids[0] == 7 and family.after in names
    assert names >= {*family.ends, *family.files[:1]}


def test_markers_in_the_texts_stay_text(byte_level: Library, family: Markers) -> None:
    """As in a file about tokenizers; also other special tokens, such as the end of the text."""
    tokenizer = of_family(byte_level, family)
    prefix = f"a = '{family.after}' "
    suffix = f"'{family.before}' + '{tokenizer.token(0)}'"
    ids, _ = Infiller(tokenizer).ids(prefix, suffix)
    special = [tokenizer.token(token) for token in ids if token in tokenizer.special_ids]
    assert sorted(special) == sorted(
        name for name in (family.before, family.after, family.answer) if name is not None
    )
    assert prefix in tokenizer.decode(ids) and suffix in tokenizer.decode(ids)


def test_a_suffix_begins_inside_a_text(build: Callable[[str], Library]) -> None:
    """SentencePiece's tokenizers put a space before a text, which a suffix does not have."""
    infiller = Infiller(tokenizer := of_family(build("llama2"), FAMILIES[4]))
    ids, _ = infiller.ids("the", "the end", answer="dog")
    names = [tokenizer.token(token) for token in ids]
    middle = names.index("▁<SUF>")
    assert names[1].startswith("▁") and not names[middle + 1].startswith("▁")
    assert not names[names.index("▁<MID>") + 1].startswith("▁")


def test_the_last_files_that_fit_come_first(byte_level: Library, family: Markers) -> None:
    tokenizer = of_family(byte_level, family)
    infiller, alone = Infiller(tokenizer), Infiller(tokenizer).ids(BEFORE, AFTER)[0]
    ids, count = infiller.ids(BEFORE, AFTER, files=FILES)
    assert count == 2 and ids[-len(alone) :] == alone
    marker = family.files[0] if family.files else ""
    named = [f"{marker}{name}\n{text}" if marker else f"{text}\n\n" for name, text in FILES]
    assert tokenizer.decode(ids[: -len(alone)], False) == "".join(named) + marker
    last = len(ids) - len(tokenizer.encode(named[0], False))
    for limit, kept in ((len(ids), 2), (len(ids) - 1, 1), (last, 1), (last - 2, 0), (0, 0)):
        found, count = infiller.ids(BEFORE, AFTER, files=FILES, limit=limit)
        assert count == kept and len(found) <= max(limit, len(alone))


def test_a_model_without_markers_is_refused(byte_level: Library) -> None:
    with pytest.raises(ParamError, match="^suffix: .* no tokens for it"):
        Infiller(Tokenizer(byte_level))
