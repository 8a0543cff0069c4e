"""Options from the environment and from a TOML file."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from kvik.config.config import EngineConfig
from kvik.config.env import cache_folder, environment_options, read_option_file
from kvik.config.server_config import ServerConfig
from kvik.errors import ConfigError


def test_each_type_is_read() -> None:
    environ = {
        "KVIK_MODEL": "owner/name",
        "KVIK_MAX_MODEL_LEN": "4k",
        "KVIK_MAX_NUM_SEQS": "none",
        "KVIK_MEMORY_UTILIZATION": "0.5",
        "KVIK_ENABLE_PREFIX_CACHING": "off",
        "KVIK_KV_CACHE_MEMORY": "2G",
        "HOME": "/",
        "kvik_seed": "3",
    }
    assert environment_options(environ) == {
        "model": "owner/name",
        "max_model_len": 4096,
        "max_num_seqs": None,
        "memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "kv_cache_memory": 2 << 30,
    }


def test_the_real_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIK_BLOCK_SIZE", "8")
    assert environment_options()["block_size"] == 8


@pytest.mark.parametrize(
    ("variable", "text", "part"),
    [
        ("KVIK_BLOCK_SIZE", "big", "must be an integer"),
        ("KVIK_BLOCK_SIZE", "", "must be an integer"),
        ("KVIK_BLOCK_SIZE", "1.5", "must be an integer"),
        ("KVIK_MAX_WAIT", "soon", "must be a number"),
        ("KVIK_ENABLE_PREFIX_CACHING", "maybe", "must be true or false"),
        ("KVIK_BLOKC_SIZE", "8", "is not a variable of kvik (did you mean KVIK_BLOCK_SIZE?)"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{variable}: .*{re.escape(part)}.*\Z"):
        environment_options({variable: text})


def test_the_cache_folder_follows_the_specification() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/some/where"}) == Path("/some/where/kvik")
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_folder(environ) == Path.home() / ".cache" / "kvik"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the cache folder of a user without a home, among the temporary files."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"kvik-{os.getuid()}"


def test_a_user_without_a_home_has_a_cache_of_their_own(homeless: Path) -> None:
    for _ in range(2):
        assert cache_folder({}) == homeless
    assert homeless.stat().st_mode & 0o777 == 0o700
    assert cache_folder({"XDG_CACHE_HOME": "/some/where"}) == Path("/some/where/kvik")


@pytest.mark.parametrize("trap", ["writable", "link", "file", "owner"])
def test_a_cache_that_others_can_write_to_is_refused(
    homeless: Path, trap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    homeless.mkdir(mode=0o700)
    if trap == "writable":
        homeless.chmod(0o777)
    elif trap == "link":
        homeless.rename(homeless.with_name("elsewhere"))
        homeless.symlink_to(homeless.with_name("elsewhere"))
    elif trap == "file":
        homeless.rmdir()
        homeless.touch()
    else:
        theirs = os.getuid() + 1
        homeless.rename(homeless.with_name(f"kvik-{theirs}"))
        monkeypatch.setattr(os, "getuid", lambda: theirs)
    with pytest.raises(ConfigError, match="^XDG_CACHE_HOME: "):
        cache_folder({})


def test_the_server_has_variables_too() -> None:
    environ = {
        "KVIK_PORT": "80",
        "KVIK_API_KEY": "one, two,",
        "KVIK_SHARE_PREFIX_CACHE": "yes",
        "KVIK_BLOCK_SIZE": "8",
    }
    assert environment_options(environ, ServerConfig) == {
        "port": 80,
        "api_key": ("one", "two"),
        "share_prefix_cache": True,
    }
    assert environment_options(environ) == {"block_size": 8}


@pytest.mark.parametrize("text", ["", " ", ","])
def test_empty_keys_do_not_make_an_open_server(text: str) -> None:
    with pytest.raises(ConfigError, match="KVIK_API_KEY.* empty"):
        environment_options({"KVIK_API_KEY": text}, ServerConfig)


@pytest.mark.parametrize("service", ["KVIK", "KVIK_ROUTER", "KVIK_ADMIN", "KVIK_7B_CHAT"])
def test_service_variables_of_kubernetes_are_ignored(service: str) -> None:
    environ = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "80",
        f"{service}_SERVICE_PORT_HTTP": "80",
        f"{service}_PORT": "tcp://10.0.0.1:80",
        f"{service}_PORT_80_TCP": "tcp://10.0.0.1:80",
        f"{service}_PORT_80_TCP_PROTO": "tcp",
        f"{service}_PORT_80_TCP_PORT": "80",
        f"{service}_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert environment_options(environ) == {}
    assert environment_options(environ, ServerConfig) == {}
    with pytest.raises(ConfigError):
        environment_options({"KVIK_PORT": "http"}, ServerConfig)


def test_a_wrong_variable_of_the_server_is_named() -> None:
    for kind in (EngineConfig, ServerConfig):
        with pytest.raises(ConfigError, match="KVIK_PROT") as error:
            environment_options({"KVIK_PROT": "80"}, kind)
        assert "KVIK_PORT" in error.value.message


def read(folder: Path, text: str) -> dict[type, dict[str, object]]:
    file = folder / "kvik.toml"
    file.write_text(text)
    return read_option_file(str(file))


def test_each_type_of_a_file_is_read(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """
        model = "owner/name"
        max-model-len = "4k"
        max_num_seqs = 8
        memory_utilization = 0.5
        max-wait = 1
        enable-prefix-caching = false
        kv_cache_dtype_skip_layers = [0, 1]
        num_blocks = "none"
        port = 80
        api-key = ["a", "b,c"]
        cors_origin = "https://a.example"
        [speculative_config]
        method = "ngram"
        num_speculative_tokens = 8
        """,
    )
    assert found[EngineConfig] == {
        "model": "owner/name",
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "memory_utilization": 0.5,
        "max_wait": 1.0,
        "enable_prefix_caching": False,
        "kv_cache_dtype_skip_layers": (0, 1),
        "num_blocks": None,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 8},
    }
    assert found[ServerConfig] == {
        "port": 80,
        "api_key": ("a", "b,c"),
        "cors_origin": ("https://a.example",),
    }


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("prot = 80", "unknown key 'prot', which is not an option (did you mean port?)"),
        ("[server]\nport = 80", "unknown key 'server'"),
        ('port = "eighty"', "port in "),
        ("port = 80.5", "must be an integer"),
        ("port = true", "must be an integer"),
        ("port = [80]\nhost = 1", "must be text"),
        ("enable_prefix_caching = 1", "must be true or false"),
        ('enable_prefix_caching = "yes"', "must be true or false"),
        ("host = 127", "must be text"),
        ("cors_origin = [1]", "must be text"),
        ("host = ['a', 'b']", "must be text"),
        ("speculative_config = 1", "must be a JSON object"),
        ("max_num_seqs = 2024-01-01", "must be an integer"),
        ("port = 1\nport = 2", "is not TOML"),
        ("max-model-len = 1\nmax_model_len = 2", "sets max_model_len twice"),
        ("port =", "is not TOML"),
    ],
)
def test_errors_in_a_file_are_named(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config: .*{re.escape(part)}.*\Z"):
        read(tmp_path, text)


def test_a_key_of_a_file_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "api_key = [12345]")
    assert "12345" not in error.value.message


def test_no_file() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_option_file("/no/such/file.toml")


def test_a_binary_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_option_file(str(tmp_path / "x"))
