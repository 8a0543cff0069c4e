"""The offline API on the bundled model."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.optional_native import needs_native

from kvik import (
    LLM,
    AsyncLLM,
    CapacityError,
    ConfigError,
    KvikError,
    ModelError,
    ParamError,
    SamplingParams,
)
from kvik.config.config import EngineConfig
from kvik.config.hardware import detect
from kvik.core.structured import Regex
from kvik.launch import load_tokenizer, resolve_config
from kvik.text.infill import Markers

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", device="cpu", threads=1, max_model_len=256, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_leaks(llm) -> Iterator[None]:
    yield
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)


def test_prompts_come_in_many_shapes(llm):
    text = "Once upon a time"
    ids = llm.tokenizer.encode(text)
    (alone,) = llm.generate(text, GREEDY)
    assert alone.prompt == text
    assert list(alone.prompt_token_ids) == ids
    assert len(alone.outputs[0].token_ids) == 8
    assert alone.text == llm.tokenizer.decode(alone.outputs[0].token_ids)
    same = [
        *llm.generate([text], GREEDY),
        *llm.generate(ids, GREEDY),
        *llm.generate([ids, text], [GREEDY, GREEDY]),
    ]
    assert [output.text for output in same] == [alone.text] * 4
    assert llm.generate([], GREEDY) == []


def test_outputs_keep_the_order_of_the_prompts(llm):
    prompts = [[5 + i] * (1 + i % 7) for i in range(40)]
    params = [GREEDY.with_changes(max_tokens=1 + i % 5) for i in range(40)]
    outputs = llm.generate(prompts, params)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert [output.num_output_tokens for output in outputs] == [1 + i % 5 for i in range(40)]


def test_a_batch_longer_than_the_queue(llm):
    outputs = llm.generate([[7, i % 100] for i in range(700)], GREEDY.with_changes(max_tokens=1))
    assert len(outputs) == 700


def test_a_batch_longer_than_the_queue_in_tokens():
    limits = {"max_queued_tokens": 20, "max_queued_requests": 3, "max_num_seqs": 2}
    with LLM(dtype="float32", device="cpu", threads=1, max_model_len=64, **limits) as llm:
        outputs = llm.generate([[7] * 12, [8] * 30, *[[9] * 5] * 9], GREEDY)
        assert [output.num_output_tokens for output in outputs] == [8] * 11
        (several,) = llm.generate([[7] * 12], GREEDY.with_changes(n=3))
        assert len(several.outputs) == 3
        texts = [Regex(f"[a-z ]{{{i},90}}") for i in range(8)]  # their grammars take a moment
        params = [GREEDY.with_changes(structured=text) for text in texts]
        assert len(llm.generate([[7] * 12] * 8, params)) == 8


def test_streamed_text_is_the_text(llm):
    (whole,) = llm.generate("One day", GREEDY)
    with llm.stream("One day", GREEDY) as stream:
        deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [t for delta in deltas for t in delta.token_ids] == whole.outputs[0].token_ids
    assert deltas[-1].finish_reason == "length"
    assert stream.output.text == whole.text


def test_the_token_ids_of_the_caller_are_not_changed(llm):
    ids = [5, 6, 7]
    stream = llm.stream(ids, GREEDY)
    for delta in stream:
        ids += delta.token_ids
    assert list(stream.output.prompt_token_ids) == [5, 6, 7]


def test_streams_and_batches_share_the_engine(llm):
    (expected,) = llm.generate("One day", GREEDY)
    stream = llm.stream("One day", GREEDY)
    next(stream)
    assert llm.generate("One day", GREEDY)[0].text == expected.text
    for _ in stream:
        pass
    assert stream.output.text == expected.text


def test_a_closed_stream_frees_its_request(llm):
    stream = llm.stream("One day", GREEDY.with_changes(max_tokens=200))
    next(stream)
    assert llm.stats().num_running == 1
    stream.close()
    assert list(stream) == []
    stream.close()


def test_chat(llm):
    hello = [{"role": "user", "content": "Tell me a story about a fox."}]
    (one,) = llm.chat(hello, GREEDY)
    two = llm.chat([hello, hello], GREEDY)
    assert [output.text for output in two] == [one.text] * 2
    stream = llm.stream_chat(hello, GREEDY)
    assert "".join(delta.text for delta in stream) == one.text
    assert one.prompt == llm.render_chat(hello)
    with pytest.raises(ParamError, match="messages"):
        llm.chat([], GREEDY)
    with pytest.raises(ParamError, match="messages"):
        llm.chat([{"content": "no role"}], GREEDY)


def test_siblings_with_a_seed(llm):
    params = SamplingParams(n=4, seed=5, max_tokens=12, ignore_eos=True)
    first, again = llm.generate(["Once"] * 2, params)
    texts = [c.text for c in first.outputs]
    assert texts == [c.text for c in again.outputs]
    assert len(set(texts)) == 4
    other = llm.generate("Once", params.with_changes(seed=6))[0]
    assert other.outputs[0].text not in texts


def test_scores_are_the_log_probabilities_of_the_prompt(llm):
    (whole,) = llm.generate("The little fox", GREEDY.with_changes(logprobs=2))
    produced = whole.outputs[0]
    ids = [*whole.prompt_token_ids, *produced.token_ids]
    (scored,) = llm.score(ids, top=2)
    assert len(scored.prompt_logprobs) == len(ids)
    assert scored.prompt_logprobs[0] is None
    tail = scored.prompt_logprobs[len(whole.prompt_token_ids) :]
    for found, known in zip(tail, produced.logprobs, strict=True):
        assert found.token_id == known.token_id
        assert found.logprob == pytest.approx(known.logprob, abs=1e-4)
        assert found.rank == known.rank == 1
        assert [t for t, _ in found.top] == [t for t, _ in known.top]
    assert all(math.exp(p.logprob) <= 1 for p in scored.prompt_logprobs[1:])


def test_a_prompt_as_long_as_the_context_has_a_score(llm):
    (scored,) = llm.score([7] * 256)
    assert len(scored.prompt_logprobs) == 256
    assert scored.outputs[0].token_ids == []
    assert scored.metrics.ttft is None
    (one,) = llm.score([7])
    assert one.prompt_logprobs == [None]


def test_scores_do_not_depend_on_chunks_or_on_the_prefix_cache(llm):
    ids = llm.generate("Once", SamplingParams(seed=1, max_tokens=90, ignore_eos=True))[0]
    ids = ids.outputs[0].token_ids
    first, second = llm.score(ids)[0], llm.score(ids)[0]
    assert second.num_cached_tokens == 0
    small = {"max_num_batched_tokens": 7, "max_num_seqs": 4, "max_model_len": 256}
    with LLM(dtype="float32", device="cpu", threads=1, **small) as chunked:
        third = chunked.score(ids)[0]
    for other in (second, third):
        for a, b in zip(first.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_scores_of_last_tokens_use_the_prefix_cache(llm):
    ids = llm.generate("Once", SamplingParams(seed=2, max_tokens=90, ignore_eos=True))[0]
    ids = ids.outputs[0].token_ids
    whole = llm.score(ids, top=1)[0].prompt_logprobs
    for start in (0, 1, 2, 50, 88, 89):
        (output,) = llm.score(ids, top=1, start=start)
        found = output.prompt_logprobs
        assert found[: max(1, start)] == [None] * max(1, start)
        assert [one.token_id for one in found[max(1, start) :]] == ids[max(1, start) :]
        for one, right in zip(found[max(1, start) :], whole[max(1, start) :], strict=True):
            assert one.logprob == pytest.approx(right.logprob, abs=1e-4)
        assert output.num_cached_tokens == max(0, start - 1) // 16 * 16
    with pytest.raises(ParamError, match="prompt_logprobs_start"):
        llm.score(ids, start=90)
    with pytest.raises(ParamError, match="prompt_logprobs_start"):
        SamplingParams(prompt_logprobs_start=3)


@pytest.mark.full
def test_output_ends_at_the_end_of_the_context(llm):
    params = SamplingParams(seed=1, max_tokens=10_000, ignore_eos=True)
    (output,) = llm.generate("Once upon a time", params)
    assert len(output.prompt_token_ids) + output.num_output_tokens == 256
    assert output.outputs[0].finish_reason == "length"


def test_stop_strings_and_stop_ids(llm):
    (free,) = llm.generate("Once upon a time", GREEDY.with_changes(max_tokens=20))
    word = free.text.split()[3]
    (cut,) = llm.generate("Once upon a time", GREEDY.with_changes(max_tokens=20, stop=word))
    assert cut.text == free.text[: free.text.index(word)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", word)
    token = free.outputs[0].token_ids[4]
    ends = GREEDY.with_changes(max_tokens=20, stop_token_ids=[token])
    completion = llm.generate("Once upon a time", ends)[0].outputs[0]
    first = free.outputs[0].token_ids.index(token)
    assert completion.token_ids == free.outputs[0].token_ids[: first + 1]
    assert completion.stop_reason == token


def test_eos_ends_and_can_be_ignored(llm):
    eos = llm.resolved.model.eos_token_ids[0]
    only = SamplingParams(allowed_token_ids=[eos, 300], logit_bias={eos: 100.0}, max_tokens=6)
    completion = llm.generate("Once", only)[0].outputs[0]
    assert (completion.token_ids, completion.finish_reason) == ([eos], "stop")
    assert completion.stop_reason is None
    later = llm.generate("Once", only.with_changes(min_tokens=3))[0].outputs[0]
    assert later.token_ids == [300, 300, 300, eos]
    ignored = llm.generate("Once", only.with_changes(ignore_eos=True))[0].outputs[0]
    assert ignored.token_ids == [eos] * 6


BAD_CALLS = [
    ("prompt", lambda llm: llm.stream(None)),
    ("prompt", lambda llm: llm.stream([2**70])),
    ("prompt[0]", lambda llm: llm.generate([[2**70], [-1]])),
    ("prompt", lambda llm: llm.stream(b"bytes")),
    ("messages", lambda llm: llm.chat({"role": "user", "content": "not in a list"})),
    ("params", lambda llm: llm.generate("a", {"temperature": 0})),
    ("params", lambda llm: llm.generate(["a"], [None])),
    ("params", lambda llm: llm.stream("a", {"temperature": 0})),
    ("prompt", lambda llm: llm.generate("")),
    ("prompt[1]", lambda llm: llm.generate(["fine", ""])),
    ("prompt[1]", lambda llm: llm.embed(["fine", ""])),
    ("instruction", lambda llm: llm.score("a", instruction="b")),
    ("truncate_prompt_tokens", lambda llm: llm.score("a", truncate_prompt_tokens=1)),
    ("start", lambda llm: llm.score("a", "b", start=1)),
    ("prompt[1]", lambda llm: llm.embed(["fine", [10**6]])),
    ("prompt", lambda llm: llm.generate([[]])),
    ("prompt", lambda llm: llm.generate([[10**6]])),
    ("prompt", lambda llm: llm.generate([1] * 256)),
    ("prompt", lambda llm: llm.generate(None)),
    ("prompt", lambda llm: llm.generate(b"bytes")),
    ("prompt", lambda llm: llm.generate([1.5, 2.5])),
    ("prompt", lambda llm: llm.generate("half \ud800 a pair")),
    ("prompt", lambda llm: llm.stream(["many", "prompts"])),
    ("params", lambda llm: llm.generate(["a", "b"], [GREEDY])),
    ("logit_bias", lambda llm: llm.generate("a", SamplingParams(logit_bias={10**6: 1.0}))),
    ("temprature", lambda llm: GREEDY.with_changes(temprature=1.0)),
]


def test_an_empty_prompt_is_refused_even_with_a_bos_token(llm, monkeypatch):
    monkeypatch.setattr(type(llm.tokenizer), "encode", lambda *asked: [1])
    with pytest.raises(ParamError, match="must not be empty"):
        llm.generate("", GREEDY)


@pytest.mark.parametrize(("field", "call"), BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_bad_calls_name_the_field(llm, field, call):
    with pytest.raises(ParamError) as caught:
        call(llm)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_bad_options_name_the_field(tmp_path):
    with pytest.raises(ConfigError, match="not an engine option"):
        LLM(max_sequences=4)
    with pytest.raises(ConfigError, match="block_size"):
        LLM(block_size=0)
    with pytest.raises(ConfigError, match="model"):
        LLM(5)
    with pytest.raises(CapacityError):
        LLM(num_blocks=1, max_model_len=256)
    with pytest.raises(ModelError, match="model"):
        LLM(str(tmp_path / "nothing here"))
    with pytest.raises(ConfigError, match="dtype"):  # before any download
        LLM("some-org/some-model", dtype="int3")


def test_a_model_without_a_tokenizer_takes_token_ids(llm, tmp_path):
    folder = Path(llm.resolved.runner.model_path)
    shutil.copy(folder / "config.json", tmp_path)
    options = {"load_format": "random", "device": "cpu", "threads": 1, "max_model_len": 64}
    with LLM(str(tmp_path), **options) as bare:
        assert bare.generate([5, 6], GREEDY)[0].num_output_tokens == 8
        with pytest.raises(ModelError, match=r"^tokenizer.json: is missing .* token ids"):
            bare.generate("text", GREEDY)
        (tmp_path / "vocab.json").touch()
        with pytest.raises(ModelError, match="save_pretrained"):  # the remedy
            bare.chat([{"role": "user", "content": "Hello"}], GREEDY)
        with pytest.raises(ParamError, match=r"^stop: needs a tokenizer"):
            bare.generate([5, 6], GREEDY.with_changes(stop="a"))


def test_a_closed_llm_raises():
    llm = LLM(dtype="float32", device="cpu", threads=1, max_model_len=64)
    hello = [{"role": "user", "content": "Hello"}]
    assert llm._chat_template is None
    llm.render_chat(hello)
    pid = llm._chat_template.process.pid
    os.kill(pid, 0)
    llm.close()
    llm.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[5, 6]], GREEDY)
    with pytest.raises(RuntimeError, match="closed"):
        llm.render_chat(hello)
    with pytest.raises(RuntimeError, match="closed"), llm:
        pass
    assert llm.resolved.runner.model_path in repr(llm)


def graph_of(llm: LLM):
    return llm._loop.executor._runner.graph


def test_ctrl_c_in_a_batch_frees_everything(llm, monkeypatch, default_sigint):
    (expected,) = llm.generate("One day", GREEDY)
    graph = graph_of(llm)
    genuine = graph.run
    calls = iter(range(10**6))

    def interrupted(batch):
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return genuine(batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(graph, "run", interrupted)
        llm.generate(["One day"] * 4, GREEDY)
    assert llm.generate("One day", GREEDY)[0].text == expected.text


def test_ctrl_c_leaves_a_call_whose_step_hangs(llm, monkeypatch, default_sigint):
    (expected,) = llm.generate("One day", GREEDY)
    graph, left = graph_of(llm), threading.Event()
    genuine = graph.run

    def hanging(batch):
        time.sleep(0.1)  # the call waits by then
        os.kill(os.getpid(), signal.SIGINT)
        assert left.wait(60)
        return genuine(batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(graph, "run", hanging)
        llm.generate("Once", GREEDY.with_changes(max_tokens=1))
    left.set()
    assert llm.generate("One day", GREEDY)[0].text == expected.text


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_the_last_batch_of_a_call_does_not_wait_for_more(policy):
    options = {"policy": policy, "batch_size": 2, "max_wait": 3000.0, "max_model_len": 64}
    with LLM(dtype="float32", device="cpu", threads=1, **options) as llm:
        outputs = llm.generate([[5, 6], [7], [8]], GREEDY, progress=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
        assert "".join(delta.text for delta in llm.stream([7], GREEDY)) == outputs[1].text


def test_unseeded_requests_differ_by_start_and_repeat_with_the_seed() -> None:
    def said(**config: int) -> tuple[int, list[tuple[int, ...]]]:
        params = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
        with LLM("", device="cpu", threads=1, max_model_len=64, **config) as llm:
            outputs = llm.generate(["Once upon a time", "The fox"], params, progress=False)
            (decision,) = [d for d in llm.resolved.decisions if d.name == "seed"]
            assert decision.value == str(llm.resolved.seed)
            return llm.resolved.seed, [tuple(o.outputs[0].token_ids) for o in outputs]

    (seed, first), (other, second) = said(), said()
    assert seed != other and first != second
    assert said(seed=seed) == (seed, first)


def test_engines_of_one_process_keep_their_own_threads():
    """Of torch, if it computes."""
    options = {"device": "cpu", "attention_backend": "sdpa", "max_model_len": 64}
    with LLM(threads=2, **options) as one, LLM(threads=1, **options) as other:
        found = []
        for llm in (one, other, one):
            llm.generate([[5]], GREEDY)
            found.append(llm._engine.ask(lambda loop: torch.get_num_threads()))
        assert found == [2, 1, 2]


@needs_native
def test_torch_has_one_thread_with_native_kernels():
    with LLM(device="cpu", threads=3, max_model_len=64) as llm:
        assert llm.stats().threads is None
        llm.generate([[5]], GREEDY)
        assert llm.stats().threads == 3
        assert llm._engine.ask(lambda loop: torch.get_num_threads()) == 1


def test_progress_is_shown_on_request(llm, capfd):
    llm.generate([[5], [6]], GREEDY, progress=True)
    shown = capfd.readouterr()
    assert "2/2" in shown.err
    assert "tok/s" in shown.err
    llm.generate([[5], [6]], GREEDY)
    assert capfd.readouterr().err == ""


def test_an_engine_without_native_kernels_warns(caplog, monkeypatch):
    monkeypatch.setattr("kvik.launch.detect", lambda gpus: replace(detect(gpus), native=False))
    with LLM(device="cpu", threads=1, max_model_len=64) as llm:
        assert llm.resolved.runner.kernels == "torch"
    assert "was there a C++20 compiler?" in caplog.text
    caplog.clear()
    with LLM(device="cpu", threads=1, max_model_len=64, kernels="torch"):
        assert not caplog.records


# Custom chat templates


def test_a_custom_chat_template(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>")
    options = {"device": "cpu", "threads": 1, "max_model_len": 64, "max_num_seqs": 1}
    with LLM(chat_template=str(file), **options) as own:
        assert own.render_chat([{"role": "user", "content": "Hi"}]) == "<user>Hi<bot>"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{% for m in messages %}", "chat_template: is not a valid template"),
        (None, "chat_template: there is no file '"),
        ("", "chat_template: .* is empty"),
        (b"\xff\xfe", "chat_template: .* must be UTF-8 text"),
    ],
)
def test_a_template_is_checked_before_anything_is_loaded(tmp_path, text, part):
    file = tmp_path / "mine.jinja"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    resolved = resolve_config(EngineConfig(device="cpu", chat_template=str(file)))
    with pytest.raises((ConfigError, ModelError), match=part):
        load_tokenizer(resolved)


def test_call_arguments_have_the_names_of_vllm(llm) -> None:
    (output,) = llm.generate(["Once"], sampling_params=GREEDY, use_tqdm=False)
    assert output.finished and output.outputs[0].text == llm.generate("Once", GREEDY)[0].text
    with pytest.raises(ParamError, match="sampling_params: means params"):
        llm.generate("Once", GREEDY, sampling_params=GREEDY)


def test_a_gap_between_two_texts_is_filled(llm, monkeypatch) -> None:
    gap = {"prompt": "Once upon", "suffix": " who lived in a house."}
    with pytest.raises(ParamError, match="^suffix: .* no tokens for it"):
        llm.generate(gap, GREEDY)
    markers = Markers("<|system|>", "<|user|>", "<|assistant|>")
    monkeypatch.setattr("kvik.text.infill.FAMILIES", (markers,))
    ids = llm.tokenizer.encode(f"<|system|>{gap['prompt']}<|user|>{gap['suffix']}<|assistant|>")
    expected, plain = llm.generate([ids, "Once"], GREEDY)
    filled, beside = llm.generate([gap, "Once"], GREEDY)
    assert (filled.prompt_token_ids, filled.text) == (ids, expected.text)
    assert beside.text == plain.text
    assert "".join(delta.text for delta in llm.stream(gap, GREEDY)) == expected.text
    bias = {llm.tokenizer.encode("<|user|>")[0]: 100.0}
    (ended,) = llm.generate(gap, GREEDY.with_changes(logit_bias=bias))
    assert ended.outputs[0].finish_reason == "stop" and ended.text == ""
    with pytest.raises(ParamError, match="prompt: has a suffix"):
        llm.embed(gap)


def test_priorities_order_the_requests_of_a_call() -> None:
    options = {"policy": "priority", "max_num_seqs": 1, "max_model_len": 64, "device": "cpu"}
    with LLM(**options) as llm:
        prompts = ["One", "Two", "Three"]
        outputs = llm.generate(prompts, GREEDY, priority=[5, 1, 3])
        started = [output.metrics.first_scheduled for output in outputs]
        # The first request may start before the others arrive.
        assert started[1] < started[2]
        for priority, message in (([1], "must be one for"), ([1, 2, "x"], "must be an integer")):
            with pytest.raises(ParamError, match=f"priority: {message}"):
                llm.generate(prompts, GREEDY, priority=priority)


def test_a_priority_needs_its_policy(llm) -> None:
    with pytest.raises(ParamError, match="priority: needs policy"):
        llm.generate("Once", GREEDY, priority=1)


def test_the_prefix_cache_can_be_cleared() -> None:
    with LLM(max_model_len=128, device="cpu") as llm:
        prompt = list(range(5, 45))
        llm.generate([prompt], GREEDY)
        assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 32
        assert llm.reset_prefix_cache() >= 2
        assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0


def test_environment_variables_set_options_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIK_MAX_MODEL_LEN", "96")
    monkeypatch.setenv("KVIK_MAX_NUM_SEQS", "3")
    with LLM(device="cpu", max_num_seqs=2) as llm:
        scheduler = llm.resolved.scheduler
    assert (scheduler.max_model_len, scheduler.max_num_seqs) == (96, 2)
    monkeypatch.setenv("KVIK_MAX_MODEL_LENGTH", "96")
    with pytest.raises(ConfigError, match="KVIK_MAX_MODEL_LENGTH: is not a variable of kvik"):
        LLM(device="cpu")


def test_num_blocks_are_blocks_that_requests_can_use():
    options = {"device": "cpu", "threads": 1, "enable_prefix_caching": False}
    with LLM(num_blocks=4, block_size=8, **options) as llm:
        assert llm.resolved.scheduler.max_model_len == llm.resolved.scheduler.max_num_seqs * 8 == 32
        (whole,) = llm.generate([list(range(3, 32))], GREEDY.with_changes(max_tokens=3))
        assert whole.num_output_tokens == 3
        stats = llm.stats()
        assert stats.num_blocks == stats.peak_blocks == llm.resolved.cache.num_blocks == 4


def test_a_folder_may_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model: there is no folder"):
        LLM(tmp_path / "none")
    assert resolve_config(EngineConfig(engine_cache=tmp_path, device="cpu")).cache


@pytest.mark.parametrize("load", [LLM, partial(AsyncLLM, engine="thread")])
def test_a_current_folder_that_was_deleted_is_an_error(
    load: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(KvikError, match="^folder: "):
        load(device="cpu")
