"""The devices of this machine, their memory and speed, detected without importing torch.

`detect_machine` uses GPUs if the installed torch is built for them, the driver reports some, and the environment
leaves some visible (`titan.cluster.gpus`); else the CPU, with the cores and memory that affinity and cgroups allow.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titan.cluster.gpus import GIB, Gpu, Probe, find_gpus, parse_fields, parse_number
from titan.cluster.known_devices import look_up_capability, look_up_memory_gib
from titan.cluster.schema import Cluster
from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.files import platform

DEVICE = "cluster.device"  # the setting of titan.train that chooses the kind of devices
NODE_GPUS = 8  # GPUs assumed for a node that is described by nothing else


@dataclass(frozen=True)
class Machine:
    """The devices of this machine that a run may use."""

    device: Literal["cpu", "cuda"]  # torch's name for their kind; AMD's GPUs are "cuda" to torch too
    name: str  # the product name, such as "AMD EPYC 9654" or "NVIDIA H200"
    count: int  # number of devices; 1 for the CPU, which any number of ranks may share
    cores: int  # CPU cores that this process may use
    memory_gib: float | None  # memory of one GPU, or of the host within its cgroup limit; None if it can't be read
    bf16_fast: bool  # whether bf16 matmuls are faster than fp32 ones
    note: str = ""  # why GPUs of this machine are not used; empty if none is unused
    capability: float | None = None  # the lowest CUDA compute capability of the GPUs; None if unknown or not NVIDIA's

    def describe(self) -> str:
        """Return one line such as "8 x NVIDIA H200, 140.4 GiB each, bf16, 64 CPU cores"."""
        memory = "memory unknown" if self.memory_gib is None else f"{self.memory_gib:.1f} GiB"
        bf16, cores = "bf16" if self.bf16_fast else "no fast bf16", format_plural(self.cores, "CPU core")
        if self.device == "cuda":
            suffix = " each" if self.count > 1 and self.memory_gib is not None else ""
            text = f"{self.count} x {self.name}, {memory}{suffix}, {bf16}, {cores}"
        else:
            text = f"{self.name}, {cores}, {memory}, {bf16}"
        return f"{text} ({self.note})" if self.note else text


def detect_machine(device: str = "auto", probe: Probe | None = None, setting: str = DEVICE) -> Machine:
    """Return the devices of this machine that a run may use.

    Args:
        device: "cpu", "cuda", or "auto": GPUs if they can be used, else the CPU.
        probe: how to read the machine; by default the real one.
        setting: the name of the user's setting, for messages.

    Raises:
        ConfigError: for "cuda" if no GPU can be used.
    """
    probe = probe or Probe()
    if device == "cpu":
        return _detect_cpu(probe)
    search = find_gpus(probe)
    if search.gpus:
        return _build_gpu_machine(search.gpus, probe)
    unused = f"{len(search.unused)} x {search.unused[0].name} not used: {search.reason}" if search.unused else ""
    if device == "cuda":
        remedies = f"{search.remedy}, or use {setting}=cpu"
        if not search.unused and setting == DEVICE:  # no GPU at all, as on the laptop from which jobs are sent
            remedies = f"send it to GPU nodes with hydra/launcher=slurm, use {setting}=cpu, or {search.remedy}"
        raise ConfigError(f"{setting}=cuda: {unused or search.reason}; {remedies}.")
    return dataclasses.replace(_detect_cpu(probe), note=unused)


def describe_remote_node(cluster: Cluster) -> Machine:
    """Return the node that a scheduler will allocate, from `cluster`; a node without GPUs equals this machine."""
    if cluster.device != "cuda":
        local = detect_machine(cluster.device)
        return dataclasses.replace(local, memory_gib=cluster.node_memory_gib or local.memory_gib)
    name = cluster.device_name or "GPU"
    count = NODE_GPUS if cluster.devices_per_node == "auto" else int(cluster.devices_per_node)
    cores = cluster.cpus_per_rank or 1
    memory = cluster.memory_gib or look_up_memory_gib(name)
    return Machine("cuda", name, count, cores * count, memory, bf16_fast=True, capability=look_up_capability(name))


def _build_gpu_machine(gpus: list[Gpu], probe: Probe) -> Machine:
    sizes = [gpu.memory_gib for gpu in gpus if gpu.memory_gib is not None]
    return Machine(
        device="cuda",
        name=gpus[0].name,
        count=len(gpus),
        cores=_usable_cores(probe),
        memory_gib=min(sizes, default=None),  # the smallest decides what fits
        bf16_fast=all(gpu.bf16 for gpu in gpus),
        capability=min((gpu.capability for gpu in gpus if gpu.capability is not None), default=None),
    )


def _detect_cpu(probe: Probe) -> Machine:
    info = parse_fields(probe.read_text("proc/cpuinfo"))
    flags = info.get("flags") or info.get("Features") or ""  # on x86, and on Arm
    # memory limits of this process's cgroups, v1 or v2, and their parents
    limits = [probe.read_text(f"{folder}/memory.max") for folder in _list_cgroups(probe, "")]
    limits += [probe.read_text(f"{folder}/memory.limit_in_bytes") for folder in _list_cgroups(probe, "memory")]
    sizes = [probe.physical_bytes, *(int(s) for s in limits if s.strip().isdecimal() and int(s))]
    mac_name = (probe.run(("sysctl", "-n", "machdep.cpu.brand_string")) or "") if platform.IS_MAC else ""
    return Machine(
        device="cpu",
        name=info.get("model name") or mac_name.strip() or f"{probe.architecture} CPU",
        count=1,
        cores=_usable_cores(probe),
        memory_gib=min(sizes) / GIB,
        bf16_fast=bool({"avx512_bf16", "amx_bf16", "bf16"} & {*flags.split()}),
    )


def _usable_cores(probe: Probe) -> int:
    """Return the cores of the affinity mask, or the cgroup's CPU quota if that is less."""
    # quota and period in microseconds, of this process's cgroups and their parents: v2's in one file, v1's in two
    files: list[tuple[str, ...]] = [(f"{folder}/cpu.max",) for folder in _list_cgroups(probe, "")]
    files += [(f"{folder}/cpu.cfs_quota_us", f"{folder}/cpu.cfs_period_us") for folder in _list_cgroups(probe, "cpu")]
    texts = [" ".join(map(probe.read_text, names)).split() for names in files]
    numbers = [[parse_number(word) for word in words] for words in texts if len(words) == 2]
    quotas = [quota / period for quota, period in numbers if quota and period and quota > 0]
    return max(1, min([probe.cores, *map(round, quotas)]))


def _list_cgroups(probe: Probe, controller: str) -> list[str]:
    """Return the directories of this process's cgroup and its parents: a v1 controller's, or for "" v2's.

    Inside a container the path in /proc/self/cgroup may be the host's; then only the top of the mount exists.
    """
    mounts = (f"sys/fs/cgroup/{controller}",) if controller else ("sys/fs/cgroup", "sys/fs/cgroup/unified")
    path = Path("/")
    for line in probe.read_text("proc/self/cgroup").splitlines():
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            path = Path("/" + group.strip("/"))
    return [f"{mount}{above}".rstrip("/") for mount in mounts for above in (path, *path.parents)]
