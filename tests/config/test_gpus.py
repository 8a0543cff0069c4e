"""Devices from the text of the driver's tool."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvik.config.env import visible_gpus
from kvik.config.gpus import find_gpus, parse_gpus
from kvik.config.hardware import Gpu
from kvik.config.prompt_attention import prompt_attention_path, save

TABLE = "0, NVIDIA A, 1000, 900, 9.0\n1, NVIDIA B, 2000, 1500, 7.5\n2, C, [N/A], [N/A], 8.0\n"
MIB = 1 << 20
A = Gpu(0, "NVIDIA A", 1000 * MIB, 900 * MIB, (9, 0))
B = Gpu(1, "NVIDIA B", 2000 * MIB, 1500 * MIB, (7, 5))


def test_the_table_is_read() -> None:
    assert parse_gpus(TABLE, None) == (A, B)
    assert parse_gpus("NVIDIA-SMI has failed\n", None) == ()
    assert parse_gpus("", None) == ()


def test_devices_are_numbered_as_cuda_sees_them() -> None:
    found = parse_gpus(TABLE, (1, 5, 0))
    assert [(gpu.index, gpu.name) for gpu in found] == [(0, "NVIDIA B"), (1, "NVIDIA A")]
    assert parse_gpus(TABLE, ()) == ()


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        (None, None),
        ("", ()),
        ("0", (0,)),
        ("2, 0", (2, 0)),
        ("1,-1,0", (1,)),
        ("GPU-8f2c", None),
    ],
)
def test_visible_devices(text: str | None, visible: tuple[int, ...] | None) -> None:
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible_gpus(environ) == visible


def test_without_the_tool_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvik.config.gpus.is_cuda_build", lambda: True)
    monkeypatch.setenv("PATH", "")
    assert find_gpus() == ()


def test_what_was_measured_of_a_device_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<END\n{TABLE}END\n")
    tool.chmod(0o755)
    monkeypatch.setattr("kvik.config.gpus.is_cuda_build", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_gpus() == (A, B)
    save("NVIDIA B", ((128, 2048),), prompt_attention_path())
    assert find_gpus() == (A, replace(B, torch_prompts=((128, 2048),)))
