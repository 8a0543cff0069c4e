"""Scripts of other libraries' quickstarts run with only the import changed."""

from __future__ import annotations

from kvik import LLM, SamplingParams

FAST = {"max_model_len": 128, "device": "cpu", "dtype": "float32"}


def test_an_offline_batch_as_for_vllm() -> None:
    prompts = ["Once upon a time", "The king said"]
    sampling_params = SamplingParams(
        n=1,
        best_of=1,
        temperature=0.8,
        top_p=0.95,
        max_tokens=8,
        use_beam_search=False,
        stop=["\n"],
    )
    llm = LLM(
        model="",
        tokenizer=None,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.5,
        swap_space=4,
        enforce_eager=True,
        trust_remote_code=True,
        quantization=None,
        enable_chunked_prefill=True,
        disable_log_stats=True,
        **FAST,
    )
    outputs = llm.generate(prompts, sampling_params=sampling_params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.finished and output.outputs[0].finish_reason in ("stop", "length")
        assert output.outputs[0].text and len(output.outputs[0].token_ids) <= 8


def test_a_chat_as_for_vllm() -> None:
    conversation = [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": "Tell one of a fox."},
    ]
    with LLM("", **FAST) as llm:
        outputs = llm.chat(
            conversation, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
        )
        assert len(outputs) == 1 and outputs[0].num_output_tokens == 4


def test_speculation_as_for_vllm() -> None:
    with LLM("", speculative_model="[ngram]", num_speculative_tokens=4, **FAST) as llm:
        assert llm.resolved.speculation is not None
        assert llm.generate("Once", SamplingParams(max_tokens=4, seed=0))[0].num_output_tokens == 4


def test_arguments_have_the_names_of_transformers() -> None:
    greedy = SamplingParams(do_sample=False, max_new_tokens=6)
    with LLM("", torch_dtype="float32", device_map="cpu", max_model_len=128) as llm:
        first, second = llm.generate(["Once upon a time"] * 2, greedy, progress=False)
        assert first.text == second.text and llm.resolved.runner.dtype == "float32"
