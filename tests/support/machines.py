"""Simulated machines, so that a test's composed runs do not depend on the machine that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from titan.cluster import devices
from titan.cluster.compiler import find_missing_compiler
from titan.cluster.devices import Machine
from titan.cluster.gpus import GIB, Probe

H100S = "".join(f"GPU-{i}{i}aa-bb, NVIDIA H100 80GB HBM3, 81559, 9.0\n" for i in range(8))
H200 = "GPU-00aa-bb, NVIDIA H200, 143167, 9.0\n"  # 139.8 GiB
NVIDIA_SMI = {"cpu": None, "gpu": H100S, "h200": H200}
REAL = devices.detect_machine


def make_detector(kind: str) -> Callable[..., Machine]:
    """Return `devices.detect_machine` for a machine of 16 GiB ("cpu"), with 8 H100 of 80 GB ("gpu"), or an H200."""
    gpu, output = kind != "cpu", NVIDIA_SMI[kind]
    probe = Probe(
        root=Path("/nonexistent"),
        environ={},
        run=lambda arguments: output if arguments[0] == "nvidia-smi" else None,
        torch_version="cuda: str = '13.0'\n" if gpu else "cuda: str = None\n",
        cores=64 if gpu else 4,
        physical_bytes=(1024 if gpu else 16) * GIB,
        architecture="x86_64",
    )
    return lambda device="auto": REAL(device, probe)


_lacking = find_missing_compiler(devices.detect_machine("cpu"), "inductor")
NO_COMPILER = f"{_lacking}: apt-get install g++" if _lacking else ""
"""Why tests that compile for CPUs are skipped; empty where they run."""
