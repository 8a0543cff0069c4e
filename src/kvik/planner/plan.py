"""Everything `kvik plan` tells: what a model takes and gives on some hardware, before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvik.config.config import EngineConfig
from kvik.config.hardware import Hardware, detect, find_gpus
from kvik.config.notes import Notes
from kvik.config.resolve import choose_dtype
from kvik.config.sizes import Limit
from kvik.planner.calibration import calibration_path
from kvik.planner.devices import Device, find_device, this_device
from kvik.planner.families import read_shape
from kvik.planner.formats import WEIGHT_FORMATS, arithmetic, kv_facts, weight_facts, weight_format
from kvik.planner.memory import Memory, bytes_of, memory_of, working_dtype
from kvik.planner.parallel import MAX_DEVICES, can_share
from kvik.planner.question import Question, check_question, context_of
from kvik.planner.setting import Setting
from kvik.planner.shape import ModelShape
from kvik.planner.speed import Speed, speed_of
from kvik.planner.variants import (
    AttentionRow,
    KVRow,
    WeightRow,
    attention_variants,
    kv_formats,
    weight_formats,
)
from kvik.spec.kv import KV_FORMATS

# What to change about a plan that does not fit.

MAX_TP = 8  # devices of one machine, between which layers can be shared at speed


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change after which the plan fits.

    Attributes:
        flags: of `kvik plan`.
        total: bytes on the fullest device then.
    """

    flags: str
    total: int


def remedies(shape: ModelShape, at: Setting, memory: Memory) -> tuple[Remedy, ...]:
    """The smallest change of each kind that makes it fit: fewer requests, a shorter context, a
    smaller KV or weight format, more devices; where only devices help, also the smallest formats on
    fewer of them. Empty: nothing helps."""
    changed = [
        *_work(at, memory),
        *_first(shape, _kv_formats(shape, at)),
        *_first(shape, _weight_formats(shape, at)),
    ]
    devices = list(_first(shape, _more_devices(shape, at)))
    if not changed:
        changed += _first(shape, _smaller_on_fewer(shape, at, devices))
    return tuple(_remedy(shape, at, setting) for setting in [*changed, *devices])


def _smaller_on_fewer(shape: ModelShape, at: Setting, enough: list[Setting]) -> Iterator[Setting]:
    """The smallest formats on fewer devices than are `enough` without them."""
    weights = min(WEIGHT_FORMATS, key=shape.weight_bytes)
    kv = min(KV_FORMATS, key=shape.kv_bytes_per_token)
    limit = min((setting.tp * setting.pp for setting in enough), default=MAX_DEVICES + 1)
    for devices in (at, *_more_devices(shape, at)):
        if devices.tp * devices.pp >= limit:
            return
        yield replace(devices, weight_format=weights)
        yield replace(devices, weight_format=weights, kv_format=kv)


def _work(at: Setting, memory: Memory) -> Iterator[Setting]:
    if memory.largest_batch:
        yield replace(at, batch=memory.largest_batch)
    if memory.longest_context:
        yield replace(at, context=memory.longest_context)


def _kv_formats(shape: ModelShape, at: Setting) -> Iterator[Setting]:
    """The largest first: what fits with more bits loses less."""
    for name in sorted(KV_FORMATS, key=shape.kv_bytes_per_token, reverse=True):
        yield replace(at, kv_format=name)


def _weight_formats(shape: ModelShape, at: Setting) -> Iterator[Setting]:
    for name in sorted(WEIGHT_FORMATS, key=shape.weight_bytes, reverse=True):
        yield replace(at, weight_format=name)


def _more_devices(shape: ModelShape, at: Setting) -> Iterator[Setting]:
    """Twice as many, again and again: sharing layers while the heads allow it, then in stages."""
    if at.device.link == 0:
        return
    tp, pp = at.tp, at.pp
    while 2 * tp * pp <= MAX_DEVICES:
        if can_share(shape, 2 * tp, pp) and 2 * tp <= MAX_TP:
            tp *= 2
        elif can_share(shape, tp, 2 * pp):
            pp *= 2
        else:
            return
        yield replace(at, tp=tp, pp=pp)


def _first(shape: ModelShape, settings: Iterable[Setting]) -> Iterator[Setting]:
    """The first that fits, if one does."""
    for setting in settings:
        needed, limit = bytes_of(shape, setting)
        if needed <= limit:
            yield setting
            return


def _remedy(shape: ModelShape, asked: Setting, changed: Setting) -> Remedy:
    named = {
        "dtype": (asked.weight_format, changed.weight_format),
        "kv-dtype": (asked.kv_format, changed.kv_format),
        "context": (asked.context, changed.context),
        "batch": (asked.batch, changed.batch),
        "tp": (asked.tp, changed.tp),
        "pp": (asked.pp, changed.pp),
    }
    flags = " ".join(f"--{name} {new}" for name, (old, new) in named.items() if new != old)
    needed, _ = bytes_of(shape, changed)
    return Remedy(flags, needed)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Attributes:
    flops_per_token: of one token behind a full context.
    runs: this engine runs the model, not only plans it.
    """

    name: str
    architecture: str
    attention: str
    parameters: int
    active_parameters: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    weight_bytes: int
    kv_bytes_per_token: int
    flops_per_token: float
    runs: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Attributes:
    count: how many share the model.
    bandwidth, rate: bytes and operations a second of one; None: its speed is unknown.
    arithmetic: the unit that multiplies.
    source: of the figures; of a machine without any, what its processor is.
    unknown: why its speed is not known.
    doubt: why its speed may be wrong.
    """

    name: str
    count: int
    memory: int
    bandwidth: float | None
    rate: float | None
    arithmetic: str
    measured: bool
    source: str
    unknown: str
    doubt: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    remedies: what would fit, if this does not.
    speed: None: the device's speed is unknown.
    """

    model: ModelFacts
    device: DeviceFacts
    context: int
    batch: int
    weight_format: str
    kv_format: str
    tp: int
    pp: int
    memory: Memory
    remedies: tuple[Remedy, ...]
    speed: Speed | None
    attention_variants: tuple[AttentionRow, ...]
    weight_formats: tuple[WeightRow, ...]
    kv_formats: tuple[KVRow, ...]


def plan(question: Question) -> Plan:
    """Answer a question.

    Raises:
        ConfigError: a field that is out of range or contradicts model or device.
        ModelError: the model is not found or cannot be read.
    """
    shape = read_shape(question.model)
    device, hardware = find_machine(question.hardware)
    return plan_shape(shape, device, question, hardware)


def plan_shape(
    shape: ModelShape, device: Device, question: Question, hardware: Hardware | None = None
) -> Plan:
    """The plan of a model that is read already, on a device that is found already.

    Args:
        hardware: of this machine; None: the device is another one.
    """
    check_question(question, shape)
    at = setting_of(shape, device, question, hardware)
    memory = memory_of(shape, at)
    return Plan(
        model=_model_facts(shape, at),
        device=_device_facts(at),
        context=at.context,
        batch=at.batch,
        weight_format=at.weight_format,
        kv_format=at.kv_format,
        tp=at.tp,
        pp=at.pp,
        memory=memory,
        remedies=() if memory.fits else remedies(shape, at, memory),
        speed=speed_of(shape, at, question, memory) if device.rated else None,
        attention_variants=attention_variants(shape, at),
        weight_formats=weight_formats(shape, at),
        kv_formats=kv_formats(shape, at),
    )


def find_machine(name: str) -> tuple[Device, Hardware | None]:
    """A device by name, and what is known of the machine if it is this one.

    Raises:
        ConfigError: no such device or file, or a file that cannot be used.
    """
    if name.lower() != "this":
        return find_device(name), None
    hardware = detect(find_gpus())
    device = this_device(hardware, calibration_path())
    if hardware.gpus:  # what others took of it is not there to plan with
        device = replace(device, memory=hardware.gpus[0].free_memory)
    return device, hardware


def setting_of(
    shape: ModelShape, device: Device, question: Question, hardware: Hardware | None
) -> Setting:
    """The question with its gaps filled."""
    weights = question.weight_format or _usual_format(shape, device, question, hardware)
    computed = working_dtype(shape, weight_facts(weights).name)
    return Setting(
        device=device,
        weight_format=weights,
        kv_format=kv_facts(question.kv_format or weight_format(computed)).name,
        context=context_of(question, shape),
        batch=question.batch,
        tp=question.tp,
        pp=question.pp,
        utilization=question.utilization,
        hardware=hardware,
    )


def _usual_format(
    shape: ModelShape, device: Device, question: Question, hardware: Hardware | None
) -> str:
    """The checkpoint's; on this machine what the engine decides when it is not told."""
    if hardware is None or shape.spec is None or not weight_facts(shape.stored).dtype:
        return shape.stored
    gpu = hardware.gpus[0] if hardware.gpus else None
    limit = Limit(int(device.memory * question.utilization), "")
    return weight_format(choose_dtype(EngineConfig(), shape.spec, hardware, gpu, limit, Notes()))


def _model_facts(shape: ModelShape, at: Setting) -> ModelFacts:
    return ModelFacts(
        name=shape.name,
        architecture=shape.architecture,
        attention=shape.attention,
        parameters=shape.parameters,
        active_parameters=shape.active_parameters,
        layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_context=shape.max_context,
        weight_bytes=shape.weight_bytes(at.weight_format),
        kv_bytes_per_token=shape.kv_bytes_per_token(at.kv_format),
        flops_per_token=shape.matmul_flops(1, 1) + shape.attention_flops(1, at.context),
        runs=shape.spec is not None,
        notes=shape.notes,
    )


def _device_facts(at: Setting) -> DeviceFacts:
    device = at.device
    unit = arithmetic(at.weight_format, device.kind)
    return DeviceFacts(
        name=device.name,
        count=at.tp * at.pp,
        memory=int(device.memory),
        bandwidth=device.bandwidth,
        rate=device.rate(unit) if device.rated else None,
        arithmetic=unit,
        measured=device.measured,
        source=device.source or _called(at.hardware),
        unknown=device.unknown,
        doubt=device.doubt,
    )


def _called(hardware: Hardware | None) -> str:
    """What this machine's processor calls itself."""
    if hardware is None:
        return ""
    return hardware.gpus[0].name if hardware.gpus else hardware.cpu_name
