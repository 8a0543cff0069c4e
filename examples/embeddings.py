"""Which of several sentences are similar, by the angle between their vectors."""

from kvik import LLM

texts = [
    "The fox ran into the forest.",
    "A bear walked through the woods.",
    "The king gave his daughter a ring of gold.",
]
with LLM() as llm:
    vectors = [output.embedding for output in llm.embed(texts)]
for i, a in enumerate(texts):
    for j in range(i):
        cosine = sum(x * y for x, y in zip(vectors[i], vectors[j], strict=True))
        print(f"{cosine:.3f}  {a}  {texts[j]}")
