"""Real-world model folders, valid and broken."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.stalls import assert_turns
from tokenizers import Tokenizer as Library
from tokenizers import processors
from tokenizers.models import WordLevel, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import AutoTokenizer

from kvik import LLM, SamplingParams
from kvik.core.sampling_params import MAX_LIST_ENTRIES
from kvik.errors import ConfigError, ModelError, ParamError
from kvik.launch import shared_vocabulary
from kvik.text import tokenizer as module
from kvik.text.tokenizer import Tokenizer, spelled


@pytest.fixture
def folder(tmp_path: Path, build: Callable[[str], Library]) -> Path:
    """Return a model folder whose tokenizer adds BOS by itself, with leftovers of a training
    run."""
    library = build("byte-level")
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    return tmp_path


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")


def test_round_trip(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    bos = tokenizer.special_ids & set(tokenizer.encode("", add_special_tokens=True))
    text = "Once upon a time, café 日本語 👩‍🚀 \x00 and more"
    ids = tokenizer.encode(text)
    assert [ids[0]] == list(bos) and tokenizer.token(ids[0]) == "<s>"
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
    assert len(ids) > 4  # neither truncated nor padded
    assert tokenizer.bos_token == "<s>" and tokenizer.eos_token == "</s>"
    assert tokenizer.chat_template is None


def test_rendered_chat_keeps_its_own_bos(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    names = [tokenizer.token(i) for i in tokenizer.encode("<s>a</s>", add_special_tokens=False)]
    assert names == ["<s>", "a", "</s>"]


def test_ids_outside_the_vocabulary_have_no_text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    beyond = [-1, tokenizer.vocab_size, 2**40]
    assert tokenizer.decode([a, *beyond, a]) == "aa"
    assert [tokenizer.token(i) for i in beyond] == ["", "", ""]
    assert tokenizer.token(tokenizer.vocab_size - 1) != ""


@pytest.mark.parametrize("text", ["\ud83d", "good \udc00 bad"])
def test_half_surrogates_are_refused(folder: Path, text: str) -> None:
    with pytest.raises(ParamError, match=r"^prompt: must be valid Unicode; character \d"):
        Tokenizer.load(folder).encode(text)


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a"]])
def test_only_strings_are_encoded(folder: Path, text: str) -> None:
    with pytest.raises(ParamError, match="prompt: must be a string"):
        Tokenizer.load(folder).encode(text)


def test_huge_text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    text = "the sea and the river " * 20_000 + "x" * 50_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("config", "special", "expected"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, None, ("<s>", "</s>")),
        ({"bos_token": {"content": "<s>"}, "eos_token": {"content": "a"}}, None, ("<s>", "a")),
        ({"bos_token": None, "eos_token": "</s>"}, None, (None, "</s>")),
        ({}, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, ("<s>", "</s>")),
        (None, None, (None, None)),
    ],
)
def test_bos_and_eos(
    folder: Path, config: object, special: object, expected: tuple[str | None, str | None]
) -> None:
    (folder / "tokenizer_config.json").unlink()
    if config is not None:
        write(folder, "tokenizer_config.json", config)
    if special is not None:
        write(folder, "special_tokens_map.json", special)
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == expected
    assert {tokenizer.token(i) for i in tokenizer.special_ids} >= {"<s>", "</s>", *expected} - {
        None
    }


def test_chat_template_files(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": "of config"})
    assert Tokenizer.load(folder).chat_template == "of config"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert Tokenizer.load(folder).chat_template == "d"
    write(folder, "tokenizer_config.json", {"chat_template": named[:1]})
    assert Tokenizer.load(folder).chat_template is None
    write(folder, "chat_template.json", {"chat_template": "of json"})
    assert Tokenizer.load(folder).chat_template == "of json"
    write(folder, "chat_template.jinja", "of jinja é")
    assert Tokenizer.load(folder).chat_template == "of jinja é"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "", "tokenizer.json: is not a tokenizer: "),
        ("tokenizer.json", "{}", "tokenizer.json: is not a tokenizer: "),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "tokenizer.json: is not a tokenizer: "),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json: is not JSON: "),
        ("tokenizer_config.json", '{"bos_token": 5}', "bos_token: must be a string or an object"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template: must be a string or"),
        ("chat_template.json", "nonsense", "chat_template.json: is not JSON: "),
    ],
)
def test_corrupt_files(folder: Path, name: str, content: str, message: str) -> None:
    write(folder, name, content)
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(folder)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert str(folder) not in str(caught.value)


def test_binary_files(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template.jinja: must be UTF-8"):
        Tokenizer.load(folder)
    (folder / "special_tokens_map.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match=r"special_tokens_map.json: is not JSON"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ("tokenizer.model", "tokenizer.model alone \\(sentencepiece\\) is not read"),
        ("vocab.json", "vocab.json and merges.txt alone are not read"),
        ("vocab.txt", "vocab.txt alone is not read"),
        ("tekken.json", "tekken.json alone is not read"),
        ("config.json", "is missing from the model folder"),
    ],
)
def test_missing_tokenizer(tmp_path: Path, present: str, message: str) -> None:
    write(tmp_path, present, "")
    with pytest.raises(ModelError, match=f"^tokenizer.json: .*{message}"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ModelError, match="the model folder does not exist"):
        Tokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [None, True, False])
@pytest.mark.parametrize(
    "facts",
    [
        {"do_lower_case": True},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    ],
)
def test_the_config_decides_how_bert_normalises(
    tmp_path: Path, lowercase: bool, strip_accents: bool | None, facts: dict[str, bool]
) -> None:
    text = "Ein Wörter Übung 日本 café"
    letters = [*dict.fromkeys("abcdefghijklmnopqrstuvwxyz" + text)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters)]
    vocabulary = {word: i for i, word in enumerate(words)}
    library = Library(WordPiece(vocabulary, unk_token="[UNK]"))
    library.normalizer = BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    library.pre_tokenizer = BertPreTokenizer()
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    config = {"strip_accents": strip_accents, "tokenizer_class": "BertTokenizer", **facts}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False)["input_ids"]
    assert Tokenizer.load(tmp_path).encode(text, False) == expected


def test_size_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENIZER_BYTES", 1 << 20)
    (folder / "tokenizer.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ModelError, match=r"^tokenizer.json: must have at most 1 MiB$"):
        Tokenizer.load(folder)


def test_mutated_files_never_crash(folder: Path) -> None:
    path = folder / "tokenizer.json"
    good = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = bytes(rng.choices(b'09{}[]",:ae\\\xff', k=2))
        path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        try:
            tokenizer = Tokenizer.load(folder)
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            tokenizer.decode(tokenizer.encode("naïve text 日本"))
    assert refused > 50


def test_bytes_of_tokens_join_to_the_text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    text = "日本語 👩‍🚀 café"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
    assert tokenizer.token_bytes(tokenizer.encode("")[0]) == b"<s>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b"" == tokenizer.token_bytes(-1)


def test_other_threads_run_while_a_long_text_is_encoded(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    text = "Once upon a time there was a fox. " * 10_000
    assert_turns(lambda: tokenizer.encode(text))
    assert tokenizer.encode(text) == tokenizer.library.encode(text).ids


# Bad words as token ids.


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", device="cpu", threads=1, max_model_len=128) as llm:
        yield llm


def test_both_spellings_each_once(llm):
    tokenizer = llm.tokenizer
    ids = spelled(SamplingParams(bad_words=("fox", " fox", (5, 6))), tokenizer).bad_words
    assert set(ids) == {tuple(tokenizer.encode("fox")), tuple(tokenizer.encode(" fox")), (5, 6)}
    assert len(ids) == 3
    many = [f"fox{i}" for i in range(MAX_LIST_ENTRIES)]
    assert len(spelled(SamplingParams(bad_words=many), tokenizer).bad_words) == 2 * len(many)


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
        SamplingParams(bad_words=("fox",)).check_against(100, 10)


# Common tokens are matched by their spelling.


WORDS = [f"w{i}" for i in range(20)]


def tokenizer(words: list[str]) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(words)}
    return Tokenizer(Library(WordLevel(vocab, unk_token=words[0])))


def test_equal_vocabularies_need_no_map() -> None:
    assert shared_vocabulary(tokenizer(WORDS), tokenizer(list(WORDS))) is None


def test_tokens_are_found_by_their_spelling() -> None:
    found = shared_vocabulary(tokenizer(WORDS), tokenizer(["extra", *reversed(WORDS)]))
    assert found == (-1, *reversed(range(20)))


def test_a_smaller_vocabulary_may_lack_a_tenth() -> None:
    assert shared_vocabulary(tokenizer(WORDS), tokenizer(WORDS[:18])) == tuple(range(18))
    with pytest.raises(ConfigError, match=r"spec_model.*knows 85% of the model's tokens"):
        shared_vocabulary(tokenizer(WORDS), tokenizer(WORDS[:17]))
