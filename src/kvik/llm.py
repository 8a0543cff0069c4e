"""The offline API: a model in this process, for scripts, notebooks and batches."""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload
from weakref import finalize

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.env import environment_options
from kvik.config.model_source import read_adapter
from kvik.config.synonyms import SYNONYMS, translated
from kvik.core.sampling_params import SamplingParams
from kvik.core.structured import JsonSchema
from kvik.core.types import SCORE, EngineRequest
from kvik.engine.core import check_request
from kvik.engine.loop import EngineLoop
from kvik.engine.output import (
    ClassificationOutput,
    EmbeddingOutput,
    RequestOutput,
    ScoreOutput,
    TextDelta,
    classification_output,
    embedding_output,
    score_output,
)
from kvik.engine.stats import EngineStats
from kvik.engine.thread import Call, EngineThread
from kvik.errors import ConfigError, KvikError, ParamError, shown
from kvik.launch import resolve_config, start
from kvik.model_files import model_files
from kvik.options import options_of, unknown
from kvik.prompts import Infill, PlainPrompt, Prompt, as_prompts, no_infill, one_prompt
from kvik.text.pooled_inputs import (
    PooledInput,
    check_dimensions,
    check_text,
    classifying,
    default_pooling,
    ids_input,
    pair_input,
    paired,
    prompt_before,
    scoring,
    text_input,
    truncation,
)
from kvik.text.tokenizer import Tokenizer, spelled

if TYPE_CHECKING:
    from kvik.text.chat_template import ChatTemplate
    from kvik.text.grammar_check import GrammarCheck


@contextmanager
def batch_bar(total: int, show: bool | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error: requests done, output tokens per second. Yields
    finished(tokens of an output).

    Args:
        show: None shows it on a terminal for more than one request.
    """
    if not (show or (show is None and total > 1 and sys.stderr.isatty())):
        yield lambda num_tokens: None
        return
    # Imported here: most calls show no bar, and the import would slow down every start.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:>8} tok/s"),
        TimeRemainingColumn(),
    )
    tokens, started = 0, time.monotonic()
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("", total=total, rate="-")

        def finished(num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            seconds = max(time.monotonic() - started, 1e-9)
            bar.update(task, advance=1, rate=f"{tokens / seconds:.0f}")

        yield finished


Message = Mapping[str, Any]


def engine_config(model: str | PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
    """Make a config from options by kvik's names or other engines' names. Options that are not
    given are taken from environment variables.

    Raises:
        ConfigError: an option is unknown.
    """
    names = [option.name for option in options_of(EngineConfig) if option.name != "model"]
    named = translated(options)
    for name in named:
        if name not in names:
            raise ConfigError(name, unknown(name, "engine option", [*names, *SYNONYMS]))
    values = {**environment_options(), **named}
    return EngineConfig(**{**values, "model": model or values.get("model", "")})


def engine_request(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    *,
    priority: int = 0,
    pooling: str | None = None,
    second_text: int = 0,
) -> EngineRequest:
    """Return a request for the engine, with the words in its parameters as token ids.

    Raises:
        ParamError: a parameter needs a tokenizer, and the model has none.
    """
    if params.stop and tokenizer is None:
        raise ParamError("stop", "needs a tokenizer, and this model has none")
    return EngineRequest(
        request_id,
        prompt_token_ids,
        spelled(params, tokenizer),
        priority=priority,
        pooling=pooling,
        second_text=second_text,
    )


def tell_unenforced(parts: Sequence[str]) -> None:
    """Warn about the parts of a JSON Schema that are not enforced."""
    if parts:
        warnings.warn(f"structured: not enforced: {'; '.join(parts)}", stacklevel=4)


@contextmanager
def one_of(prompts: Sequence[object], index: int) -> Iterator[None]:
    """Let errors about a prompt say which of many it is."""
    try:
        yield
    except KvikError as error:
        if len(prompts) > 1 and error.field == "prompt":
            error.field = f"prompt[{index}]"
        raise


def check_priority(priority: int, policy: str) -> None:
    """Raise `ParamError` if the policy does not allow this priority."""
    if type(priority) is not int:
        raise ParamError("priority", f"must be an integer, not {shown(priority)}")
    if priority and policy != "priority":
        raise ParamError("priority", f'needs policy="priority", and the policy is {policy}')


class LLM:
    """A loaded model. Use it as a context manager, or `close` it, to free everything.

    Any number of threads may use it at once: their calls share one batch, and each gets its own
    results. The engine runs in a separate thread, so Ctrl-C interrupts a call at once. In a forked
    process every call raises `RuntimeError`.

    Args:
        model: folder in Hugging Face format, GGUF file, hub id, or "" for the bundled story model.
        config: any field of `EngineConfig`, or its name in other engines (`config.synonyms`).
            Environment variables set the others (KVIK_MAX_MODEL_LEN=4096).

    Raises:
        KvikError: the model or an option cannot be used; the message says what is allowed.
    """

    def __init__(self, model: str | PathLike[str] = "", **config: Any) -> None:
        self.resolved: ResolvedConfig = resolve_config(engine_config(model, config))
        self._engine = EngineThread(start, self.resolved)
        finalize(self, self._engine.close)  # when the program ends or forgets it
        self.default_params: SamplingParams = self._engine.engine.default_params
        self._tokenizer = self._engine.engine.tokenizer
        self._chat_template: ChatTemplate | None = None
        self._grammar_check: GrammarCheck | None = None
        self._serial = itertools.count(1)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises `ModelError` if the model takes only token ids."""
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
        priority: int | Sequence[int] = 0,
        schema: object = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids; see `prompts.py`), one or many, in the order given.

        {"prompt": text, "suffix": text} is a prompt for a model of code: its answer stands between
        the two texts.

        Args:
            params: for all prompts, or one for each; None takes the model's own defaults. If
                `max_tokens` (default 256) or the context ends a text, the `finish_reason` of its
                completion is "length".
            progress: show a bar; None shows it for more than one prompt on a terminal.
            priority: for all prompts, or one for each: with `policy="priority"` the smallest is
                served first.
            schema: a pydantic model or a JSON Schema that each text must satisfy; shorthand for
                `params.structured`.
            sampling_params, use_tqdm: what vLLM calls `params` and `progress`.

        Raises:
            ParamError, CapacityError: a prompt or parameter is impossible; nothing was generated.
        """
        params = either("sampling_params", sampling_params, "params", params)
        progress = either("use_tqdm", use_tqdm, "progress", progress)
        listed = as_prompts(prompts)
        params = self._with_schema(len(listed), params, schema)
        requests = self._requests(listed, params, priority, add_special_tokens=True)
        return self._collect(listed, requests, progress)

    def as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Complete prompts like `generate`, and iterate over the outputs as they are ready, each
        with the index of its prompt. Closing the iterator ends the requests that are left."""
        listed = as_prompts(prompts)
        requests = self._requests(listed, params, priority, add_special_tokens=True)
        return self._outputs(listed, requests)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        priority: int | Sequence[int] = 0,
        schema: object = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role", "content"}, or a list of conversations. For
        the other arguments see `generate`."""
        params = either("sampling_params", sampling_params, "params", params)
        progress = either("use_tqdm", use_tqdm, "progress", progress)
        listed = isinstance(messages, Sequence) and not isinstance(messages, str) and messages
        several = listed and not isinstance(messages[0], Mapping)
        conversations = list(messages) if several else [messages]
        prompts = [self.render_chat(conversation) for conversation in conversations]  # type: ignore[arg-type]
        params = self._with_schema(len(prompts), params, schema)
        requests = self._requests(prompts, params, priority, add_special_tokens=False)
        return self._collect(prompts, requests, progress)

    @overload
    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        top: int = 0,
        *,
        start: int = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def score(
        self,
        prompts: str | Sequence[str],
        top: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
    ) -> list[ScoreOutput]: ...

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        top: int | str | Sequence[str] = 0,
        *,
        start: int = 0,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput] | list[ScoreOutput]:
        """Return log probabilities of prompts, or a reranker's scores of pairs of texts.

        With one argument: log probabilities of the prompts' own tokens, in `prompt_logprobs` (None
        for the first token). With texts as the second argument: a reranker's score of how well each
        pair matches, in `score`. A single first text is paired with each of the second ones.

        Args:
            prompts: or the first texts of pairs: queries.
            top: number of the likeliest alternatives to report at each position; or the second
                texts of pairs: documents.
            start: index of the first token to score. Earlier tokens get None, and may be taken from
                the prefix cache.
            instruction: for a reranker that takes one: what makes a pair a good match.
            truncate_prompt_tokens: tokens of a pair to keep, the longer text being cut at its end;
                -1: as many as fit; None: a pair that is too long is an error.

        Raises:
            ParamError, CapacityError: a prompt is impossible; nothing was computed.
        """
        if not isinstance(top, int):
            if start:
                raise ParamError("start", "is for log probabilities of prompts, not for pairs")
            return self._score_pairs(prompts, top, instruction, truncate_prompt_tokens, progress)
        if instruction is not None or truncate_prompt_tokens is not None:
            field = "instruction" if instruction is not None else "truncate_prompt_tokens"
            raise ParamError(field, "is for pairs of texts: give the second ones, too")
        params = SamplingParams(
            temperature=0.0, max_tokens=0, prompt_logprobs=top, prompt_logprobs_start=start
        )
        return self.generate(prompts, params, progress=progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str | None = None,
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
        adapter: str = "",
    ) -> list[EmbeddingOutput]:
        """Return a vector for each prompt, from the last layer's hidden states after the final
        norm, passed through the model's dense layers if it has any.

        Args:
            pooling: "mean" over all tokens, the state of the "last" or first token ("cls"), or
                "max" in each channel; None: the model's trained pooling by its files, else "mean".
            normalize: scale vectors to length 1.
            dimensions: cut vectors to this length, for models that were trained for it; None: keep
                their full length.
            prompt_name: name of the model's prompt to put before each text; None: the model's
                default prompt, if it has one.
            truncate_prompt_tokens: tokens of a text to keep, special ones included: the first ones,
                or the last ones if the model was not trained to embed; -1: as many as fit; None: a
                text that is too long is an error.
            adapter: as in `SamplingParams`.

        Raises:
            ParamError, CapacityError: a prompt is impossible; nothing was computed.
            RuntimeError: the engine failed to compute a vector.
        """
        listed, model = as_prompts(prompts), self.resolved.model
        check_dimensions(model.pooling, model.hidden_size, dimensions)
        before = prompt_before(model.pooling, prompt_name)
        inputs = self._inputs(listed, before, truncate_prompt_tokens, special=True)
        kind = pooling or default_pooling(model.pooling)
        outputs = self._pooled(listed, inputs, kind, progress, adapter)
        return [embedding_output(o, normalize=normalize, dimensions=dimensions) for o in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        second_texts: str | Sequence[str] | None = None,
        *,
        use_activation: bool = True,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
        adapter: str = "",
    ) -> list[ClassificationOutput]:
        """Return how likely each label of a classifier is, for each prompt.

        Args:
            prompts: or the first texts of pairs, such as premises.
            second_texts: one for each prompt, or one or many with a single other one.
            use_activation: return probabilities, or a score as the model's files say; else the
                model's outputs, such as rewards.
            add_special_tokens: to texts; False for those of `render_chat`.
            truncate_prompt_tokens, adapter: as in `embed`.

        Raises:
            ParamError, CapacityError: a prompt is impossible; nothing was computed.
            RuntimeError: the engine failed to compute an output.
        """
        pooling = classifying(self.resolved.model.pooling)
        if second_texts is not None:
            listed, inputs = self._pairs(prompts, second_texts, None, truncate_prompt_tokens)
        else:
            listed = as_prompts(prompts)
            before, keep = prompt_before(pooling, None), truncate_prompt_tokens
            inputs = self._inputs(listed, before, keep, special=add_special_tokens)
        outputs = self._pooled(listed, inputs, SCORE, progress, adapter)
        function = pooling.function if use_activation else "none"
        return [classification_output(output, pooling.labels, function) for output in outputs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt and iterate over the text as it is generated."""
        return self._stream(one_prompt(prompt), params, add_special_tokens=True)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Stream:
        """Answer one conversation and iterate over the text as it is generated."""
        return self._stream(self.render_chat(messages), params, add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the model's chat template; return the prompt.

        Args:
            add_generation_prompt: end with the beginning of an answer.
        """
        self._engine.check_usable()
        if self._chat_template is None:
            tokenizer = self.tokenizer
            from kvik.text.chat_template import ChatTemplate  # imports msgspec, only for chats

            self._chat_template = ChatTemplate(
                tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token
            )
            finalize(self, self._chat_template.close)
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def stats(self) -> EngineStats:
        return self._engine.ask(EngineLoop.stats)

    def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes; running requests continue. Returns the number of blocks that
        held one."""
        return self._engine.ask(EngineLoop.reset_prefix_cache)

    def load_adapter(self, name: str, path: str | PathLike[str]) -> None:
        """Load a LoRA adapter, a folder or hub id, between two steps: requests may choose it as
        those of the option `adapters`.

        Raises:
            KvikError: it cannot be loaded; nothing has changed.
        """
        adapter = read_adapter(name, fspath(path))
        self._change(lambda loop: loop.load_adapter(adapter))

    def unload_adapter(self, name: str) -> None:
        """Refuse requests for an adapter from now on. Those that the engine has are finished, and
        then its memory may be used by another one.

        Raises:
            ParamError: there is no such adapter.
        """
        self._change(lambda loop: loop.unload_adapter(name))

    def sleep(self) -> None:
        """Free the model and its cache until the next call, or `wake_up`, which loads them again.

        The weights are read again, so that those written to the model's folder meanwhile are used.

        Raises:
            RuntimeError: a call has not ended.
        """
        self._engine.sleep()

    def wake_up(self) -> None:
        """Load the model again, if it sleeps."""
        self._engine.ask(lambda loop: None)

    @property
    def is_sleeping(self) -> bool:
        return self._engine.is_sleeping

    def close(self) -> None:
        """Free the model and its cache; a closed LLM cannot be used again. Pending calls in other
        threads raise `RuntimeError`."""
        for process in (self._chat_template, self._grammar_check):
            if process is not None:
                process.close()
        self._engine.close()

    def __enter__(self) -> LLM:
        self._engine.check_usable()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        runner = self.resolved.runner
        return f"<LLM {runner.model_path!r}, {runner.dtype} on {runner.device}>"

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _loop(self) -> EngineLoop:
        return self._engine.engine.loop

    def _change(self, change: Callable[[EngineLoop], object]) -> None:
        """Change the adapters of the engine."""
        self._engine.ask(change)
        self.resolved = self._engine.ask(lambda loop: loop.core.config)

    def _score_pairs(
        self,
        first: Any,
        second: str | Sequence[str],
        instruction: str | None,
        truncate_prompt_tokens: int | None,
        progress: bool | None,
    ) -> list[ScoreOutput]:
        pooling = scoring(self.resolved.model.pooling)
        ids, inputs = self._pairs(first, second, instruction, truncate_prompt_tokens)
        outputs = self._pooled(ids, inputs, SCORE, progress)
        return [score_output(output, pooling.function) for output in outputs]

    def _pairs(
        self,
        first: Any,
        second: str | Sequence[str],
        instruction: str | None,
        truncate_prompt_tokens: int | None,
    ) -> tuple[list[PlainPrompt], list[PooledInput]]:
        """Tokenise pairs of texts; also return their token ids."""
        pooling = self.resolved.model.pooling
        assert pooling is not None
        keep = truncation(truncate_prompt_tokens, self.resolved.scheduler.max_model_len)
        texts = [[side] if isinstance(side, str) else list(side) for side in (first, second)]
        pairs = [tuple(map(check_text, pair)) for pair in paired(*texts)]
        make = partial(pair_input, pooling=pooling, instruction=instruction, limit=keep)
        inputs = [make(self.tokenizer, *pair) for pair in pairs]
        return [encoded.ids for encoded in inputs], inputs

    def _inputs(
        self,
        prompts: Sequence[PlainPrompt],
        before: str,
        truncate_prompt_tokens: int | None,
        *,
        special: bool,
    ) -> list[PooledInput]:
        """Tokenise prompts to pool, with a text before each text."""
        pooling = self.resolved.model.pooling
        keep = truncation(truncate_prompt_tokens, self.resolved.scheduler.max_model_len)
        inputs = list[PooledInput]()
        for prompt in map(no_infill, prompts):
            if not isinstance(prompt, str):
                inputs.append(ids_input(pooling, prompt, keep))
                continue
            text = before + prompt
            encoded = text_input(self.tokenizer, text, pooling=pooling, limit=keep, special=special)
            if not prompt or not encoded.ids:
                with one_of(prompts, len(inputs)):
                    raise ParamError("prompt", "must not be empty")
            inputs.append(encoded)
        return inputs

    def _pooled(
        self,
        prompts: Sequence[PlainPrompt],
        inputs: Sequence[PooledInput],
        pooling: str,
        progress: bool | None,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Compute the vectors or scores of some inputs."""
        params = SamplingParams(adapter=adapter)
        requests = [
            engine_request(
                f"llm-{next(self._serial)}",
                encoded.ids,
                params,
                self._tokenizer,
                pooling=pooling,
                second_text=encoded.second_text,
            )
            for encoded in inputs
        ]
        for index, request in enumerate(requests):
            with one_of(requests, index):
                check_request(self.resolved, request)
        return self._collect(prompts, requests, progress)

    def _request(
        self,
        prompt: PlainPrompt,
        params: SamplingParams,
        *,
        add_special_tokens: bool,
        priority: int = 0,
    ) -> EngineRequest:
        if isinstance(prompt, Infill):
            from kvik.text.infill import Infiller  # few models can

            infiller = Infiller(self.tokenizer)
            (ids, _), params = infiller.ids(prompt.prefix, prompt.suffix), infiller.params(params)
        elif isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens)
            if not prompt or not ids:  # some tokenizers add a token even to an empty text
                raise ParamError("prompt", "must not be empty")
        else:
            ids = prompt
        params = self._checked(params)
        name = f"llm-{next(self._serial)}"
        request = engine_request(name, ids, params, self._tokenizer, priority=priority)
        check_request(self.resolved, request)
        return request

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with their structured-output constraint in the engine's form."""
        if params.structured is None:
            return params
        if self._tokenizer is None:
            raise ParamError("structured", "needs a tokenizer, and this model has none")
        if self._grammar_check is None:
            from kvik.text.grammar_check import GrammarCheck  # needs msgspec

            self._grammar_check = GrammarCheck(self._tokenizer)
            finalize(self, self._grammar_check.close)
        checked, unenforced = self._grammar_check.checked(params)
        tell_unenforced(unenforced)
        return checked

    def _collect(
        self,
        prompts: Sequence[PlainPrompt],
        requests: Sequence[EngineRequest],
        progress: bool | None,
    ) -> list[RequestOutput]:
        """Run requests and return their outputs in order."""
        if not requests:
            return []
        outputs: dict[int, RequestOutput] = {}
        finishing = self._outputs(prompts, requests)
        with batch_bar(len(requests), progress) as finished, closing(finishing):
            for index, output in finishing:
                outputs[index] = output
                finished(output.num_output_tokens)
        return [outputs[index] for index in range(len(requests))]

    def _requests(
        self,
        prompts: Sequence[PlainPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        *,
        add_special_tokens: bool,
    ) -> list[EngineRequest]:
        priorities = self._priorities(len(prompts), priority)
        per_prompt = self._params_for(len(prompts), params)
        make = partial(self._request, add_special_tokens=add_special_tokens)
        requests = list[EngineRequest]()
        for prompt, p, urgency in zip(prompts, per_prompt, priorities, strict=True):
            with one_of(prompts, len(requests)):
                requests.append(make(prompt, p, priority=urgency))
        return requests

    def _outputs(
        self, prompts: Sequence[PlainPrompt], requests: Sequence[EngineRequest]
    ) -> Generator[tuple[int, RequestOutput]]:
        """Run requests and yield their outputs as they are ready, each with its index."""
        indexes = {request.request_id: index for index, request in enumerate(requests)}
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        # The queue may not take all at once, so submit them in order of priority.
        pairs = sorted(zip(requests, texts, strict=True), key=lambda pair: pair[0].priority)
        call = Call(pairs, streaming=False)
        try:
            self._engine.submit(call)
            while indexes:
                output = self._engine.next_update(call).output
                assert output is not None
                yield indexes.pop(output.request_id), output
        finally:
            if indexes:
                self._engine.abandon(call)

    def _stream(
        self, prompt: PlainPrompt, params: SamplingParams | None, *, add_special_tokens: bool
    ) -> Stream:
        (own_params,) = self._params_for(1, params)
        request = self._request(prompt, own_params, add_special_tokens=add_special_tokens)
        text = prompt if isinstance(prompt, str) else None
        return Stream(self, self._engine, Call([(request, text)], streaming=True))

    def _priorities(self, count: int, priority: int | Sequence[int]) -> list[int]:
        """Return the priority of each prompt."""
        if isinstance(priority, Sequence) and not isinstance(priority, str):
            priorities = list(priority)
        else:
            priorities = [priority] * count
        if len(priorities) != count:
            allowed = f"must be one for each of {count} prompts"
            raise ParamError("priority", f"{allowed}, not {len(priorities)}")
        for value in priorities:
            check_priority(value, self.resolved.scheduler.policy)
        return priorities

    def _with_schema(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None, schema: object
    ) -> SamplingParams | Sequence[SamplingParams] | None:
        """Return the parameters with a schema, if one is given, for each of `count` texts."""
        if schema is None:
            return params
        try:
            structured = JsonSchema(schema).called("schema")
        except ValueError as error:
            raise ParamError("schema", str(error)) from None
        per_text = self._params_for(count, params)
        if any(p.structured is not None for p in per_text):
            raise ParamError("schema", "contradicts params.structured")
        return [p.with_changes(structured=structured) for p in per_text]

    def _params_for(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_params] * count
        if not isinstance(params, Sequence) or not all(
            isinstance(entry, SamplingParams) for entry in params
        ):
            raise ParamError("params", "must be SamplingParams, or a list with one for each prompt")
        if len(params) != count:
            allowed = f"must be one for each of {count} prompts"
            raise ParamError("params", f"{allowed}, not {len(params)}")
        return list(params)


class Stream(Iterator[TextDelta]):
    """The deltas of one request. After the last one, `output` holds the whole result.

    Text is generated whether or not it is read; closing or garbage-collecting the stream ends it.
    """

    def __init__(self, llm: LLM, engine: EngineThread, call: Call) -> None:
        self.output: RequestOutput | None = None
        self._llm = llm  # lives as long as its streams
        self._engine = engine
        self._call = call
        self._deltas: deque[TextDelta] = deque()
        self._end = finalize(self, engine.abandon, call)
        self._end.atexit = False
        engine.submit(call)

    def __next__(self) -> TextDelta:
        while not self._deltas:
            if not self._end.alive or self.output is not None:
                raise StopIteration
            update = self._engine.next_update(self._call)
            self._deltas += update.deltas
            self.output = update.output
        return self._deltas.popleft()

    @property
    def pending(self) -> bool:
        """Whether the next delta is there already."""
        return bool(self._deltas) or not self._call.updates.empty()

    def close(self) -> None:
        """Stop generating."""
        self._end()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def either(theirs: str, their_value: Any, ours: str, value: Any) -> Any:
    """Return an argument that has two names; raise ParamError if both are given."""
    if their_value is not None and value is not None:
        raise ParamError(theirs, f"means {ours}, which is also given")
    return value if their_value is None else their_value
