"""Apply the debugging options to torch."""

from __future__ import annotations

import os

import torch

from titan.debug.schema import Debug


def set_switches(debug: Debug) -> None:
    """Set torch's global debugging switches in this process."""
    if debug.deterministic != torch.are_deterministic_algorithms_enabled():  # the call alone imports Inductor
        torch.use_deterministic_algorithms(debug.deterministic)
    if debug.deterministic:
        # cuBLAS is deterministic only with a workspace of fixed size
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.autograd.set_detect_anomaly(debug.detect_anomaly, check_nan=debug.detect_anomaly)
