"""A model folder is data: its code is never run, even if its config requests that."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvik
from kvik import LLM, KvikError, SamplingParams

BUNDLED = Path(kvik.__file__).with_name("bundled")
OPTIONS = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 128}
CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Model: pass\n"
ASKS = {
    "config.json": {
        "AutoConfig": "foreign.Model",
        "AutoModelForCausalLM": "foreign.Model",
        "AutoProcessor": "foreign.Model",
    },
    "tokenizer_config.json": {"AutoTokenizer": ["foreign.Model", "foreign.Model"]},
}


def with_code(folder: Path, name: str) -> Path:
    shutil.copytree(BUNDLED / name, folder)
    for module in ("foreign", "modeling_foreign", "tokenization_foreign", "__init__"):
        (folder / f"{module}.py").write_text(CODE)
    for file, asked in ASKS.items():
        values = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**values, "auto_map": asked}))
    return folder


@pytest.mark.parametrize("drafter", [False, True])
def test_code_in_a_model_folder_is_not_run(tmp_path: Path, drafter: bool) -> None:
    folders = [with_code(tmp_path / "model", "stories")]
    speculation = {}
    if drafter:
        folders.append(with_code(tmp_path / "draft", "stories-draft"))
        speculation = {"speculative_config": {"method": "draft_model", "model": str(folders[1])}}
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM(str(folders[0]), **OPTIONS, **speculation) as llm:
        (output,) = llm.generate(["Once"], params, progress=False)
    assert len(output.outputs[0].token_ids) == 8
    for folder in folders:
        assert not (folder / "ran").exists()
    assert not {"foreign", "modeling_foreign", "tokenization_foreign"} & set(sys.modules)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "engine.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
        "shard.safetensors",
    ],
)
def test_files_that_are_not_regular_are_refused(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    """Reading a pipe would wait forever, and some devices never end."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED / "stories", folder)
    if name in ("model.safetensors.index.json", "shard.safetensors"):
        (folder / "model.safetensors").unlink()
        index = {"weight_map": {"x": "shard.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(KvikError, match=rf"^{name}: cannot be read \(it is not a regular file\)"):
        LLM(str(folder), **OPTIONS)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "model.gguf"])
def test_pointers_of_git_lfs_are_named(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED / "stories", folder)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    model = folder / name if name.endswith(".gguf") else folder
    with pytest.raises(KvikError, match=rf"^{name}: cannot be read \(.*Git LFS"):
        LLM(str(model), **OPTIONS)


@pytest.mark.timeout(60)
def test_a_pipe_is_no_gguf_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(KvikError, match=r"^model\.gguf: cannot be read"):
        LLM(str(tmp_path), **OPTIONS)
