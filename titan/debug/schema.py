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
    audit: int = setting(
        0,
        "every so many steps, compute a micro-batch of each rank a second time on another rank, and compare; 0: never",
        at_least=0,
    )
    hang_seconds: float | None = setting(
        60.0,
        "report which rank a run waits for after this many seconds without progress: at least ten usual steps, at most "
        "half of the timeout; null: never, and leave the end to the timeout of the collective",
        at_least=1,
        cap=30 * 86400.0,
    )
