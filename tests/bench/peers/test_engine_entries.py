"""The engines of a comparison."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kvik.errors import ConfigError
from kvik_bench.peers.engine_entries import (
    ADAPTERS,
    FOLDER,
    EngineEntry,
    engines_of_file,
    installed_engines,
)

FILE = """
threads = 3
[engines.fast]
adapter = "openvino"
format = "int8"
python = "/envs/ov/bin/python"
model = "/models/{model}/int8"
options = { properties = { HINT = "x" } }
env = { NAME = "value" }
together = true
[engines.plain]
adapter = "transformers"
format = "bf16"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engines.toml"
    path.write_text(FILE)
    return path


def test_every_adapter_has_its_file() -> None:
    scripts = {EngineEntry(adapter=name, format="bf16").script for name in ADAPTERS}
    others = {FOLDER / f"{name}.py" for name in ("__init__", "protocol", "run")}
    assert scripts | others == set(FOLDER.glob("*.py"))


def test_installed_engines_run_in_each_format_and_kvik_always() -> None:
    found = installed_engines([], ["fp32", "int8"], modules=["kvik", "transformers"])
    assert [*found.entries] == [
        "kvik-fp32",
        "transformers-fp32",
        "transformers-batching-fp32",
        "kvik-int8",
    ]
    assert found.entries["kvik-int8"].options == {"dtype": "bfloat16", "quantization": "int8"}
    assert found.entries["kvik-fp32"].python == sys.executable
    assert not found.absent
    assert {"vllm", "openvino", "llama.cpp"} <= {*found.left_out}


def test_requested_engines_that_cannot_run_are_errors() -> None:
    found = installed_engines(
        ["vllm", "openvino", "transformers"], ["bf16", "int4"], modules=["kvik", "transformers"]
    )
    assert [*found.entries] == ["kvik-bf16", "transformers-bf16", "kvik-int4"]
    assert found.absent == {
        "vllm-bf16": "is not installed here (--config names other Pythons)",
        "openvino-bf16": "needs a folder that optimum-cli made (--config)",
        "vllm-int4": "is not installed here (--config names other Pythons)",
        "openvino-int4": "needs a folder that optimum-cli made (--config)",
        "transformers-int4": (
            "cannot read a plain folder as int4 (--config names converted models)"
        ),
    }
    assert not found.left_out


def test_installed_engines_are_found() -> None:
    assert "transformers-bf16" in installed_engines([], ["bf16"]).entries


def test_a_file_describes_engines(file: Path) -> None:
    found = engines_of_file(file, [], [])
    assert found.threads == 3
    assert [*found.entries] == ["kvik-int8", "kvik-bf16", "fast", "plain"]
    fast, plain = found.entries["fast"], found.entries["plain"]
    assert fast.python == "/envs/ov/bin/python"
    assert fast.model_path(Path("/hub/story"), "story") == "/models/story/int8"
    assert fast.options == {"properties": {"HINT": "x"}}
    assert fast.env == {"NAME": "value"}
    assert fast.together
    assert plain.model_path(Path("/hub/story"), "story") == "/hub/story"
    assert (plain.python, plain.together) == (sys.executable, False)


@pytest.mark.parametrize(
    ("wanted", "formats", "names"),
    [
        (["fast"], [], ["kvik-int8", "fast"]),
        (["transformers"], [], ["kvik-bf16", "plain"]),
        (["kvik", "plain"], [], ["kvik-bf16", "plain"]),
        ([], ["int8"], ["kvik-int8", "fast"]),
    ],
)
def test_a_part_of_a_file_is_chosen_by_name_adapter_or_format(
    file: Path, wanted: list[str], formats: list[str], names: list[str]
) -> None:
    assert [*engines_of_file(file, wanted, formats).entries] == names


def test_the_format_sets_the_dtype_of_every_engine(tmp_path: Path) -> None:
    """Regression: transformers ran in bfloat16 under the label "fp32"."""
    path = tmp_path / "engines.toml"
    path.write_text(
        '[engines.t]\nadapter = "transformers"\nformat = "fp32"\n'
        'options = { attn_implementation = "eager" }\n'
        '[engines.b]\nadapter = "transformers-batching"\nformat = "fp16"\n'
        '[engines.v]\nadapter = "vllm"\nformat = "bf16"\n'
        '[engines.k]\nadapter = "kvik"\nformat = "int8"\n'
        '[engines.o]\nadapter = "openvino"\nmodel = "/ov"\nformat = "fp32"\n'
        "options = { properties = { HINT = 1 } }\n"
        '[engines.stored]\nadapter = "kvik"\nmodel = "/gptq"\nformat = "int4"\n'
        '[engines.gguf]\nadapter = "llama.cpp"\nmodel = "/m.gguf"\nformat = "int4"\n'
        '[engines.mixed]\nadapter = "vllm"\nformat = "int8"\noptions = { quantization = "x" }\n'
    )
    options = {name: e.options for name, e in engines_of_file(path, [], []).entries.items()}
    assert options["t"] == {"dtype": "float32", "attn_implementation": "eager"}
    assert options["b"] == {"dtype": "float16"}
    assert options["v"] == {"dtype": "bfloat16"}
    assert options["k"] == {"dtype": "bfloat16", "quantization": "int8"}
    assert options["o"] == {"properties": {"INFERENCE_PRECISION_HINT": "f32", "HINT": 1}}
    assert options["stored"] == options["gguf"] == {}  # as the files are stored
    assert options["mixed"] == {"quantization": "x"}


def test_a_file_may_bring_its_own_kvik_and_its_own_adapter(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    path = tmp_path / "engines.toml"
    path.write_text(
        '[engines.away]\nadapter = "kvik"\nmodel = "/q6"\nformat = "q6"\n'  # in another folder
        '[engines.ours]\nadapter = "kvik"\nmodel = "/q5"\nformat = "q5"\n'
        '[engines.mine]\nadapter = "mine.py"\nformat = "q5"\n'
    )
    entries = engines_of_file(path, ["mine"], []).entries
    assert [*entries] == ["ours", "mine"]
    assert entries["mine"].script == tmp_path / "mine.py"


def test_what_is_wrong_in_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    for text, field in (
        ("nonsense", "config"),
        ("colour = 1", "config"),
        ("threads = 0\n[engines.a]", "threads"),
        ("threads = 2", "engines"),
        ('[engines.a]\nadapter = "vllm"', "engines.a"),
        ('[engines.a]\nadapter = "vllm"\nformat = "bf16"\ncolour = 1', "engines.a"),
        ('[engines.a]\nadapter = "vllm"\nformat = "bf16"\ntogether = 1', "engines.a.together"),
        ('[engines.a]\nadapter = "vllm"\nformat = "bf16"\nenv = { A = 1 }', "engines.a.env[...]"),
        ('[engines.a]\nadapter = "nobody"\nformat = "bf16"', "engines.a.adapter"),
        ('[engines.a]\nadapter = "vllm"\nmodel = "/q5"\nformat = "q5"', "config"),
        ('[engines.a]\nadapter = "transformers"\nformat = "int4"', "engines.a.format"),
        (
            '[engines.a]\nadapter = "vllm"\nformat = "fp32"\noptions = { dtype = "bfloat16" }',
            "engines.a.options.dtype",
        ),
        (
            '[engines.a]\nadapter = "openvino"\nmodel = "/ov"\nformat = "fp32"\n'
            'options = { properties = { INFERENCE_PRECISION_HINT = "bf16" } }',
            "engines.a.options.properties.INFERENCE_PRECISION_HINT",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"^{re.escape(field)}: "):
            engines_of_file(path, [], [])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config: .*none.toml cannot be read \(No such file"):
        engines_of_file(tmp_path / "none.toml", [], [])


def test_unknown_engines_and_formats_are_named(file: Path) -> None:
    with pytest.raises(ConfigError, match="engines: must be of kvik, .*, not 'vlm'"):
        installed_engines(["vlm"], ["bf16"], modules=[])
    with pytest.raises(ConfigError, match="format: must be of .*, not 'q5'"):
        installed_engines([], ["q5"], modules=[])
    with pytest.raises(ConfigError, match="engines: must be of .*fast, plain.*, not 'vllm'"):
        engines_of_file(file, ["vllm"], [])
    with pytest.raises(ConfigError, match="format: must be of int8, bf16, not 'int4'"):
        engines_of_file(file, [], ["int4"])
