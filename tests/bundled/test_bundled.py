"""The bundled models are complete, small, and agree with each other."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

import kvik
from kvik import LLM, SamplingParams

BUNDLED = Path(kvik.__file__).parent / "bundled"
NAMES = ("stories", "stories-draft")
FILES = (
    "ATTRIBUTION.md",
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
SPECIAL = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


def read(name: str, file: str) -> dict:
    return json.loads((BUNDLED / name / file).read_text(encoding="utf-8"))


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    with safe_open(BUNDLED / name / "model.safetensors", framework="numpy") as tensors:
        return {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118


def dtypes(name: str) -> set[str]:
    with safe_open(BUNDLED / name / "model.safetensors", framework="numpy") as tensors:
        return {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118


def parameters(name: str) -> int:
    return sum(math.prod(shape) for shape in shapes(name).values())


def expected_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    expected = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        expected |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (queries, hidden),
            layer + "self_attn.k_proj.weight": (keys, hidden),
            layer + "self_attn.v_proj.weight": (keys, hidden),
            layer + "self_attn.o_proj.weight": (hidden, queries),
            layer + "mlp.gate_proj.weight": (ffn, hidden),
            layer + "mlp.up_proj.weight": (ffn, hidden),
            layer + "mlp.down_proj.weight": (hidden, ffn),
        }
    return expected


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "stories" / "tokenizer.json"))


@pytest.mark.parametrize("name", NAMES)
def test_folder_is_complete(name: str) -> None:
    assert {file for file in FILES if not (BUNDLED / name / file).is_file()} == set()


def test_size_on_disk() -> None:
    total = sum(f.stat().st_size for name in NAMES for f in (BUNDLED / name).iterdir())
    assert total <= 24_000_000


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_of_the_config(name: str) -> None:
    config = read(name, "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is True
    assert shapes(name) == expected_shapes(config)
    assert dtypes(name) == {"BF16"}


def test_draft_is_a_tenth_of_the_target_at_most() -> None:
    assert 10 * parameters("stories-draft") <= parameters("stories")


def test_the_draft_model_fits_the_model() -> None:
    first, second = (read(name, "config.json") for name in NAMES)
    for key in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id"):
        assert first[key] == second[key]
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert read("stories", file) == read("stories-draft", file)


@pytest.mark.parametrize("name", NAMES)
def test_special_ids_agree(name: str, tokenizer: Tokenizer) -> None:
    config, generation = read(name, "config.json"), read(name, "generation_config.json")
    settings = read(name, "tokenizer_config.json")
    text_end, turn_end = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|end|>"))
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["bos_token_id"] == generation["bos_token_id"] == text_end
    assert config["eos_token_id"] == text_end
    assert generation["eos_token_id"] == [text_end, turn_end]
    assert settings["bos_token"] == settings["eos_token"] == "<|endoftext|>"
    added = {int(i): t["content"] for i, t in settings["added_tokens_decoder"].items()}
    assert added == {tokenizer.token_to_id(token): token for token in SPECIAL}


@pytest.mark.parametrize(
    "text",
    [
        'Once upon a time, there was a hare.\n\nThe hare said: "I\'m fast!"',
        "Zürich — naïve “quotes” … ß",
        "日本語 한국어 العربية ไทย",
        "🦊🐢 👩‍👩‍👧‍👦",
        "tabs\tand  spaces \r\n and \x00\x01\x7f",
        "".join(chr(c) for c in range(0x2FF)),
        "",
    ],
)
def test_any_text_round_trips(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.get_vocab_size() for i in ids)


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    singles = {token for token in tokenizer.get_vocab() if len(token) == 1}
    assert len(singles) == 256


def test_special_tokens_are_single(tokenizer: Tokenizer) -> None:
    for token in SPECIAL:
        assert len(tokenizer.encode(f"a{token}b").ids) == 3
        assert tokenizer.decode(tokenizer.encode(token).ids) == ""


def chat(messages: list[dict[str, str]], **variables: object) -> str:
    def fail(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = fail
    template = read("stories", "tokenizer_config.json")["chat_template"]
    return environment.from_string(template).render(messages=messages, **variables)


def test_chat_template() -> None:
    messages = [
        {"role": "system", "content": "You are a storyteller."},
        {"role": "user", "content": " Tell me a story. "},
        {"role": "assistant", "content": "Once upon a time."},
        {"role": "user", "content": "Another!"},
    ]
    body = (
        "<|system|>You are a storyteller.<|end|><|user|>Tell me a story.<|end|>"
        "<|assistant|>Once upon a time.<|end|><|user|>Another!<|end|>"
    )
    assert chat(messages) == body
    assert chat(messages, add_generation_prompt=True) == body + "<|assistant|>"


def test_chat_template_refuses_other_roles() -> None:
    with pytest.raises(TemplateError, match="unknown role"):
        chat([{"role": "tool", "content": "42"}])


def test_the_heads_are_for_the_model() -> None:
    name = "stories-medusa"
    config, heads = read("stories", "config.json"), read(name, "config.json")
    sizes = {key: config[key] for key in ("hidden_size", "vocab_size")}
    assert {key: heads[key] for key in sizes} == sizes
    assert dtypes(name) == {"BF16"} and parameters(name) == 4 * (256 * 256 + 256)
    licence = (BUNDLED / "stories" / "ATTRIBUTION.md").read_bytes()
    assert (BUNDLED / name / "ATTRIBUTION.md").read_bytes() == licence


def test_the_heads_draft_tokens_of_the_model() -> None:
    """More than 1.7 tokens per step, and no token differs."""
    prompts = ["Once upon a time there was a", "The king said to his daughter", "One day the fox"]
    params = SamplingParams(temperature=0.0, max_tokens=60)
    wish = {"method": "medusa", "num_speculative_tokens": 16, "adaptive": False}
    with LLM(max_num_seqs=4) as llm:
        expected = llm.generate(prompts, params)
    with LLM(max_num_seqs=4, speculative_config=wish) as llm:
        found = llm.generate(prompts, params)
    for output, other in zip(found, expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
    tokens = sum(output.num_output_tokens for output in found)
    assert tokens / (tokens - sum(output.num_accepted_tokens for output in found)) > 1.7
