"""A tree of thoughts: forks propose, `select` judges them, and the best one continues."""

from __future__ import annotations

from kvik import LLM, lang

BRANCHES, DEPTH = 3, 2


def propose(state: lang.State, number: int) -> None:
    """Write a sentence, and say how likely its reader finds it good."""
    state.gen("thought", temperature=0.9, seed=number, max_tokens=30, stop=["."])
    state += "."
    judge = state.fork(1)[0]
    judge += " The story was"
    judge.select("verdict", [" good", " bad"])
    state.scores["verdict"] = judge.scores["verdict"]


def tree(state: lang.State) -> None:
    state += "Once upon a time there was a fox."
    for depth in range(DEPTH):
        branches = state.fork(BRANCHES, propose)
        best = max(branches, key=lambda branch: branch.scores["verdict"][" good"])
        print(f"{depth}: {BRANCHES} thoughts, the best scores", end=" ")
        print(f"{best.scores['verdict'][' good']:.2f}:{best['thought']}.")
        state += best["thought"] + "."


with LLM() as llm:
    print(lang.run(tree, llm).text)
