"""The format of a model's answers, detected from its chat template and confirmed by rendering."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.generating import letters
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel

from kvik.errors import ConfigError
from kvik.text.answer_format import AnswerFormat, MarkedFormat, answer_format, check_tool_format
from kvik.text.dialects import BY_NAME, DIALECTS, Dialect
from kvik.text.harmony import MARKERS, HarmonyFormat
from kvik.text.tokenizer import Tokenizer

START = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- if m.tool_calls %}"""
END = """{% endif %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
HERMES = """{% for c in m.tool_calls %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}"""


def template_of(dialect: Dialect) -> str:
    """Return a minimal template that writes calls in the dialect."""
    if dialect.pythonic:
        value = "{% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}"
        pair = f"{{{{ k }}}}={value}{{% if not loop.last %}}, {{% endif %}}"
        inside = f"{{% for k, v in c.arguments.items() %}}{pair}{{% endfor %}}"
    elif dialect.parameter:
        value = "{{ v if v is string else v | tojson }}"
        pair = dialect.parameter.replace("{key}", "{{ k }}").replace("{value}", value)
        # Jinja drops the line break after a tag.
        pair = pair.replace("\n", "{{ '\\n' }}")
        inside = f"{{% for k, v in c.arguments.items() %}}{pair}{{% endfor %}}"
    else:
        inside = "{{ c.arguments | tojson }}"
    call = dialect.call.replace("{name}", "{{ c.name }}").replace("\n", "{{ '\\n' }}")
    given = "{{ loop.index0 }}" if dialect.id.startswith("[0-9]") else "a1b2c3d4e"
    call = call.replace("{id}", given).replace("{arguments}", inside)
    between = (
        "{% if not loop.last %}" + dialect.between.replace("\n", "{{ '\\n' }}") + "{% endif %}"
    )
    calls = (
        f"{{% for one in m.tool_calls %}}{{% set c = one.function %}}{call}{between}{{% endfor %}}"
    )
    begin, end = (one.replace("\n", "{{ '\\n' }}") for one in (dialect.begin, dialect.end))
    hints = "".join(f"{{# {marker} #}}" for marker in dialect.markers)
    return f"{{# tools #}}{hints}{START}{begin}{calls}{end}{END}"


def found(template: str, asked: str = "auto") -> AnswerFormat:
    return answer_format(letters(template), asked)


def dialect_name(form: AnswerFormat) -> str | None:
    return None if form.tool_format == "none" else form.tool_format


def with_markers(template: str) -> Tokenizer:
    library = Library(WordLevel({"a": 0}, unk_token="a"))
    library.add_special_tokens(list(MARKERS))
    return Tokenizer(library, chat_template=template)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_the_format_that_a_template_writes_is_detected(dialect: Dialect) -> None:
    made = found(template_of(dialect))
    assert dialect_name(made) == dialect.name
    assert isinstance(made, MarkedFormat) and not made.text_arguments


def test_rendered_calls_take_precedence_over_markers() -> None:
    functionary = template_of(BY_NAME["functionary"])
    assert dialect_name(found("{# <tool_call> #}" + functionary)) == "functionary"
    unknown = HERMES.replace('"arguments"', '"args"')
    assert dialect_name(found(START + unknown + END)) is None
    silent = "{# tool <tool_call> #}" + START + END
    assert dialect_name(found(silent)) == "hermes"
    fails = "{# <tool_call> #}{{ raise_exception('no tools') }}"
    assert dialect_name(found(fails)) == "hermes"
    assert dialect_name(found("{{ messages[0].content }}")) is None


def test_a_template_may_take_arguments_as_text() -> None:
    as_text = HERMES.replace("c.function.arguments | tojson", "'' + c.function.arguments")
    made = found(START + as_text + END)
    assert dialect_name(made) == "hermes"
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    (given,) = made.for_template(message)["tool_calls"]
    assert given == {**call, "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert found(START + HERMES + END).for_template(message) is message


def test_a_format_can_be_requested() -> None:
    hermes = START + HERMES + END
    assert dialect_name(found(hermes, "granite")) == "granite"
    assert dialect_name(found("{{ messages }}", "hermes")) == "hermes"
    assert dialect_name(found(hermes, "none")) is None
    assert isinstance(answer_format(with_markers(hermes), "harmony"), HarmonyFormat)
    with pytest.raises(ConfigError, match="^tool_format: the tokenizer .* lacks"):
        found(hermes, "harmony")
    with pytest.raises(ConfigError, match="^tool_format: must be one of .*hermes.* not 'herms'"):
        check_tool_format("herms")


def test_harmony_is_found_where_its_markers_are_tokens() -> None:
    template = "".join(MARKERS)
    assert isinstance(answer_format(with_markers(template)), HarmonyFormat)
    assert dialect_name(found(template)) is None


# Templates of public models, from llama.cpp's collection (models/templates). The omitted ones write
# no calls, or use their own format.
PUBLIC = {
    "Apertus": "apertus", "Apriel": "apriel", "Bielik": "hermes", "ByteDance-Seed": "seed",
    "Cohere2MoE": "cohere", "CohereForAI-c4ai-command-r7b": "cohere", "GLM-4.6": "glm",
    "GLM-4.7": "glm-4.7", "GLM-5": "glm-4.7", "GigaChat3.1": "gigachat", "Kimi": "kimi",
    "LFM2": "pythonic-tokens", "MiMo": "hermes", "Mistral-Small-3.2": "mistral-named-id",
    "NVIDIA-Nemotron-3": "qwen-coder", "NousResearch-Hermes": "hermes", "Qwen-Qw": "hermes",
    "Qwen3-Coder": "qwen-coder", "Qwen3.5": "qwen-coder", "Reka": "hermes",
    "StepFun": "qwen-coder", "deepseek-ai-DeepSeek-R1": "deepseek-v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek-v3.1", "deepseek-ai-DeepSeek-V3.2": None,
    "google-gemma-4": None, "ibm-granite": "granite", "meetkai-functionary-medium-v3.1":
    "functionary", "meta-llama": "llama3", "mistralai-Ministral": "mistral-named",
    "mistralai-Mistral-Nemo": "mistral-array", "moonshotai-Kimi": "kimi",
    "stepfun-ai": "qwen-coder", "unsloth-Apriel": "apriel",
    "unsloth-mistral-Devstral": "mistral-named",
}  # fmt: skip


def test_templates_of_public_models() -> None:
    folder = os.environ.get("KVIK_CHAT_TEMPLATES")
    if folder is None:
        pytest.skip("KVIK_CHAT_TEMPLATES names no folder")
    seen = set()
    for path in sorted(Path(folder).glob("*.jinja")):
        for start, name in PUBLIC.items():
            if path.name.startswith(start):
                assert dialect_name(found(path.read_text())) == name, path.name
                seen.add(start)
        if path.name.startswith("openai-gpt-oss"):
            assert isinstance(answer_format(with_markers(path.read_text())), HarmonyFormat)
    assert seen == PUBLIC.keys()
