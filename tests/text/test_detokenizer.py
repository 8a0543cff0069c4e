"""Streamed text adds up to the whole text, and never contains half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from helpers.tiers import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders

from kvik.errors import ModelError
from kvik.text.detokenizer import MAX_LEADING, REPLACEMENT, TokenTexts
from kvik.text.tokenizer import Tokenizer

BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}

seeded = settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def tokenizer(library: Library) -> Tokenizer:
    return Tokenizer(library, "<s>", "</s>")


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Return random ids, some beyond the vocabulary, many with parts of characters."""
    everything = range(tokenizer.vocab_size + 3)
    partial = [i for i in everything if REPLACEMENT in tokenizer.decode([i])]
    either = st.sampled_from(everything)
    return st.lists(either | st.sampled_from(partial) if partial else either, max_size=16)


def whole_text(library: Library, ids: Sequence[int]) -> str:
    """Return the library's text, except that a wrong byte does not affect the valid ones next to
    it.

    The library decodes a whole run of byte tokens to U+FFFD if one byte is wrong, which a stream
    cannot revoke. So each run is made valid UTF-8 first.
    """
    repaired: list[int] = []
    run = b""
    for token in ids:
        name = library.id_to_token(token)
        if name is None:
            continue
        if name in BYTE_TOKENS:
            run += bytes([BYTE_TOKENS[name]])
        else:
            repaired += byte_ids(library, run)
            repaired.append(token)
            run = b""
    repaired += byte_ids(library, run)
    return library.decode(repaired, skip_special_tokens=False)


def byte_ids(library: Library, run: bytes) -> list[int]:
    valid = run.decode(errors="replace").encode()
    return [library.token_to_id(f"<0x{byte:02X}>") for byte in valid]


@seeded
@given(data=st.data())
def test_stream_adds_up_to_the_whole_text(
    library: Library, tokenizer: Tokenizer, ids: st.SearchStrategy[list[int]], data: st.DataObject
) -> None:
    tokens = data.draw(ids)
    skip = data.draw(st.booleans())
    shown = [i for i in tokens if not (skip and i in tokenizer.special_ids)]
    stream = tokenizer.new_stream((), skip)
    text, rest = "", tokens
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text += stream.push(rest[:size])
        rest = rest[size:]
    text += stream.flush()
    assert text == whole_text(library, shown)
    assert text == tokenizer.decode(tokens, skip)


@seeded
@given(data=st.data())
def test_streamed_text_lacks_at_most_one_character(
    tokenizer: Tokenizer, ids: st.SearchStrategy[list[int]], data: st.DataObject
) -> None:
    tokens = data.draw(ids)
    stream = tokenizer.new_stream((), skip_special_tokens=False)
    text = ""
    for count, token in enumerate(tokens, start=1):
        text += stream.push([token])
        so_far = tokenizer.decode(tokens[:count], skip_special_tokens=False)
        assert so_far.startswith(text)
        assert so_far[len(text) :].strip(REPLACEMENT) == ""
        assert len(so_far) - len(text) <= 3  # bytes of one character


@seeded
@given(text=st.text(max_size=30))
def test_text_survives_a_round_trip(library: Library, tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.new_stream(())
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = [stream.push([token]) for token in ids]
    assert "".join(parts) == library.decode(ids, skip_special_tokens=True)
    assert stream.flush() == ""


@seeded
@given(data=st.data())
def test_output_continues_the_prompt(
    tokenizer: Tokenizer, ids: st.SearchStrategy[list[int]], data: st.DataObject
) -> None:
    tokens = data.draw(ids)
    cut = data.draw(st.integers(0, len(tokens)))
    skip = data.draw(st.booleans())
    before = tokenizer.decode(tokens[:cut], skip)
    stream = tokenizer.new_stream(tokens[:cut], skip)
    text = stream.push(tokens[cut:]) + stream.flush()
    whole = tokenizer.decode(tokens, skip)
    # A character that begins in the prompt (at most three of its bytes) is shown in the output.
    begun = len(before) - len(before.rstrip(REPLACEMENT))
    assert whole in {before[: len(before) - held] + text for held in range(min(begun, 3) + 1)}


def test_first_token_loses_its_space_only_at_the_start(build: Callable[[str], Library]) -> None:
    library = build("llama2")
    tokenizer = Tokenizer(library, "<s>", "</s>")
    once = tokenizer.encode("Once", add_special_tokens=False)
    bos = library.token_to_id("<s>")
    assert tokenizer.new_stream([bos]).push(once) == "Once"
    assert tokenizer.new_stream([bos], skip_special_tokens=False).push(once) == " Once"
    assert tokenizer.new_stream([bos, *once]).push(once) == " Once"
    assert tokenizer.new_stream([*once, bos]).push(once) == " Once"


def test_character_begun_in_the_prompt_is_finished(build: Callable[[str], Library]) -> None:
    library = build("llama2")
    euro = [library.token_to_id(name) for name in ("<0xE2>", "<0x82>", "<0xAC>")]
    stream = Tokenizer(library).new_stream([library.token_to_id("a"), *euro[:2]])
    assert stream.push(euro[2:]) == "€"


def test_work_per_token_is_bounded(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(library)
    ids = [i % tokenizer.vocab_size for i in range(5000)]
    lengths: list[int] = []
    plain = TokenTexts.decode

    def counted(pieces: TokenTexts, tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return plain(pieces, tokens)

    monkeypatch.setattr(TokenTexts, "decode", counted)
    stream = tokenizer.new_stream(ids)
    for token in ids:
        stream.push([token])
    assert max(lengths, default=0) <= MAX_LEADING
    assert len(lengths) <= 3 * tokenizer.vocab_size + MAX_LEADING  # texts of tokens are cached


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Strip(" ", 0, 1),
    ],
)
def test_decoder_that_looks_ahead_is_refused(
    build: Callable[[str], Library], decoder: decoders.Decoder
) -> None:
    library = build("words")
    library.decoder = decoder
    with pytest.raises(ModelError, match="tokenizer.json: its decoder step"):
        Tokenizer(library)
