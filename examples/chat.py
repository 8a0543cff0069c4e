"""A conversation: the model's own chat template makes a prompt of the messages."""

from kvik import LLM, SamplingParams

messages = [{"role": "user", "content": "Tell me a story about a fox."}]
params = SamplingParams(temperature=0.7, max_tokens=60, seed=3)

with LLM() as llm:
    (output,) = llm.chat(messages, params)
    print(output.text)
    messages += [
        {"role": "assistant", "content": output.text},
        {"role": "user", "content": "Tell me a story about a bear."},
    ]
    # The first turn is still in the prefix cache: only what is new is computed.
    (output,) = llm.chat(messages, params)
    print(output.text)
    print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached")
