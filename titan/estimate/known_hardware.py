"""Whether runs were measured on hardware with a cluster's figures, as its predictions' intervals say. Free of torch."""

from __future__ import annotations

from dataclasses import replace

from titan.cluster.schema import Hardware

_H100 = Hardware(
    bf16_tflops=989, fp8_tflops=1979, fp32_tflops=67, memory_gb_per_second=3350, units=132, watts=700,
    reference_watts=700, link_gb_per_second=340, link_microseconds=12, network_gb_per_second=42.5,
    network_microseconds=35,
)  # fmt: skip
PUBLISHED_HARDWARE = (_H100, replace(_H100, watts=500, memory_gb_per_second=2400))
"""The hardware of the published runs of dense models: 80 GB, and 96 GB with less power."""
_B200 = Hardware(
    bf16_tflops=2250, fp8_tflops=4500, fp32_tflops=75, memory_gb_per_second=7700, units=148, watts=1000,
    reference_watts=1000, link_gb_per_second=680, link_microseconds=12, network_gb_per_second=42.5,
    network_microseconds=35,
)  # fmt: skip
EXPERTS_HARDWARE = (_H100, _B200)
"""The hardware of the published runs of models with experts."""
CALIBRATED_FIGURES = (
    "attention_tflops", "attention_backward_tflops", "eager_factor", "loss_factor", "update_factor",
    "step_microseconds",
)  # fmt: skip
"""Figures of a CPU that no data sheet has, and `titan.calibrate` measures."""


def describe_unmeasured(hardware: Hardware, device: str, experts: bool = False) -> str:
    """Return the end of the sentence on a plan's intervals where no runs were measured with these figures; else empty.

    Args:
        hardware: the figures, with those of known devices.
        device: cpu or cuda.
    """
    if device == "cpu":
        is_calibrated = all(getattr(hardware, name) is not None for name in CALIBRATED_FIGURES)
        return "" if is_calibrated else "; titan.calibrate has not measured this one, so errors may be larger"
    if hardware in (EXPERTS_HARDWARE if experts else PUBLISHED_HARDWARE):
        return ""
    names = "H100 and B200" if experts else "H100"
    return f"; they ran on {names}, not on hardware with these figures, so errors may be larger"
