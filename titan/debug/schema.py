"""The debug axis: what helps to find a fault, at the price of speed."""

from __future__ import annotations

from dataclasses import dataclass

from titan.config.settings import setting


@dataclass(frozen=True)
class Debug:
    """What helps to find a fault."""

    deterministic: bool = setting(False, "only deterministic kernels, so that a repeated run is bitwise equal")
    detect_anomaly: bool = setting(False, "name the forward operation whose backward made a value that is not finite")
