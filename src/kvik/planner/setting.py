"""What a plan is made for: a model's formats, its devices, and the work they have."""

from __future__ import annotations

from dataclasses import dataclass

from kvik.config.config import EngineConfig
from kvik.config.hardware import Hardware
from kvik.planner.devices import Device

UTILIZATION = EngineConfig().memory_utilization


@dataclass(frozen=True, slots=True)
class Setting:
    """Attributes:
    context, batch: tokens of a request, and requests that run together.
    tp, pp: devices that share each layer; stages of whole layers.
    utilization: share of the device's memory the engine may plan with.
    hardware: what is known of a real machine; None: what follows from `device`.
    """

    device: Device
    weight_format: str
    kv_format: str
    context: int = 1
    batch: int = 1
    tp: int = 1
    pp: int = 1
    utilization: float = UTILIZATION
    hardware: Hardware | None = None

    @property
    def group(self) -> int:
        """Requests in one step: a pipeline is kept full by as many groups as it has stages."""
        return -(-self.batch // self.pp)
