"""The offline API: a model in this process, for scripts, notebooks and batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.errors import ConfigError, ParamError
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, FinishReason
from kvik.engine.embedding import EmbeddingOutput, normalise
from kvik.engine.output import OutputProcessor, Processed, RequestOutput, TextDelta
from kvik.engine.stats import EngineStats
from kvik.interrupts import deferred_interrupt
from kvik.launch import launch
from kvik.model_files import model_files
from kvik.progress import BatchProgress
from kvik.text.bad_words import bad_word_ids
from kvik.text.chat_template import ChatTemplate
from kvik.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A loaded model. Use it as a context manager, or `close` it, to free everything.

    One thread at a time may use it: a call runs the engine's steps itself.

    Args:
        model: folder in Hugging Face format, GGUF file, hub id, or "" for the bundled story model.
        config: any field of `EngineConfig`.

    Raises:
        KvikError: the model or an option cannot be used; the message says what is allowed.
    """

    def __init__(self, model: str = "", **config: Any) -> None:
        known = {f.name for f in fields(EngineConfig)} - {"model"}
        for name in config:
            if name not in known:
                raise ConfigError(name, f"is no engine option (known: {', '.join(sorted(known))})")
        engine = launch(EngineConfig(model=model, **config))
        self.resolved: ResolvedConfig = engine.resolved
        self.default_params: SamplingParams = engine.default_params
        self._client = engine.client
        self._tokenizer = engine.tokenizer
        self._chat_template: ChatTemplate | None = None
        self._processor = OutputProcessor(engine.tokenizer)
        self._streams: dict[str, Stream] = {}
        self._serial = 0
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises `ModelError` if the model has none; token ids can still be given."""
        if self._tokenizer is None:
            path = Path(self.resolved.runner.model_path)
            return model_files(path).tokenizer()  # says what is missing
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids), one or many, in the order given.

        Args:
            params: for all prompts, or one for each; None takes the model's own defaults.
            progress: show a bar; None shows it for more than one prompt on a terminal.

        Raises:
            ParamError, CapacityError: a prompt or parameter is impossible; nothing was generated.
        """
        return self._run(_as_prompts(prompts), params, progress, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role", "content"}, or a list of conversations."""
        listed = isinstance(messages, Sequence) and not isinstance(messages, str) and messages
        many = listed and not isinstance(messages[0], Mapping)
        conversations = list(messages) if many else [messages]
        prompts = [self.render_chat(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self._run(prompts, params, progress, add_special_tokens=False)

    def score(
        self, prompts: Prompt | Sequence[Prompt], top: int = 0, *, progress: bool | None = None
    ) -> list[RequestOutput]:
        """Log probabilities of the prompts' own tokens, in `prompt_logprobs` (None for the first).

        Args:
            top: how many of the likeliest alternatives to report at each position.
        """
        params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=top)
        return self.generate(prompts, params, progress=progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "mean",
        *,
        normalize: bool = True,
        progress: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """A vector for each prompt, from the last layer's hidden states after the last norm.

        Args:
            pooling: "mean" over all tokens, or that of the "last" token.
            normalize: scale vectors to length 1.

        Raises:
            ParamError, CapacityError: a prompt is impossible; nothing was computed.
            RuntimeError: the engine failed to compute a vector.
        """
        params = SamplingParams()  # of which nothing is read
        listed = _as_prompts(prompts)
        outputs = self._run(listed, params, progress, add_special_tokens=True, pooling=pooling)
        return [_embedding(output, normalize) for output in outputs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt and iterate over the text as it comes."""
        if not any(one is prompt for one in _as_prompts(prompt)):
            raise ParamError("prompt", "must be one text or one list of token ids")
        return self._stream(prompt, params, add_special_tokens=True)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Stream:
        """Answer one conversation and iterate over the text as it comes."""
        return self._stream(self.render_chat(messages), params, add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The prompt that the model's chat template makes of a conversation."""
        if self._chat_template is None:
            self._chat_template = ChatTemplate(
                self.tokenizer.chat_template, self.tokenizer.bos_token, self.tokenizer.eos_token
            )
        return self._chat_template.render(messages)

    def stats(self) -> EngineStats:
        return self._client.stats()

    def close(self) -> None:
        """Free the model and its cache; a closed LLM cannot be used again."""
        for stream in list(self._streams.values()):
            stream.close()
        self._client.close()
        self._closed = True

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        add_special_tokens: bool,
        pooling: str | None = None,
    ) -> EngineRequest:
        if self._closed:
            raise RuntimeError("this LLM is closed")
        if params.stop and self._tokenizer is None:
            raise ParamError("stop", "needs a tokenizer, and this model has none")
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens)
            if not prompt or not ids:  # some tokenizers put a token before nothing at all
                raise ParamError("prompt", "must not be empty")
        else:
            ids = list(prompt)
        if params.bad_words:
            params = params.with_changes(bad_words=bad_word_ids(params.bad_words, self._tokenizer))
        self._serial += 1
        return EngineRequest(f"llm-{self._serial}", ids, params, pooling=pooling)

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        *,
        add_special_tokens: bool,
        pooling: str | None = None,
    ) -> list[RequestOutput]:
        each = self._params_for(len(prompts), params)
        requests = [
            self._request(prompt, p, add_special_tokens=add_special_tokens, pooling=pooling)
            for prompt, p in zip(prompts, each, strict=True)
        ]
        for request in requests:
            self._client.check(request)
        texts = {
            r.request_id: p if isinstance(p, str) else None
            for r, p in zip(requests, prompts, strict=True)
        }
        outputs: dict[str, RequestOutput] = {}
        unsent = deque(requests)
        with BatchProgress(len(requests), progress) as bar:
            try:
                while len(outputs) < len(requests):
                    while unsent and self._has_room(unsent[0]):
                        request = unsent.popleft()
                        self._add(request, texts[request.request_id], streaming=False)
                    for output in self._step().finished:
                        if output.request_id in texts:
                            outputs[output.request_id] = output
                            bar.finished(output)
            finally:
                for request in requests:
                    if request.request_id not in outputs:
                        self._abort(request.request_id)
        return [outputs[r.request_id] for r in requests]

    def _stream(
        self, prompt: Prompt, params: SamplingParams | None, *, add_special_tokens: bool
    ) -> Stream:
        (one,) = self._params_for(1, params)
        request = self._request(prompt, one, add_special_tokens=add_special_tokens)
        self._client.check(request)
        stream = Stream(self, request.request_id)
        self._streams[request.request_id] = stream
        try:
            self._add(request, prompt if isinstance(prompt, str) else None, streaming=True)
        except BaseException:  # refused or interrupted: nobody will read it
            self._abort(request.request_id)
            raise
        return stream

    def _has_room(self, request: EngineRequest) -> bool:
        """Whether the queue takes it now: batches of any length keep within the limits."""
        limits, stats, n = self.resolved.scheduler, self._client.stats(), request.params.n
        if stats.num_waiting + n > min(_LOOKAHEAD, limits.max_queued_requests):
            return False
        tokens = stats.queued_tokens + n * len(request.prompt_token_ids)
        return stats.num_waiting == 0 or tokens <= limits.max_queued_tokens

    def _add(self, request: EngineRequest, prompt: str | None, *, streaming: bool) -> None:
        with deferred_interrupt():
            self._processor.add(request, prompt, streaming=streaming)
            self._client.add(request)

    def _step(self) -> Processed:
        """One step of the engine; streams get what is theirs."""
        with deferred_interrupt():
            processed = self._processor.process(self._client.poll(_PATIENCE))
            for request_id, index, reason, error in processed.to_end:
                self._client.end(request_id, index, reason, error)
            for delta in processed.deltas:
                if delta.request_id in self._streams:
                    self._streams[delta.request_id].pending.append(delta)
            for output in processed.finished:
                stream = self._streams.pop(output.request_id, None)
                if stream is not None:
                    stream.output = output
        return processed

    def _abort(self, request_id: str) -> None:
        with deferred_interrupt():
            self._processor.discard(request_id)
            self._streams.pop(request_id, None)
            self._client.end(request_id, None, FinishReason.ABORT)

    def _params_for(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_params] * count
        if not isinstance(params, Sequence) or not all(
            isinstance(each, SamplingParams) for each in params
        ):
            raise ParamError("params", "must be SamplingParams, or a list with one for each prompt")
        if len(params) != count:
            raise ParamError("params", f"{len(params)} given for {count} prompts: one for each")
        return list(params)


_LOOKAHEAD = 512  # requests queued ahead of the running ones in a long batch
_PATIENCE = 0.1  # seconds that a step may wait for company, deaf to Ctrl-C


class Stream(Iterator[TextDelta]):
    """The deltas of one request. After the last one, `output` holds the whole result."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm = llm
        self.request_id = request_id
        self.pending: deque[TextDelta] = deque()
        self.output: RequestOutput | None = None
        self._closed = False

    def __next__(self) -> TextDelta:
        while not self.pending:
            if self._closed or self.output is not None:
                raise StopIteration
            self._llm._step()
        return self.pending.popleft()

    def close(self) -> None:
        """Stop generating; what came so far has been delivered."""
        if not self._closed and self.output is None:
            self._llm._abort(self.request_id)
        self._closed = True

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _embedding(output: RequestOutput, normalize: bool) -> EmbeddingOutput:
    """Raises `RuntimeError` if the engine failed to compute it."""
    if output.embedding is None:
        raise RuntimeError(f"{output.request_id} has no vector: {output.completions[0].error}")
    return EmbeddingOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        embedding=normalise(output.embedding) if normalize else output.embedding,
        num_cached_tokens=output.num_cached_tokens,
        num_preemptions=output.num_preemptions,
    )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Sequence):
        raise ParamError("prompt", "must be a text, a list of token ids, or a list of those")
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    for p in prompts:
        if isinstance(p, (int, bytes)) or not isinstance(p, Sequence):
            raise ParamError("prompt", "must be a text, a list of token ids, or a list of those")
    return list(prompts)  # type: ignore[arg-type]
