"""The cluster axis: on how many devices, of which kind, a run takes place. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan.settings import setting


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of a run; nothing here changes what is learned."""

    devices: int | str = setting(
        "auto",
        "ranks in all; auto: what the layout asks for on CPU, all devices on GPUs",
        at_least=1,
        words=("auto",),
    )
    nodes: int = setting(1, "machines", at_least=1)
    devices_per_node: int | str = setting(
        "auto", "ranks on each machine; auto: as many as it has devices", at_least=1, words=("auto",)
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "auto: GPUs where there are any and torch is built for them, else the CPU"
    )
    restarts: int = setting(0, "restarts of all ranks on this machine after one of them died", at_least=0)
    timeout: float = setting(1800.0, "seconds after which a collective operation gives up", above=0)
    memory_gib: float | None = setting(None, "memory of one device in GiB; null: read it", above=0)
    peak_tflops: float | None = setting(
        None, "dense bf16 peak of one device in TFLOP/s, for MFU; null: from the table of known devices", above=0
    )
