"""The debug axis: debugging options that cost speed."""

from __future__ import annotations

from dataclasses import dataclass

from titan.config.settings import setting


@dataclass(frozen=True)
class Debug:
    """Debugging options."""

    deterministic: bool = setting(False, "use deterministic kernels only, so that a repeated run is bitwise equal")
    detect_anomaly: bool = setting(
        False, "report the forward operation whose backward produced a value that is not finite"
    )
