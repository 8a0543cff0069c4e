"""An agent with two tools: the model chooses a tool and its arguments until it has an answer.

Every step is valid by grammar, so the loop needs no parser and no second try.
"""

from __future__ import annotations

from collections.abc import Callable

from kvik import LLM, lang

ANIMALS = {"fox": 4, "owl": 2}
TOOLS: dict[str, tuple[str, Callable[[str], object]]] = {
    "legs_of": ("fox|owl", lambda animal: ANIMALS[animal]),
    "double": ("[0-9]{1,2}", lambda number: 2 * int(number)),
}
STEPS = 3


def agent(state: lang.State, question: str) -> None:
    state += f"Question: {question}\n"
    for _ in range(STEPS):
        state += "Do: "
        tool = state.gen("tool", choices=[*TOOLS, "answer"], temperature=0.8, seed=4)
        if tool == "answer":
            break
        arguments, call = TOOLS[tool]
        state += "("
        given = state.gen("arguments", regex=arguments, temperature=0.8, seed=4)
        state += f") = {call(given)}\n"
    state += "\nAnswer: "
    state.gen("answer", regex="[0-9]{1,2} legs", temperature=0.0)


with LLM() as llm:
    print(lang.run(agent, llm, "How many legs have two foxes?").text)
