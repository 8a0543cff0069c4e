"""A model that an engine runs, on the device it runs on, in the planner's words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from kvik import __version__
from kvik.config.config import ResolvedConfig
from kvik.config.hardware import detect, find_gpus
from kvik.engine.stats import EngineStats
from kvik.errors import ConfigError
from kvik.planner.calibration import calibration_path, load, this_machine
from kvik.planner.devices import Device, cpu_device, this_device
from kvik.planner.efficiency import Efficiency, efficiency
from kvik.planner.families import read_shape
from kvik.planner.formats import weight_format
from kvik.planner.setting import Setting
from kvik.planner.shape import ModelShape
from kvik.spec.kv import AUTO


@dataclass(frozen=True, slots=True)
class RunningModel:
    """Attributes:
    device: its speed is known if the machine was calibrated.
    """

    resolved: ResolvedConfig
    shape: ModelShape
    device: Device

    @staticmethod
    def of(resolved: ResolvedConfig) -> RunningModel:
        shape = read_shape(resolved.runner.model_path)
        return RunningModel(resolved, shape, running_device(resolved))

    @property
    def setting(self) -> Setting:
        runner = self.resolved.runner
        # Layers may differ in format: that of most of them stands for all.
        specs = (spec for group in self.resolved.cache.groups for spec in group.specs)
        ((stored, _),) = Counter(spec.format for spec in specs).most_common(1)
        return Setting(
            self.device,
            weight_format(runner.dtype, runner.quantization),
            weight_format(runner.dtype) if stored == AUTO else stored,
        )

    @property
    def kv_bytes_per_token(self) -> float:
        return self.shape.kv_bytes_per_token(self.setting.kv_format)

    def efficiency(self, before: EngineStats, after: EngineStats, seconds: float) -> Efficiency:
        """What happened between two readings of the engine's statistics, `seconds` apart."""
        at = self.setting
        return efficiency(
            before, after, seconds, self.shape, at.weight_format, at.kv_format, self.device
        )


def running_device(resolved: ResolvedConfig) -> Device:
    """The device an engine uses, as calibrated with its kernels and its number of threads."""
    if resolved.runner.device != "cpu":
        return this_device(detect(find_gpus()), calibration_path())
    hardware = detect()
    if resolved.runner.kernels != "native":
        hardware = replace(hardware, native=False)
    machine = this_machine(hardware, resolved.runner.threads, __version__)
    try:
        return cpu_device(load(calibration_path()), machine, hardware.memory_limit)
    except ConfigError as error:
        memory = hardware.memory_limit
        return Device("this", "cpu", memory, None, {}, unknown=error.message)
