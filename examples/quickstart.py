"""One prompt, one text. Without a name, LLM() loads the small story model that ships with kvik."""

from kvik import LLM, SamplingParams

with LLM() as llm:
    (output,) = llm.generate("Once upon a time", SamplingParams(temperature=0.8, max_tokens=60))
    print(output.prompt + output.text)
