"""API keys: who calls."""

from __future__ import annotations

import hmac
from hashlib import sha256
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from kvik.errors import ConfigError
from kvik.server.access import Keys, read_keys


def who(keys: Keys, **headers: str) -> str | None:
    raw = [(name.replace("_", "-").encode(), v.encode("latin-1")) for name, v in headers.items()]
    caller = keys.caller(Headers(raw=raw))
    return caller and caller.name


def test_without_keys_everybody_may() -> None:
    keys = read_keys([])
    assert not keys.needed
    assert who(keys) == who(keys, authorization="Bearer x") == "anybody"


def test_a_file_with_names_administrators_and_hashes(tmp_path: Path) -> None:
    digest = sha256(b"third").hexdigest()
    file = tmp_path / "keys"
    file.write_text(
        "# who may\n\nalice: first\n  bob:  second admin \n"
        f"carol: sha256:{digest}\nsk:with:colons\n"
    )
    keys = read_keys(["given"], str(file))
    assert keys.needed
    assert keys.has_admin
    for text, name in (
        ("first", "alice"),
        ("second", "bob"),
        ("third", "carol"),
        ("sk:with:colons", "line-6"),
        ("given", "key-1"),
        (digest, None),
        (f"sha256:{digest}", None),
        ("alice:", None),
        ("admin", None),
        ("#", None),
    ):
        assert who(keys, authorization=f"Bearer {text}") == name
        assert who(keys, x_api_key=text) == name
    bob = keys.caller(Headers({"x-api-key": "second"}))
    assert bob is not None
    assert (bob.tenant, bob.is_admin) == ("bob", True)


@pytest.mark.parametrize(
    ("given", "lines", "administrators"),
    [
        (["a"], None, {"a"}),
        ([], "a", {"a"}),
        ([], f"sha256:{sha256(b'a').hexdigest()}", {"a"}),
        ([], "user: a", set()),
        ([], "user: a admin", {"a"}),
        (["a", "b"], None, set()),
        (["a"], "b", set()),
        (["a"], "b admin", {"b"}),
        ([], "a\nb", set()),
    ],
)
def test_the_key_of_a_server_with_a_single_user_is_an_administrators(
    tmp_path: Path, given: list[str], lines: str | None, administrators: set[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text(lines or "")
    keys = read_keys(given, None if lines is None else str(file))
    callers = {text: keys.caller(Headers({"x-api-key": text})) for text in ("a", "b")}
    assert {text for text, who in callers.items() if who and who.is_admin} == administrators
    assert keys.has_admin == bool(administrators)


def test_only_hashes_are_kept() -> None:
    keys = read_keys(["sesame"])
    assert "sesame" not in repr(vars(keys))


def test_any_bytes_may_be_sent() -> None:
    keys = read_keys(["right"])
    assert who(keys, x_api_key="\xff\x80") is None
    assert who(keys, x_api_key="r" * 60_000) is None


def test_every_key_is_compared_whatever_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time taken tells neither which key it was nor how much of it was right."""
    keys = read_keys([f"key{i}" for i in range(10)])
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def count(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", count)
    for text in ("key0", "key9", "wrong"):
        del compared[:]
        keys.caller(Headers({"x-api-key": text}))
        assert len(compared) == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one two three", "line 1 must be"),
        ("a: x\na: y", "the name a twice"),
        ("", "holds no key"),
        ("# nothing", "holds no key"),
        ("x: \u00fc", "printable ASCII"),
    ],
)
def test_a_wrong_file_is_refused_and_no_key_shown(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_keys([], str(file))
    assert error.value.field == "api_key_file"
    assert "three" not in error.value.message


@pytest.mark.parametrize("key", ["", " x", "a\nb", "ü"])
def test_a_key_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(ConfigError, match="printable"):
        read_keys([key])


def test_no_file() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys([], "/no/such/file")
