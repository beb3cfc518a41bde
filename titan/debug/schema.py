"""The debug axis: what helps to find a fault, at the price of speed."""

from __future__ import annotations

from dataclasses import dataclass

from titan.config.settings import setting


@dataclass(frozen=True)
class Debug:
    """What helps to find a fault."""

    deterministic: bool = setting(False, "only deterministic kernels, so that a repeated run is bitwise equal")
    detect_anomaly: bool = setting(False, "name the forward operation whose backward made a value that is not finite")


def apply(debug: Debug) -> None:
    """Set torch's switches for this process."""
    import os

    import torch

    if debug.deterministic != torch.are_deterministic_algorithms_enabled():  # the call alone imports Inductor
        torch.use_deterministic_algorithms(debug.deterministic)
    if debug.deterministic:
        # cuBLAS is deterministic only with a workspace of fixed size
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.autograd.set_detect_anomaly(debug.detect_anomaly, check_nan=debug.detect_anomaly)
