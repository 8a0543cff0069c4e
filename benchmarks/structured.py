"""What structured output costs: in tokens/s of a batch, and in time to the first token.

python benchmarks/structured.py [MODEL] [--load-format random] [--quantization Q] [--rounds N]

Every round runs the same batch unconstrained and with a separate schema for each request; ratios
are taken within a round. The texts never end early, so both make the same number of tokens. Then a
schema with long names is answered with and without forced tokens as drafts, and so is an
unconstrained text.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from kvik import LLM, SamplingParams
from kvik.core.structured import JsonSchema
from kvik_bench.scripts import spread

BATCH, TOKENS = 32, 64


def schema(i: int) -> dict[str, Any]:
    """Return a schema with unique names, and with more strings than fit into an answer."""
    names = [f"field {i} {k}" for k in range(24)]
    text = {"type": "string"}
    return {"type": "object", "properties": dict.fromkeys(names, text), "required": names}


def wide(i: int) -> dict[str, Any]:
    names = [f"property {i} {k}" for k in range(100)]
    return {
        "type": "object",
        "properties": {name: {"type": ["string", "null"]} for name in names},
        "required": names,
    }


STATION = {
    "type": "object",
    "properties": {
        name: {"type": "string", "maxLength": 12}
        for name in (
            *("temperature_celsius", "relative_humidity", "wind_direction"),
            *("observation_station", "visibility_km", "cloud_cover"),
        )
    },
    "additionalProperties": False,
}
STATION["required"] = list(STATION["properties"])


def rate(llm: LLM, params: list[SamplingParams]) -> float:
    started = time.perf_counter()
    outputs = llm.generate(["Once upon a time"] * len(params), params)
    seconds = time.perf_counter() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def first(llm: LLM, params: SamplingParams) -> float:
    started = time.perf_counter()
    llm.generate("Once upon a time", params)
    return (time.perf_counter() - started) * 1e3


def shown(values: list[float]) -> str:
    return spread(values, ".3f")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--load-format", default="safetensors")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    free = SamplingParams(temperature=0.8, max_tokens=TOKENS, ignore_eos=True)
    options = {
        "load_format": arguments.load_format,
        "quantization": arguments.quantization,
        "max_model_len": 512,
        "max_num_seqs": BATCH,
    }
    with (
        LLM(arguments.model, **options) as llm,
        LLM(arguments.model, spec_method="forced", **options) as jumping,
    ):
        held = [free.with_changes(structured=JsonSchema(schema(i)), seed=i) for i in range(BATCH)]
        plain = [free.with_changes(seed=i) for i in range(BATCH)]
        for params in (plain, held):
            rate(llm, params)
        ratios, rates = [], []
        for _ in range(arguments.rounds):
            without, structured = rate(llm, plain), rate(llm, held)
            ratios.append(structured / without)
            rates.append(without)
        print(f"batch {BATCH}: {shown(rates)} tokens/s free, structured / free {shown(ratios)}")
        one = free.with_changes(max_tokens=1)
        new, known, none = [], [], []
        for i in range(20):
            asked = one.with_changes(structured=JsonSchema(wide(i)))
            none.append(first(llm, one))
            new.append(first(llm, asked) - none[-1])
            known.append(first(llm, asked) - none[-1])
        print(f"first token: {shown(none)} ms; with a schema of 100 properties {shown(new)} more")
        print(f"the first time, {shown(known)} more later")
        held_one = free.with_changes(max_tokens=200, structured=JsonSchema(STATION))
        for name, asked in (("structured", held_one), ("free", free)):
            ratios = []
            for i in range(arguments.rounds + 1):
                params = asked.with_changes(seed=i)
                ratios.append(first(llm, params) / first(jumping, params))
            print(f"forced drafts, {name}: {shown(ratios[1:])} times as fast")


if __name__ == "__main__":
    main()
