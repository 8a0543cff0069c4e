"""Models that kvik does not implement, computed by transformers: another forward with the same
scheduler and sampler.

transformers keeps the keys and values, or states, of each request in a separate cache, which grows
with the request. The scheduler's blocks only count that memory: a request that is preempted gives
up its blocks, and its cache is computed again. Requests of a step are computed one after the other,
without padding, so that an answer does not depend on the other requests of the step.

As a program (`python -m kvik.worker.transformers_model FOLDER`) it prints facts about a model, for
planning in a process that does not import torch.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvik.config.config import ResolvedConfig
from kvik.core.plan import NewRequest
from kvik.errors import ConfigError, KvikError, ModelError, shown
from kvik.kernels.ops import Ops
from kvik.spec.fields import read_json
from kvik.spec.model import DTYPE_BYTES
from kvik.spec.rope import MAX_POSITIONS
from kvik.worker.graphs import Graph, StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.model_runner import Participant

CACHES = ("past_key_values", "cache_params")  # arguments that hold the cache of a request
# Names of the longest context in configurations.
LENGTHS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    *("max_seq_length", "max_sequence_length", "context_length"),
)
MEASURED = (1, 2, 64, 128)  # tokens of the caches that are measured
PROBE, FIRST = 12, 5  # tokens of a text computed in two chunks, and of the first chunk
# Allowed difference of logits, relative to their spread. Lost states cause a difference of 1.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


# Facts about a model from its configuration and its classes, without its weights.


def model_facts(folder: Path) -> dict[str, Any]:
    """Return the facts that `ModelSpec` needs, as JSON values. The weights are not read.

    Raises:
        ModelError: it is not a causal model of transformers, or needs code in its folder.
    """
    config = read_config(folder)
    text = config.get_text_config(decoder=True)
    dtype = str(text.dtype or config.dtype).removeprefix("torch.")
    model = _empty(config)  # changes the dtype in the configuration
    sizes_by_id = {id(tensor): tensor.numel() for tensor in (*model.parameters(), *model.buffers())}
    heads = _positive_integer(text, "num_attention_heads") or 1
    hidden = _positive_integer(text, "hidden_size") or heads
    layers = _positive_integer(text, "num_hidden_layers") or 1
    kv_heads = _positive_integer(text, "num_key_value_heads") or heads
    head_dim = _positive_integer(text, "head_dim") or max(1, hidden // heads)
    sizes = _cache_bytes(model)
    if sizes:
        steps = (sizes[2] - sizes[1], -(-(sizes[128] - sizes[64]) // 64))
        bytes_per_token = max(0, *steps)  # windows stop growing; compressed caches grow in steps
        state = max(0, *(size - bytes_per_token * n for n, size in sizes.items()))
    else:
        bytes_per_token, state = 2 * layers * kv_heads * head_dim * 2, 0
    lengths = (_positive_integer(text, name) for name in LENGTHS)
    return {
        "vocab_size": _positive_integer(text, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _positive_integer(text, "intermediate_size") or 4 * hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": next(filter(None, lengths), MAX_POSITIONS),
        "dtype": dtype if dtype in DTYPE_BYTES else "float32",
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "parameters": sum(sizes_by_id.values()),
        "cache_numbers": -(-bytes_per_token // 2),
        "state_bytes": state,
        "scores": config._attn_implementation == "eager",
    }


def read_config(folder: Path) -> Any:
    """Return the configuration of a folder, as transformers' class for it.

    Raises:
        ModelError: see `model_facts`.
    """
    transformers = library()
    from transformers.models.auto import modeling_auto

    stored = read_json(folder / "config.json")
    kind, names = stored.get("model_type"), stored.get("architectures") or []
    version = f"transformers {transformers.__version__}"
    if kind not in transformers.CONFIG_MAPPING:
        if stored.get("auto_map"):
            problem = (
                f"must be absent unless {version} knows the model_type, and not {shown(kind)}: "
            )
            raise ModelError(
                "config.json auto_map", f"{problem}code of a model's folder is never run"
            )
        raise ModelError(
            "config.json model_type", f"must be one that kvik or {version} knows, not {shown(kind)}"
        )
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, ())
    causal = (causal,) if isinstance(causal, str) else tuple(causal)
    if not isinstance(names, list) or not causal or (names and not set(names) & set(causal)):
        allowed = f"must be {' or '.join(causal)}" if causal else f"must write text in {version}"
        raise ModelError("config.json architectures", f"{allowed}, not {shown(names)}")
    if stored.get("quantization_config"):
        problem = "must be absent: through transformers only plain floats run"
        raise ModelError("config.json quantization_config", problem)
    try:
        return transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise ModelError("config.json", f"transformers cannot read it: {_line(error)}") from None


def library() -> Any:
    """Return the module `transformers`, with its logging turned off.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        problem = "needs the library transformers: pip install 'kvik[transformers]'"
        raise ConfigError("fallback", problem) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _empty(config: Any) -> Any:
    """Return the model without memory for its weights."""
    transformers = library()
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, trust_remote_code=False
            )
    except Exception as error:
        raise ModelError("config.json", f"transformers cannot make it: {_line(error)}") from None
    _cache_name(model)
    return model.eval()


def _cache_name(model: Any) -> str:
    """Return the argument that holds the cache of a request.

    Raises:
        ModelError: there is none.
    """
    arguments = inspect.signature(model.forward).parameters
    argument = next((name for name in CACHES if name in arguments), None)
    if argument is None or "use_cache" not in arguments:
        raise _no_cache(model)
    return argument


def _no_cache(model: Any) -> ModelError:
    problem = "must be of a causal model that keeps keys and values in a cache of transformers"
    return ModelError("config.json architectures", f"{problem}, not {type(model).__name__}")


def _cache_bytes(model: Any) -> dict[int, int]:
    """Return the bytes of caches of some lengths, in bfloat16; {}: the model cannot run on the meta
    device.

    Raises:
        ModelError: it keeps no cache.
    """
    name, sizes = _cache_name(model), {}
    for length in MEASURED:
        ids = torch.zeros(1, length, dtype=torch.long, device="meta")
        try:
            with torch.inference_mode():
                output = model(input_ids=ids, use_cache=True)
        except Exception:
            return {}
        cache = getattr(output, name, None)
        if cache is None:
            raise _no_cache(model)
        sizes[length] = sum(tensor.nbytes for tensor in _tensors(cache))
    return sizes


def _tensors(cache: Any) -> list[Tensor]:
    """Return all tensors of a cache of any class."""
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    pending = [cache]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            tensors[id(item)] = item
        elif isinstance(item, (dict, list, tuple)):
            pending += item.values() if isinstance(item, dict) else item
        elif id(item) not in seen and type(item).__module__.startswith("transformers."):
            seen.add(id(item))
            pending += vars(item).values()
    return list(tensors.values())


def _positive_integer(config: Any, name: str) -> int | None:
    """Return a positive integer of a configuration; None: there is none of this name."""
    value = getattr(config, name, None)
    return value if type(value) is int and value > 0 else None


def _line(error: Exception) -> str:
    """Return the message of an error of transformers in one line."""
    return shown(" ".join(str(error).split()) or type(error).__name__)


# Running it.


class TransformersModel:
    """A model of transformers, as a `Network` without layers of kvik."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.cache = _cache_name(module)  # see `CACHES`
        arguments = inspect.signature(module.forward).parameters
        self._keeps = "logits_to_keep" in arguments
        # A text may be computed in chunks of several tokens; else it is computed token by token
        # after its first chunk.
        self.in_chunks = self._computes_in_chunks()

    def step(self, ids: Tensor, cache: Any, *, last: bool) -> tuple[Tensor, Any]:
        """Compute the next tokens of a text.

        Args:
            ids: [tokens] int64.
            cache: of the text before them; None: they begin it.
            last: only the logits of the last token are needed.

        Returns:
            [tokens or 1, vocab] fp32, and the cache with these tokens.
        """
        if cache is not None and len(ids) > 1 and not self.in_chunks:
            parts = []
            for token in ids.split(1):
                logits, cache = self.step(token, cache, last=True)
                parts.append(logits)
            return parts[-1] if last else torch.cat(parts), cache
        options: dict[str, Any] = {self.cache: cache} if cache is not None else {}
        if last and self._keeps:
            options["logits_to_keep"] = 1
        output = self.module(input_ids=ids[None], use_cache=True, **options)
        cache = getattr(output, self.cache, None)
        if cache is None:
            raise _no_cache(self.module)
        logits = output.logits[0]
        return (logits[-1:] if last else logits).float(), cache

    def _computes_in_chunks(self) -> bool:
        """Return whether a text in two chunks gives the same result as in one. Some models that
        keep states start again with each chunk of several tokens."""
        first = next(self.module.parameters())
        self.in_chunks = True
        with torch.inference_mode():
            ids = torch.arange(PROBE, device=first.device) % self.module.config.vocab_size
            unchunked, _ = self.step(ids, None, last=True)
            try:
                _, cache = self.step(ids[:FIRST], None, last=True)
                chunked, _ = self.step(ids[FIRST:], cache, last=True)
            except Exception:
                return False
        difference = float((unchunked - chunked).abs().max())
        return difference <= TOLERANCE[first.dtype] * float(unchunked.std())

    # The rest of the `Network` protocol.

    def logits(self, hidden: Tensor) -> Tensor:
        """Return rows of `StepOutput.hidden`, which are logits already."""
        return hidden

    @staticmethod
    def _no_layers(*inputs: object) -> Any:
        raise ConfigError("fallback", "must be none where more than a model's tokens is requested")

    enter = token_inputs = blocks = leave = _no_layers


def load_transformers(
    config: ResolvedConfig, dtype: torch.dtype, device: torch.device
) -> TransformersModel:
    """Load a model, or make one with random weights.

    Raises:
        ModelError: its weights do not fit its configuration.
    """
    transformers, runner = library(), config.runner
    folder = Path(runner.model_path)
    made, auto = read_config(folder), transformers.AutoModelForCausalLM
    if runner.load_format == "random":
        torch.manual_seed(runner.seed)
        model = auto.from_config(made, dtype=dtype, trust_remote_code=False)
        return TransformersModel(model.eval().to(device))
    try:
        model, info = auto.from_pretrained(
            folder,
            config=made,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError("model", f"transformers cannot load it: {_line(error)}") from None
    if info["missing_keys"]:
        raise ModelError("model", f"its weights lack {shown(sorted(info['missing_keys'])[0])}")
    return TransformersModel(model.eval().to(device))


class RequestCaches(Participant[None]):
    """The caches of running requests. Caches of ended requests are freed with the next step, or
    when the engine is idle.
    """

    def __init__(self) -> None:
        self.all_scored = False  # every token's logits are needed
        self.by_slot: dict[int, Any] = {}  # caches of requests that have begun
        self.scored: set[int] = set()  # slots that need log probabilities of their prompts

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(list(self.by_slot.values())))

    def enter(self, new: NewRequest) -> None:
        if new.params.prompt_logprobs is not None:
            self.scored.add(new.slot)

    def leave(self, slot: int) -> None:
        self.by_slot.pop(slot, None)
        self.scored.discard(slot)


class TransformersSteps(Graph):
    """The forward of each step, as a `Graph`."""

    def __init__(self, model: TransformersModel, vocab_size: int, ops: Ops) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._ops = ops
        self.caches = RequestCaches()

    def idle_step(self) -> bool:
        """Free all caches: no request is running."""
        self.caches.by_slot.clear()
        return False

    def run(self, batch: InputBatch) -> StepOutput:
        """Run a step. `hidden` of the output is [tokens, vocab] logits if a prompt's log
        probabilities are needed, else it has no columns."""
        slots, starts = batch.slots.tolist(), batch.starts.tolist()
        rows = {row: index for index, row in enumerate(batch.sampling_rows.tolist())}
        caches, scored = self.caches.by_slot, self.caches.scored
        input_ids = batch.tensors.input_ids
        device = input_ids.device
        if self.caches.all_scored:
            scored = set(slots)
        width = 0 if scored.isdisjoint(slots) else self._vocab_size
        hidden = torch.empty(starts[-1], width, device=device)
        logits = torch.empty(len(rows), self._vocab_size, device=device)
        try:
            for row, slot in enumerate(slots):
                start, end = starts[row], starts[row + 1]
                begins = int(batch.ends[row]) == end - start
                cache, every = None if begins else caches[slot], slot in scored
                ids = input_ids[start:end]
                row_logits, caches[slot] = self._model.step(ids, cache, last=not every)
                if every:
                    hidden[start:end] = row_logits
                if row in rows:
                    logits[rows[row]] = row_logits[-1]
        except BaseException:
            for slot in slots:  # their layers may have different numbers of tokens
                caches.pop(slot, None)
            raise
        return StepOutput(hidden, logits, *self._ops.largest(logits))


def main(arguments: list[str]) -> int:
    try:
        facts = model_facts(Path(arguments[0]))
    except KvikError as error:
        facts = {"field": error.field, "message": error.message}
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
