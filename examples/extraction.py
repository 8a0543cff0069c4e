"""Facts out of a text, as objects: each answer satisfies the schema of a pydantic model."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from kvik import LLM, SamplingParams


class Animal(BaseModel):
    name: str = Field(max_length=20)
    kind: Literal["bird", "fish", "mammal"]
    legs: int = Field(ge=0, le=8)


TEXTS = ["A fox lived by the river.", "The old owl slept in a tree."]

with LLM() as llm:
    prompts = [f"{text} The animal: " for text in TEXTS]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=100)
    for text, output in zip(TEXTS, llm.generate(prompts, params, schema=Animal), strict=True):
        animal = Animal.model_validate_json(output.text)
        print(f"{text} -> {animal.name!r}, a {animal.kind} on {animal.legs} legs")
