"""`kvik plan`: predicts the memory, speed and cost of a model on given hardware."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvik.config.compute import choose_dtype
from kvik.config.config import EngineConfig, Notes
from kvik.config.draft_heads import (
    KINDS,
    MEDUSA,
    HeadsFootprint,
    assistant_facts,
    eagle3_facts,
    heads_for,
    is_assistant,
    is_eagle3,
)
from kvik.config.hardware import Hardware, detect, find_gpus
from kvik.config.memory import Limit
from kvik.config.model_source import CONFIG
from kvik.config.speculative import DIVIDED_METHODS, MTP, NO_SOURCE, OWN_HEAD, DraftSource
from kvik.errors import ConfigError, ModelError
from kvik.options import FORMERLY, Flag, Integer, Number, OneOf, Text, normalised, option
from kvik.planner.calibration import calibration_path
from kvik.planner.cost import Cost, DailyLoad, TokenRates, cost, parse_load
from kvik.planner.devices import UTILIZATION, Device, Setting, find_device, this_device
from kvik.planner.families import read_shape, windowed, with_own_head
from kvik.planner.formats import WEIGHT_FORMATS, arithmetic, kv_facts, weight_facts, weight_format
from kvik.planner.memory import MAX_REQUESTS, KVWaste, Memory, MemoryPlanner, PartMemory
from kvik.planner.parallel import (
    ACTIVATION_BYTES,
    MAX_DEVICES,
    Collectives,
    can_share,
    check_parallel,
    collectives,
)
from kvik.planner.roofline import (
    compute_bound_batch,
    decode,
    decode_rate,
    prefill,
    prefill_rate,
    step_time,
)
from kvik.planner.shape import ModelShape
from kvik.planner.speculation import SpeculationCurve, speculation_curve, verify_cost
from kvik.planner.variants import (
    AttentionRow,
    ContextRow,
    KVRow,
    MatrixRow,
    WeightRow,
    attention_matrices,
    attention_variants,
    context_parts,
    in_weight_format,
    kv_formats,
    weight_formats,
)
from kvik.spec.fields import read_json
from kvik.spec.kv import KV_FORMATS
from kvik.spec.model import SHORT_DTYPES
from kvik.spec.rope import MAX_POSITIONS
from kvik.spec.weights import loaded_kind


@dataclass(frozen=True, slots=True)
class Division:
    """A model divided among several CPU processes or several GPUs."""

    cut: str  # "exact" or "fast" (see `planner/parallel.py`)
    collectives: Collectives | None  # None: no layer is shared
    layer_bytes: int  # bytes per token that collectives carry in a layer
    # On GPUs, the collectives of the exact cut; None: on a CPU, no layer is shared, or experts are
    # whole, which needs the fast cut.
    exact: Collectives | None
    hop_bytes: int  # bytes per token from one stage to the next
    exchange: float | None  # measured seconds; None: not measured, or not on a CPU
    hop: float | None  # likewise
    # Seconds that communication adds to a decoding step; None: the speed is unknown.
    step: float | None
    rate: float | None  # expected decoding tokens/s; None: the speed is unknown
    # The same with one stage on this machine; None: each stage has its own memory, there is only
    # one stage, or the speed is unknown.
    rate_of_one: float | None


def division_of(shape: ModelShape, at: Setting) -> Division | None:
    """Return the costs of the division; None: the model is not divided."""
    if at.parts == 1:
        return None
    whole_experts = at.expert_parallel
    ops = collectives(shape, exact=at.exact, whole_experts=whole_experts) if at.tp > 1 else None
    measured = at.device.calibration if at.exact else None
    step = rate = rate_of_one = None
    if at.device.rated:
        time = step_time(shape, at, decode(at.group, at.context))
        step = sum(part.expected for part in time.parts if part.bound == "links")
        rate = at.batch / time.expected
        if at.exact and at.pp > 1:
            _, rate_of_one = decode_rate(shape, replace(at, pp=1))
    return Division(
        cut="exact" if at.exact else "fast",
        collectives=ops,
        layer_bytes=ops.numbers * ACTIVATION_BYTES if ops else 0,
        exact=None if at.exact or whole_experts or not ops else collectives(shape, exact=True),
        hop_bytes=shape.hidden_size * ACTIVATION_BYTES if at.pp > 1 else 0,
        exchange=measured.exchange_seconds(at.tp) or None if measured and ops else None,
        hop=measured.hop or None if measured else None,
        step=step,
        rate=rate,
        rate_of_one=rate_of_one,
    )


# The question to `kvik plan`, and its checks.

USUAL_CONTEXT = 8192  # default context of a question
OUTPUT_SHARE = 4  # ratio of a request's context to its generated tokens


@dataclass(frozen=True, slots=True)
class Question:
    """A question to `kvik plan`."""

    model: str = option("", Text("a folder or a hub id"), "a folder, hub id or config.json")
    hardware: str = option(
        "this", Text(), "h200, a100-80g, rtx4090, ...; this: this machine; or a file"
    )
    context: int | None = option(
        None,
        Integer(1, 1 << 24),
        f"tokens of a request, prompt and output; None: the model's, up to {USUAL_CONTEXT}",
    )
    window: int | None = option(
        None,
        Integer(1, MAX_POSITIONS),
        "number of most recent tokens that a token sees; None: all, or the model's",
    )
    attention_sinks: int = option(
        0, Integer(0, MAX_POSITIONS), "first tokens that a token sees in addition to the window"
    )
    batch: int = option(1, Integer(1, MAX_REQUESTS), "requests that run together")
    dtype: str | None = option(
        None,
        OneOf(tuple(WEIGHT_FORMATS), SHORT_DTYPES),
        "format of the weights; None: the checkpoint's; on this machine, the engine's choice",
    )
    kv_cache_dtype: str | None = option(
        None,
        OneOf(tuple(KV_FORMATS), SHORT_DTYPES),
        "format of the KV cache; None: the dtype of activations",
        {FORMERLY: "kv_dtype"},
    )
    tp: int = option(
        1, Integer(1, MAX_DEVICES), "GPUs, or processes of a CPU, that share each layer"
    )
    pp: int = option(
        1, Integer(1, MAX_DEVICES), "stages of whole layers, of --tp GPUs or processes each"
    )
    expert_parallel: bool = option(
        False,
        Flag(),
        "each of the --tp GPUs or processes has some whole experts, not a part of each",
    )
    price: float | None = option(
        None, Number(0, 1e6), "US dollars per hour and device; None: the listed price of the device"
    )
    tokens_per_second: float | None = option(
        None,
        Number(0, 1e9),
        "measured output tokens/s of one copy, prompts included; None: as predicted",
    )
    load: str | None = option(
        None, Text(), "tokens a day (50M), or requests a second (5/s); None: no daily cost"
    )
    output_tokens: int | None = option(
        None, Integer(1, 1 << 24), "tokens of a request's context that are output; None: a quarter"
    )
    draft: str | None = option(
        None,
        Text(),
        "model that drafts for speculative decoding, or folder of draft heads; mtp: the model's "
        "own head",
    )
    draft_cost: float | None = option(
        None,
        Number(0, 1e3),
        "time of a step of the draft model relative to one of the target; None: as predicted for "
        "--draft, else 0",
    )
    memory_utilization: float = option(
        UTILIZATION, Number(0.01, 1), "share of the device's memory that the engine may use"
    )


def check_question(question: Question, shape: ModelShape, *, exact: bool = False) -> Question:
    """Check a question about a model.

    Args:
        exact: the model would be divided by the exact cut (see `planner/parallel.py`).

    Returns:
        The same question with canonical names of formats.

    Raises:
        ConfigError: a field is out of range or does not apply to this model.
    """
    question = replace(question, **normalised(question, ConfigError))
    limit = shape.max_context
    if question.context is not None and question.context > limit:
        raise ConfigError(
            "context", f"must be at most the model's {limit} tokens, not {question.context}"
        )
    whole_experts = question.expert_parallel
    check_parallel(shape, question.tp, question.pp, exact=exact, whole_experts=whole_experts)
    context = context_of(question, shape)
    if question.output_tokens is not None and question.output_tokens >= context:
        raise ConfigError(
            "output_tokens",
            f"must be in [1, {context - 1}], as prompt and output share the "
            f"context of {context}, not {question.output_tokens}",
        )
    load_of(question, context)
    if question.tokens_per_second == 0:
        raise ConfigError("tokens_per_second", "must be a number above 0, not 0")
    return question


def context_of(question: Question, shape: ModelShape) -> int:
    """Return the tokens of a request."""
    return question.context or min(shape.max_context, USUAL_CONTEXT)


def request_of(question: Question, context: int) -> tuple[int, int]:
    """Return the tokens of a request's prompt and of its output; a context of 1 is only a
    prompt."""
    output = question.output_tokens or context // OUTPUT_SHARE
    return context - output, output


def load_of(question: Question, context: int) -> DailyLoad | None:
    """Return the daily load, if one is given. Raises ConfigError if it cannot be parsed."""
    if question.load is None:
        return None
    return parse_load(question.load, *request_of(question, context))


# Maximum speed of a setting, and the cost of its tokens: everything that needs rooflines.

SHORTEST_PROMPT, PROMPT_STEP = 128, 4  # rows of the prefill table: 128, 512, 2048, ...
WIDEST_BATCH = 1024  # largest in the decode table, unless more is asked for


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """The time of one prompt. `floor`, `expected`: seconds, equal if nothing was measured."""

    tokens: int
    floor: float
    expected: float
    bound: str


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """The speed at which requests decode together."""

    batch: int
    ceiling: float  # tokens/s of all requests together
    expected: float  # likewise
    floor: float  # least seconds of a step, and thus between two tokens of a request
    reading: float  # tokens/s if only reading memory took time
    computing: float  # tokens/s if only arithmetic did
    bound: str
    fits: bool


@dataclass(frozen=True, slots=True)
class PlannedSpeed:
    """The results that need the device's speed."""

    prefill: tuple[PrefillSpeed, ...]
    decode: tuple[DecodeSpeed, ...]
    # Smallest batch at which decode with this context is bound by arithmetic; None: no such batch.
    compute_bound_batch: int | None
    speculation: tuple[SpeculationCurve, ...]


def speed_of(shape: ModelShape, at: Setting, question: Question, memory: Memory) -> PlannedSpeed:
    """Return the rooflines, costs and gain from speculation.

    Raises:
        ConfigError: `tp` devices cannot share this model's layers, or have no link.
        ModelError: the draft is not found or cannot be read.
    """
    batches = sorted({1, at.batch})
    return PlannedSpeed(
        prefill=tuple(
            _prefill(shape, at, tokens, memory.step_tokens) for tokens in _prompts(at.context)
        ),
        decode=tuple(_decode(shape, at, batch, memory) for batch in _batches(at, memory)),
        compute_bound_batch=compute_bound_batch(shape, at),
        speculation=tuple(_speculation(shape, at, question, batch) for batch in batches),
    )


def _prompts(context: int) -> list[int]:
    lengths, length = [], SHORTEST_PROMPT
    while length < context:
        lengths.append(length)
        length *= PROMPT_STEP
    return [*lengths, context]


def _batches(at: Setting, memory: Memory) -> list[int]:
    """Return the powers of two that fit, the requested batch, and the largest batch that fits."""
    max_batch = max(at.batch, min(memory.largest_batch, WIDEST_BATCH))
    batches = {at.batch, max_batch} | {1 << power for power in range(max_batch.bit_length())}
    return sorted(batch for batch in batches if batch <= max_batch)


def _prefill(shape: ModelShape, at: Setting, tokens: int, chunk: int) -> PrefillSpeed:
    """Predict a prompt in steps of `chunk` tokens; stages of a pipeline compute different chunks at
    once."""
    chunks = -(-tokens // chunk)
    time = step_time(shape, replace(at, batch=chunks), prefill(tokens))
    part = (chunks + at.pp - 1) / (chunks * at.pp)
    return PrefillSpeed(tokens, part * time.floor, part * time.expected, time.bound)


def _decode(shape: ModelShape, at: Setting, batch: int, memory: Memory) -> DecodeSpeed:
    at = replace(at, batch=batch)
    time = step_time(shape, at, decode(at.group, at.context))
    fits = batch <= memory.largest_batch
    return DecodeSpeed(
        batch,
        ceiling=batch / time.floor,
        expected=batch / time.expected,
        floor=time.floor,
        reading=batch / time.reading,
        computing=batch / time.computing,
        bound=time.bound,
        fits=fits,
    )


def cost_of(at: Setting, question: Question, rates: TokenRates | None) -> Cost | None:
    """Return the cost of requests; None: no price, or neither a rate nor a roofline. Raises
    ConfigError for a measured rate without a price."""
    price = at.device.price if question.price is None else question.price
    if price is None and question.tokens_per_second is not None:
        raise ConfigError("tokens_per_second", "needs --price")
    if price is None or rates is None:
        return None
    prompt, output = request_of(question, at.context)
    return cost(price * at.devices, rates, prompt, output, load_of(question, at.context))


def rates_of(
    shape: ModelShape, at: Setting, question: Question, memory: Memory
) -> TokenRates | None:
    """Return the measured rates; otherwise those of the requested batch, or of the largest that
    fits if smaller, with all prompts in one step and outputs half generated."""
    if question.tokens_per_second is not None:
        return TokenRates(question.tokens_per_second)
    batch = min(at.batch, memory.largest_batch)
    if batch == 0 or not at.device.rated:
        return None
    prompt, output = request_of(question, at.context)
    halfway = replace(at, batch=batch, context=prompt + (output + 1) // 2)
    _, decoded = decode_rate(shape, halfway)
    _, prefilled = prefill_rate(shape, halfway, prompt)
    return TokenRates(decoded, prefilled)


def _speculation(
    shape: ModelShape, at: Setting, question: Question, batch: int
) -> SpeculationCurve:
    at = replace(at, batch=batch)
    cost = _draft_cost(shape, at, question)
    return speculation_curve(batch, cost, lambda drafts: verify_cost(shape, at, drafts))


def _draft_cost(shape: ModelShape, at: Setting, question: Question) -> float:
    """Return the given cost, or that by the rooflines of both models."""
    if question.draft_cost is not None or question.draft is None:
        return question.draft_cost or 0.0
    target = step_time(shape, at, decode(at.group, at.context)).expected
    return draft_seconds(shape, at) / target


def draft_seconds(shape: ModelShape, at: Setting) -> float:
    """Return the expected time to draft a token for each request, with the draft on one device,
    unless its matrices are divided as the model's are. Heads are read from memory, with the model's
    head if they have none."""
    if not at.source.path:
        return 0.0
    shares = 1 if at.exact else at.tp
    if at.source == OWN_HEAD:
        read = (*shape.layers[-1].matrices, *(m for m in shape.matrices if m.role == "head"))
        size = sum(shape.read_of(matrix, at.weight_format, at.batch) for matrix in read) / shares
        return size / at.device.read_rate(size)
    if (heads := at.source.heads) is not None:
        head = (m for m in shape.matrices if m.role == "head" and not heads.own_logits)
        size = sum(shape.read_of(matrix, at.weight_format, 1) for matrix in head)
        size += HeadsFootprint(heads, shape.working_dtype(at.weight_format), heads.depth).weights
        size /= heads.depth if heads.kind == MEDUSA else 1  # Medusa's heads draft together
        return size / at.device.read_rate(size)
    if at.source.method in DIVIDED_METHODS:  # each draft reads all its weights
        assert at.source.spec is not None
        size = at.source.spec.weight_bytes(shape.working_dtype(at.weight_format), "none") / shares
        return size / at.device.read_rate(size)
    draft = replace(read_shape(at.source.path), kernels=shape.kernels)
    step = decode(at.group, min(at.context, draft.max_context))
    return step_time(draft, replace(at, tp=1, pp=1), step).expected


def draft_source(name: str | None, shape: ModelShape) -> DraftSource:
    """Return the model or the heads that draft.

    Raises:
        ModelError: they cannot be read, or the heads are for a model of other sizes.
    """
    if name is None:
        return NO_SOURCE
    if not name:
        raise ModelError("draft", "must name a model or heads")
    if name == MTP:
        return OWN_HEAD
    folder = Path(name).expanduser()
    values = read_json(folder / CONFIG) if os.path.isfile(folder / CONFIG) else {}
    kind = MEDUSA if "medusa_num_heads" in values else values.get("model_type")
    try:
        if kind in KINDS:
            heads = heads_for(folder, kind, shape.hidden_size, shape.vocab_size)
            return DraftSource(name, heads=heads)
        if is_eagle3(values):
            head, taps = eagle3_facts(folder, shape.like)
            return DraftSource(name, head, taps=taps)
        if is_assistant(values):
            return DraftSource(name, assistant_facts(folder, shape.like))
        return DraftSource(name, read_shape(name).spec)
    except ModelError as error:
        reason = error.message if error.field in ("model", "spec_model") else str(error)
        raise ModelError("draft", reason) from None


# Changes for a plan that does not fit.

MAX_TP = 8  # devices of one machine, which are fast enough to share layers


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change after which the plan fits."""

    flags: str  # flags of `kvik plan`
    total: int  # bytes on the fullest device after the change


def remedies(shape: ModelShape, at: Setting, batch: int, context: int) -> tuple[Remedy, ...]:
    """Return the smallest change of each kind that makes the plan fit: fewer requests, a shorter
    context, a smaller KV or weight format, more devices. If only more devices help, also the
    smallest formats on fewer devices. Empty: nothing helps.

    Args:
        batch, context: the largest that fits if the other stays as it is; 0: none.
    """
    changed = [
        *([replace(at, batch=batch)] if batch else []),
        *([replace(at, context=context)] if context else []),
        *_first(shape, _kv_formats(shape, at)),
        *_first(shape, _weight_formats(shape, at)),
    ]
    devices = list(_first(shape, _more_devices(shape, at)))
    if not changed:
        changed += _first(shape, _smaller_on_fewer(shape, at, devices))
    return tuple(_remedy(shape, at, setting) for setting in [*changed, *devices])


def _smaller_on_fewer(shape: ModelShape, at: Setting, enough: list[Setting]) -> Iterator[Setting]:
    """Yield the smallest formats on fewer devices than `enough` has with the current formats."""
    weights = min(WEIGHT_FORMATS, key=shape.weight_bytes)
    kv = min(KV_FORMATS, key=shape.kv_bytes_per_token)
    limit = min((setting.devices for setting in enough), default=MAX_DEVICES + 1)
    for setting in (at, *_more_devices(shape, at)):
        if setting.devices >= limit:
            return
        smaller = in_weight_format(shape, setting, weights)
        yield smaller
        yield replace(smaller, kv_format=kv)


def _kv_formats(shape: ModelShape, at: Setting) -> Iterator[Setting]:
    """Yield KV formats, the largest first: more bits lose less."""
    for name in sorted(KV_FORMATS, key=shape.kv_bytes_per_token, reverse=True):
        yield replace(at, kv_format=name)


def _weight_formats(shape: ModelShape, at: Setting) -> Iterator[Setting]:
    for name in sorted(WEIGHT_FORMATS, key=shape.weight_bytes, reverse=True):
        yield in_weight_format(shape, at, name)


def _more_devices(shape: ModelShape, at: Setting) -> Iterator[Setting]:
    """Yield doubled numbers of devices, which share layers while the heads allow it, then form
    stages."""
    if at.exact or at.device.link == 0:
        return
    tp, pp, whole_experts = at.tp, at.pp, at.expert_parallel
    while 2 * tp * pp <= MAX_DEVICES:
        if can_share(shape, 2 * tp, pp, whole_experts=whole_experts) and 2 * tp <= MAX_TP:
            tp *= 2
        elif can_share(shape, tp, 2 * pp):
            pp *= 2
        else:
            return
        yield replace(at, tp=tp, pp=pp)


def _first(shape: ModelShape, settings: Iterable[Setting]) -> Iterator[Setting]:
    """Yield the first setting that is possible and fits, if any."""
    for setting in settings:
        try:
            total = MemoryPlanner.of(shape, setting).total
        except ConfigError:
            continue
        if total <= setting.memory_limit:
            yield setting
            return


def _remedy(shape: ModelShape, requested: Setting, changed: Setting) -> Remedy:
    reweighted = in_weight_format(shape, requested, changed.weight_format)
    named = {
        "dtype": (requested.weight_format, changed.weight_format),
        "kv-cache-dtype": (reweighted.kv_format, changed.kv_format),
        "context": (requested.context, changed.context),
        "batch": (requested.batch, changed.batch),
        "tp": (requested.tp, changed.tp),
        "pp": (requested.pp, changed.pp),
    }
    flags = " ".join(f"--{name} {new}" for name, (old, new) in named.items() if new != old)
    return Remedy(flags, MemoryPlanner.of(shape, changed).total)


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a `Question`."""

    shape: ModelShape  # the model, with weights in the layout of the device's kernels
    at: Setting  # requested formats, devices and work, with defaults filled in
    request: tuple[int, int]  # tokens of a request's prompt and of its output
    memory: Memory
    # Longest context that fits for these requests, at most the model's; 0: none.
    longest_context: int
    parts: tuple[PartMemory, ...]  # () if the model is on one device, in one process
    kv_waste: KVWaste
    division: Division | None  # None if the model is on one device, in one process
    remedies: tuple[Remedy, ...]  # changes that would make the plan fit, if it does not
    speed: PlannedSpeed | None  # None: the device's speed is unknown
    attention_matrices: tuple[MatrixRow, ...]
    attention_variants: tuple[AttentionRow, ...]
    weight_formats: tuple[WeightRow, ...]
    kv_formats: tuple[KVRow, ...]
    context_parts: tuple[ContextRow, ...]
    rates: TokenRates | None  # token rates of requests; None: nothing fits, or the speed is unknown
    # Measured output tokens/s on which the cost is based; None: the roofline's.
    measured_rate: float | None
    cost: Cost | None  # None: there is no price, or no rate

    @property
    def weight_bytes(self) -> int:
        """Weight bytes of the whole model."""
        return self.shape.weight_bytes(self.at.weight_format)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes per token of the whole model, before windows are full."""
        return self.shape.kv_bytes_per_token(self.at.kv_format)

    @property
    def flops_per_token(self) -> float:
        """Operations for one token after a full context."""
        return self.shape.matmul_flops(1, 1) + self.shape.attention_flops(1, self.at.context)

    @property
    def arithmetic(self) -> str:
        """The unit that multiplies; if the device's speed is unknown, the preferred one."""
        device = self.at.device
        unit = arithmetic(self.at.weight_format, device.kind)
        return device.unit(unit) if device.rated else unit

    @property
    def source(self) -> str:
        """The source of the device's figures; without figures, the name of the processor."""
        device, hardware = self.at.device, self.at.hardware
        if device.source or hardware is None:
            return device.source
        return hardware.gpus[0].name if hardware.gpus else hardware.cpu_name


def plan(question: Question) -> Plan:
    """Return the plan that answers a question.

    Raises:
        ConfigError: a field is out of range, or contradicts the model or device.
        ModelError: the model is not found or cannot be read.
    """
    shape = windowed(read_shape(question.model), question.window, question.attention_sinks)
    device, hardware = find_machine(question.hardware)
    return plan_shape(shape, device, question, hardware)


def plan_shape(
    shape: ModelShape, device: Device, question: Question, hardware: Hardware | None = None
) -> Plan:
    """Return the plan for a model that has been read, on a device that has been found.

    Args:
        hardware: of this machine; None: the device is another one.
    """
    question = check_question(question, shape, exact=device.kind == "cpu")
    if question.dtype not in (None, shape.stored) and _keeps_weights(shape):
        source = "engine folder" if shape.like.built else "checkpoint"
        note = f"the engine keeps the weights as this {source} stores them, {shape.stored}: "
        note += f"{question.dtype} needs another {source}"
        shape = replace(shape, notes=(*shape.notes, note))
    shape, at = setting_of(shape, device, question, hardware)
    planner = MemoryPlanner.of(shape, at)
    memory, longest = planner.memory(), planner.longest_context()
    rates = rates_of(shape, at, question, memory)
    return Plan(
        shape=shape,
        at=at,
        request=request_of(question, at.context),
        memory=memory,
        longest_context=longest,
        parts=planner.parts(),
        kv_waste=planner.kv_waste(),
        division=division_of(shape, at),
        remedies=() if memory.fits else remedies(shape, at, memory.largest_batch, longest),
        speed=speed_of(shape, at, question, memory) if device.rated else None,
        attention_matrices=attention_matrices(shape, at, _prompts(at.context)),
        attention_variants=attention_variants(shape, at),
        weight_formats=weight_formats(shape, at),
        kv_formats=kv_formats(shape, at),
        context_parts=context_parts(shape, at, memory),
        rates=rates,
        measured_rate=question.tokens_per_second,
        cost=cost_of(at, question, rates),
    )


def _keeps_weights(shape: ModelShape) -> bool:
    """Return whether the engine loads linear layers as they are stored, whatever quantisation is
    asked for."""
    if shape.spec is None:
        return False
    if shape.spec.built is not None:
        return True
    if weight_facts(shape.stored).dtype:
        return False
    stored = ((like.inputs, part) for like in shape.spec.linear_layers for part in like.stored)
    return any(part is not None and loaded_kind(part, inputs) for inputs, part in stored)


def find_machine(name: str) -> tuple[Device, Hardware | None]:
    """Return a device by name, and the hardware if the device is this machine.

    Raises:
        ConfigError: no such device or file, or a file that cannot be used.
    """
    if name.lower() != "this":
        return find_device(name), None
    hardware = detect(find_gpus())
    device = this_device(hardware, calibration_path())
    if hardware.gpus:  # plan without the memory that other processes use
        device = replace(device, memory=hardware.gpus[0].free_memory)
    return device, hardware


def setting_of(
    shape: ModelShape, device: Device, question: Question, hardware: Hardware | None
) -> tuple[ModelShape, Setting]:
    """Return the model as the device's kernels compute it, and the setting of a question, with
    defaults filled in. Raises ConfigError as `MemoryPlanner.of`."""
    shape = replace(shape, dtype=_dtype(shape, device, question, hardware))
    if question.draft == MTP:
        shape = with_own_head(shape)
    plain = weight_facts(shape.stored).dtype
    weights = question.dtype or (weight_format(shape.dtype) if plain else shape.stored)
    computed = shape.working_dtype(weights)
    at = Setting(
        device=device,
        weight_format=weights,
        kv_format=kv_facts(question.kv_cache_dtype or weight_format(computed)).name,
        kv_asked=question.kv_cache_dtype is not None,
        context=context_of(question, shape),
        batch=question.batch,
        tp=question.tp,
        pp=question.pp,
        expert_parallel=question.expert_parallel,
        utilization=question.memory_utilization,
        hardware=hardware,
        source=draft_source(question.draft, shape),
    )
    return MemoryPlanner.of(shape, at).shape, at


def _dtype(shape: ModelShape, device: Device, question: Question, hardware: Hardware | None) -> str:
    """Return the checkpoint's dtype; on this machine, the engine's own choice."""
    if hardware is None or shape.spec is None or shape.spec.built is not None:
        return shape.dtype
    gpu = hardware.gpus[0] if hardware.gpus else None
    limit = Limit(int(device.memory * question.memory_utilization), "")
    quantization = question.dtype and weight_facts(question.dtype).quantization
    config = EngineConfig(quantization=quantization or "none")
    return choose_dtype(config, shape.spec, hardware, gpu, limit, Notes())
