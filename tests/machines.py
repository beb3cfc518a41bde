"""Simulated machines, so that what a test composes does not depend on the machine that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from titan.cluster import devices
from titan.cluster.devices import GIB, Machine, Probe

H100S = "".join(f"GPU-{i}{i}aa-bb, NVIDIA H100 80GB HBM3, 81559, 9.0\n" for i in range(8))
REAL = devices.detect


def _smi(arguments: Sequence[str]) -> str | None:
    return H100S if arguments[0] == "nvidia-smi" else None


def detector(kind: str) -> Callable[..., Machine]:
    """`titan.cluster.devices.detect` on a machine of 16 GiB ("cpu") or one with 8 H100 of 80 GB ("gpu")."""
    gpu = kind == "gpu"
    probe = Probe(
        root=Path("/nonexistent"),
        environ={},
        run=_smi if gpu else lambda arguments: None,
        torch_version="cuda: str = '13.0'\n" if gpu else "cuda: str = None\n",
        cores=64 if gpu else 4,
        physical_bytes=(1024 if gpu else 16) * GIB,
        architecture="x86_64",
    )
    return lambda device="auto": REAL(device, probe)
