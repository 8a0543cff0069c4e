"""The calibration of a machine, with round figures."""

from __future__ import annotations

from kvik import __version__
from kvik.planner.calibration import (
    AttentionCosts,
    Calibration,
    HostCost,
    LinearCosts,
    Machine,
    ReadRate,
    StateCosts,
)
from kvik.planner.devices import Device, cpu_device

MIB = 1 << 20
MACHINE = Machine("Some CPU", 2, "avx2", __version__, "2026-01-02T03:04:05+00:00")


def linear_costs(peak: float, streams: float) -> tuple[LinearCosts, ...]:
    """Return costs at half the peak for any number of rows, with a kernel that streams a weight in
    `streams`."""
    return tuple(
        LinearCosts(
            rows=rows,
            call=1e-6,
            input=0.0,
            output=0.0,
            cached=4 * rows / peak,
            streamed=max(streams, 4 * rows / peak),
            share=0.9,
        )
        for rows in (1, 8, 64, 512)
    )


def calibration() -> Calibration:
    """Return one with 10 GB/s of memory, 40 GB/s of caches and 100 G operations/s in bf16."""
    return Calibration(
        machine=MACHINE,
        reads=(ReadRate(8 * MIB, 40e9), ReadRate(32 * MIB, 40e9), ReadRate(512 * MIB, 10e9)),
        peaks={"fp32": 50e9, "bf16": 100e9, "int8": 200e9},
        linears={
            "bf16": linear_costs(100e9, 0.0),
            "int8": linear_costs(200e9, 0.0),
            "int4-g128": linear_costs(200e9, 80e-12),
        },
        attention=(
            AttentionCosts(64, 1e-6, 50e-12, 400e-12, 10e-12, 40e9, 20e-12, 100e-12, 500e-12),
            AttentionCosts(128, 1e-6, 50e-12, 400e-12, 10e-12, 60e9, 20e-12, 100e-12, 500e-12),
        ),
        states={"convolution": StateCosts(1e9, 2e9), "delta rule": StateCosts(4e9, 8e9)},
        launch=2e-7,
        activation=50e9,
        logit=10e-12,
        host=(HostCost(MIB, 1e-4, 2e-6), HostCost(64 * MIB, 4e-4, 6e-6)),
        host_request=3e-4,
        host_token=1e-6,
    )


def measured_device() -> Device:
    return cpu_device(calibration(), MACHINE, 16 << 30)
