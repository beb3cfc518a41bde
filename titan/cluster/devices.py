"""What this machine has: its devices, their memory and their peak speed, found without importing torch.

`detect` asks, in this order: is the installed torch built for GPUs (its version file says so), which GPUs does the
driver show, which of them does the environment leave visible; where one answer is no, the CPU is the device. Every
reader goes through a `Probe`, so that any machine can be simulated in a test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from titan.cluster.schema import Cluster
from titan.errors import ConfigError

GIB = 1024**3
SMI_SECONDS = 20.0  # a driver without persistence mode wakes eight GPUs for several seconds
NODE_GPUS = 8
"""GPUs of a node of which nothing else is known."""
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits")
ROCM_SMI = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--json")


@dataclass(frozen=True)
class Peak:
    """What one kind of device can do at most, by its vendor's data sheet.

    Attributes:
        pattern: a regular expression for the device's name as the driver gives it; upper and lower case are the same.
        bf16: dense matrix products in bf16 with fp32 sums, TFLOP/s; None where the hardware has no bf16.
        fp32: matrix products in plain fp32 (no TF32), TFLOP/s.
        memory_gib: about what the driver reports, rounded down.
    """

    pattern: str
    bf16: float | None
    fp32: float | None
    memory_gib: float


# The first pattern that matches holds. NVIDIA's sheets give most tensor-core figures "with sparsity": those are halved.
PEAKS: tuple[Peak, ...] = (
    # NVIDIA Blackwell data sheet: HGX B200 and GB200 NVL72, a GPU: 4,500 and 5,000 sparse; Blackwell Ultra the same.
    Peak(r"\bGB300\b", 2500, 80, 277),
    Peak(r"\bB300\b", 2250, 75, 268),
    Peak(r"\bGB200\b", 2500, 80, 184),
    Peak(r"\bB200\b", 2250, 75, 178),
    # NVIDIA Blackwell architecture brief: HGX B100, a GPU: 3,500 sparse.
    Peak(r"\bB100\b", 1750, 60, 178),
    # NVIDIA H200, H100 and GH200 data sheets: SXM 1,979, NVL 1,671, PCIe 1,513, all sparse. H800: fewer links only.
    Peak(r"\bGH200 144G", 989, 67, 140),
    Peak(r"\bGH200\b", 989, 67, 94),
    Peak(r"\bH200 NVL", 835, 60, 140),
    Peak(r"\bH200\b", 989, 67, 140),
    Peak(r"\bH100 NVL", 835, 60, 93),
    Peak(r"\bH[18]00\b.*PCIe", 756, 51, 79),
    Peak(r"\bH[18]00\b", 989, 67, 79),
    # NVIDIA H20 product sheet, as given by vendors of servers: 148 dense.
    Peak(r"\bH20\b", 148, 44, 95),
    # NVIDIA A100 data sheet: 312 dense, the same for SXM and PCIe. A800: fewer links only.
    Peak(r"\bA[18]00\b.*80GB", 312, 19.5, 79),
    Peak(r"\bA[18]00\b.*40GB", 312, 19.5, 39),
    # NVIDIA A30, A10 and A40 data sheets (dense), A10G data sheet (140 sparse).
    Peak(r"\bA30\b", 165, 10.3, 23),
    Peak(r"\bA10\b", 125, 31.2, 22),
    Peak(r"\bA10G\b", 70, 31.2, 22),
    Peak(r"\bA40\b", 149.7, 37.4, 44),
    # NVIDIA L40S (362 dense, 733 sparse), L40 (181 dense) and L4 (242 sparse) data sheets.
    Peak(r"\bL40S\b", 362, 91.6, 44),
    Peak(r"\bL40\b", 181, 90.5, 44),
    Peak(r"\bL4\b", 121, 30.3, 22),
    # NVIDIA's white papers on the GA102, Ada and Blackwell RTX architectures: bf16 with fp32 accumulate, dense.
    Peak(r"RTX 5090$", 209.5, 104.8, 31),
    Peak(r"RTX 6000 Ada", 364.2, 91.1, 47),
    Peak(r"RTX 4090$", 165.2, 82.6, 23),
    Peak(r"RTX A6000$", 154.8, 38.7, 47),
    Peak(r"RTX 3090$", 71, 35.6, 24),
    # NVIDIA V100 and T4 data sheets; their tensor cores know fp16 only.
    Peak(r"\bV100S", None, 16.4, 31),
    Peak(r"\bV100.*SXM", None, 15.7, 15),
    Peak(r"\bV100", None, 14, 15),
    Peak(r"\bT4$", None, 8.1, 14),
    # AMD Instinct data sheets, matrix peaks without sparsity; torch sees each die of an MI250 as one device.
    Peak(r"\bMI355X", 2516.6, 157.3, 287),
    Peak(r"\bMI350X", 2306.9, 144.2, 287),
    Peak(r"\bMI325X", 1307.4, 163.4, 255),
    Peak(r"\bMI300X", 1307.4, 163.4, 191),
    Peak(r"\bMI300A", 980.6, 122.6, 127),
    Peak(r"\bMI250X", 191.5, 47.9, 63),
    Peak(r"\bMI250\b", 181, 45.3, 63),
    Peak(r"\bMI210", 181, 45.3, 63),
)


# docs.nvidia.com/cuda/cuda-programming-guide, compute capabilities; the first pattern that matches holds.
CAPABILITIES = (
    (r"\bG?B300\b", 10.3), (r"\bG?B[12]00\b", 10.0), (r"\b(GH200|H[128]00|H20)\b", 9.0),
    (r"\b(L4|L20|L40S?|RTX 40\d\d|RTX \d000 Ada)\b", 8.9), (r"\b(A40|A10G?|A16|A2|RTX A\d000|RTX 30\d\d)\b", 8.6),
    (r"\b(A100|A30|A800)\b", 8.0), (r"\b(T4|RTX 20\d\d)\b", 7.5), (r"\bV100\b", 7.0), (r"\bP100\b", 6.0),
)  # fmt: skip
"""CUDA's compute capability by a regular expression for a GPU's name, where the driver does not say it."""


@dataclass(frozen=True)
class Machine:
    """The devices of this machine that a run may use.

    Attributes:
        device: torch's name for their kind; AMD's GPUs are "cuda" to torch too.
        name: the product's name, such as "AMD EPYC 9654" or "NVIDIA H200".
        count: how many devices there are; 1 for the CPU, which any number of ranks may share.
        cores: CPU cores that this process may use.
        memory_gib: of one GPU, or of the machine as far as its control group allows; None where it can't be read.
        bf16_fast: whether the hardware multiplies bf16 faster than fp32.
        note: why GPUs that are here are not used, or nothing.
        capability: CUDA's compute capability of the least of the GPUs; None where it isn't known, or not NVIDIA's.
    """

    device: Literal["cpu", "cuda"]
    name: str
    count: int
    cores: int
    memory_gib: float | None
    bf16_fast: bool
    note: str = ""
    capability: float | None = None

    def describe(self) -> str:
        """One line for people, such as "8 x NVIDIA H200, 140.4 GiB each, bf16, 64 CPU cores"."""
        memory = "memory unknown" if self.memory_gib is None else f"{self.memory_gib:.1f} GiB"
        bf16 = "bf16" if self.bf16_fast else "no fast bf16"
        if self.device == "cuda":
            each = " each" if self.count > 1 and self.memory_gib is not None else ""
            text = f"{self.count} x {self.name}, {memory}{each}, {bf16}, {_cores(self.cores)}"
        else:
            text = f"{self.name}, {_cores(self.cores)}, {memory}, {bf16}"
        return f"{text} ({self.note})" if self.note else text


def _cores(count: int) -> str:
    return "1 CPU core" if count == 1 else f"{count} CPU cores"


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver describes it."""

    uuid: str
    name: str
    memory_gib: float | None
    bf16: bool
    capability: float | None = None


def _command(arguments: Sequence[str]) -> str | None:
    """The output of a program; None where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _torch_version() -> str:
    """The text of the installed torch's version file, read without importing torch; empty without torch."""
    spec = importlib.util.find_spec("torch")
    return _read(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


@dataclass(frozen=True)
class Probe:
    """How `detect` learns about the machine; a test gives other answers.

    Attributes:
        root: where /proc, /sys and /dev begin.
        environ: the environment variables.
        run: a program's output, or None.
        torch_version: the text of torch/version.py.
        cores: cores in this process's affinity mask.
        physical_bytes: the machine's memory, or None.
        architecture: as `uname -m` gives it.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str]], str | None] = _command
    torch_version: str = field(default_factory=_torch_version)
    cores: int = field(default_factory=_affinity)
    physical_bytes: int | None = field(default_factory=_physical_bytes)
    architecture: str = field(default_factory=platform.machine)

    def text(self, path: str) -> str:
        """The text of a file below the root; empty where it can't be read."""
        return _read(self.root / path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def detect(device: str = "auto", probe: Probe | None = None) -> Machine:
    """What this machine offers to a run.

    Args:
        device: "cpu", "cuda", or "auto": GPUs where they can be used, else the CPU.
        probe: how to look; by default at the real machine.

    Raises:
        ConfigError: for "cuda" where no GPU can be used.
    """
    probe = probe or Probe()
    if device == "cpu":
        return _cpu(probe)
    found = _search(probe)
    if found.gpus:
        return _gpu_machine(found.gpus, probe)
    unused = f"{len(found.unused)} x {found.unused[0].name} not used: {found.reason}" if found.unused else ""
    if device == "cuda":
        raise ConfigError(f"cluster.device=cuda: {unused or found.reason}; {found.cure}, or use cluster.device=cpu.")
    return dataclasses.replace(_cpu(probe), note=unused)


def elsewhere(cluster: Cluster) -> Machine:
    """The node that a job will get, as `cluster` describes it; where it names no GPUs, a node is as this machine."""
    if cluster.device != "cuda":
        here = detect(cluster.device)
        return dataclasses.replace(here, memory_gib=cluster.node_memory_gib or here.memory_gib)
    name = cluster.device_name or "GPU"
    count = NODE_GPUS if cluster.devices_per_node == "auto" else int(cluster.devices_per_node)
    cores = cluster.cpus_per_rank or 1
    memory = cluster.memory_gib or _tabled_memory(name)
    return Machine("cuda", name, count, cores * count, memory, bf16_fast=True, capability=_tabled_capability(name))


def peak_tflops(name: str, dtype: Literal["bf16", "fp32"]) -> float | None:
    """The dense peak of a device by its name, in TFLOP/s; None where it isn't known, as for every CPU.

    fp32 is plain fp32, with TF32 off. Slices of a GPU (MIG) have no known peak.
    """
    row = _row(name)
    return None if row is None else row.bf16 if dtype == "bf16" else row.fp32


def _row(name: str) -> Peak | None:
    if re.search(r"\bMIG\b", name):
        return None
    return next((row for row in PEAKS if re.search(row.pattern, name.strip(), re.IGNORECASE)), None)


def _tabled_memory(name: str) -> float | None:
    row = _row(name)
    return row.memory_gib if row else None


def _tabled_capability(name: str) -> float | None:
    """CUDA's compute capability of a GPU by its name; None for others."""
    return next((number for pattern, number in CAPABILITIES if re.search(pattern, name, re.IGNORECASE)), None)


# GPUs


@dataclass(frozen=True)
class Search:
    """What looking for GPUs gave: those that torch would see, those here that it would not, why not, and the cure."""

    gpus: list[Gpu]
    unused: list[Gpu] = field(default_factory=list)
    reason: str = ""
    cure: str = ""


def _search(probe: Probe) -> Search:
    backend = _torch_backend(probe.torch_version)
    if backend is None:
        reason, cure = "the installed torch is built for the CPU only", "install a GPU build of torch"
        return Search([], _driver_gpus(probe), reason, cure)
    if backend == "cuda":
        return _masked(_nvidia_gpus(probe), ("CUDA_VISIBLE_DEVICES",), probe)
    second = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in probe.environ else "CUDA_VISIBLE_DEVICES"
    return _masked(_amd_gpus(probe), ("ROCR_VISIBLE_DEVICES", second), probe)


def _torch_backend(version: str) -> Literal["cuda", "hip"] | None:
    """What the installed torch is built for, by the values in its version file."""
    built = {name for name in ("cuda", "hip") if re.search(rf"^{name}\b[^=\n]*=\s*['\"]", version, re.MULTILINE)}
    return "cuda" if "cuda" in built else "hip" if built else None


def _masked(gpus: list[Gpu], variables: Sequence[str], probe: Probe) -> Search:
    """The GPUs that the environment leaves visible; each variable counts among those that the one before left."""
    left = gpus
    for variable in variables:
        mask = probe.environ.get(variable)
        if mask is not None and left:
            left = _visible(left, mask, probe)
            if not left:
                reason = f"{variable}={mask or '(empty)'} leaves no GPU visible"
                return Search([], gpus, reason, f"change {variable}")
    if left:
        return Search(left)
    return Search([], [], "this machine's driver tools show no GPU", "check that nvidia-smi or rocm-smi lists one")


def _visible(gpus: list[Gpu], mask: str, probe: Probe) -> list[Gpu]:
    """The GPUs that a mask of indices or UUIDs leaves, in its order.

    What follows the first invalid entry is invisible, and a process sees one MIG slice at most (CUDA programming
    guide, environment variables).
    """
    chosen: list[Gpu] = []
    for word in (part.strip() for part in mask.split(",")):
        if word.startswith("MIG-"):
            return [_slice(word, gpus, probe)]
        gpu = _named(word, gpus)
        if gpu is None:
            break
        chosen.append(gpu)
    return chosen


def _named(word: str, gpus: list[Gpu]) -> Gpu | None:
    if word.isdecimal():
        return gpus[int(word)] if int(word) < len(gpus) else None
    found = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
    return found[0] if len(found) == 1 else None


def _slice(uuid: str, gpus: list[Gpu], probe: Probe) -> Gpu:
    """A MIG slice; its memory is in its profile's name, such as 1g.10gb, which `nvidia-smi -L` shows."""
    parent, listing = gpus[0].name, probe.run(("nvidia-smi", "-L")) or ""
    for line in listing.splitlines():
        if whole := re.match(r"GPU \d+: (.+?) \(UUID", line):
            parent = whole[1]
        elif (part := re.search(r"MIG (\S*?(\d+)gb)\b", line)) and uuid in line:
            return Gpu(uuid, f"{parent} MIG {part[1]}", float(part[2]), gpus[0].bf16, gpus[0].capability)
    return Gpu(uuid, f"{parent} MIG", None, gpus[0].bf16, gpus[0].capability)


def _gpu_machine(gpus: list[Gpu], probe: Probe) -> Machine:
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


def _nvidia_gpus(probe: Probe) -> list[Gpu]:
    lines = (probe.run(NVIDIA_SMI) or "").splitlines()
    found = [gpu for gpu in map(_nvidia_line, lines) if gpu is not None]
    return found or _driver_gpus(probe)


def _nvidia_line(line: str) -> Gpu | None:
    """A GPU from a line such as "GPU-8a1f..., NVIDIA H100 80GB HBM3, 81559, 9.0"; None where it isn't one."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 4 or not parts[0].startswith("GPU-"):
        return None
    uuid, name, mebibytes, capability = parts
    memory = _number(mebibytes)
    version = _number(capability)
    bf16 = (version or 0.0) >= 8.0
    return Gpu(uuid, name, memory / 1024 if memory else _tabled_memory(name), bf16, version)


def _driver_gpus(probe: Probe) -> list[Gpu]:
    """NVIDIA's GPUs by what the driver writes below /proc, in PCI order.

    A container without GPUs sees that folder as well, so a GPU counts only where its device file is.
    """
    gpus = []
    for path in sorted((probe.root / "proc/driver/nvidia/gpus").glob("*/information")):
        facts = _facts(_read(path))
        if (probe.root / f"dev/nvidia{facts.get('Device Minor', '-')}").exists():
            name = facts.get("Model", "NVIDIA GPU")
            capability = _tabled_capability(name)
            gpus.append(Gpu(facts.get("GPU UUID", ""), name, _tabled_memory(name), _tabled_bf16(name), capability))
    return gpus


def _facts(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _tabled_bf16(name: str) -> bool:
    row = _row(name)
    return row is not None and row.bf16 is not None


def _amd_gpus(probe: Probe) -> list[Gpu]:
    cards: dict[str, dict[str, str]] = {}
    with contextlib.suppress(ValueError):
        cards = json.loads(probe.run(ROCM_SMI) or "{}")
    names = (name for name in cards if re.fullmatch(r"card\d+", name))
    return [_amd_gpu(cards[name]) for name in sorted(names, key=lambda name: int(name[4:]))]


def _amd_gpu(card: Mapping[str, str]) -> Gpu:
    """A GPU from rocm-smi's JSON, whose keys changed their capitals between releases."""
    facts = {key.lower(): str(value) for key, value in card.items()}
    name = facts.get("card series") or facts.get("card model") or "AMD GPU"
    size = _number(facts.get("vram total memory (b)", ""))
    matrix_bf16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
    bf16 = _tabled_bf16(name) or facts.get("gfx version", "").startswith(matrix_bf16)
    uuid = "GPU-" + facts.get("unique id", "").removeprefix("0x")  # the form that ROCR_VISIBLE_DEVICES takes
    return Gpu(uuid, name, size / GIB if size else _tabled_memory(name), bf16)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# The CPU


def _cpu(probe: Probe) -> Machine:
    info = _facts(probe.text("proc/cpuinfo"))
    sizes = [size for size in (probe.physical_bytes, _memory_limit(probe)) if size]
    return Machine(
        device="cpu",
        name=info.get("model name") or f"{probe.architecture} CPU",
        count=1,
        cores=_usable_cores(probe),
        memory_gib=min(sizes) / GIB if sizes else None,
        bf16_fast=bool({"avx512_bf16", "amx_bf16", "bf16"} & _flags(info)),
    )


def _flags(info: Mapping[str, str]) -> set[str]:
    """The processor's features: x86 calls the line "flags", Arm "Features"."""
    return set((info.get("flags") or info.get("Features") or "").split())


def _usable_cores(probe: Probe) -> int:
    """Cores of the affinity mask, or fewer where the control group's quota allows fewer."""
    quotas = [quota for quota in (_quota(text) for text in _quota_texts(probe)) if quota]
    return max(1, min([probe.cores, *(round(quota) for quota in quotas)]))


def _quota_texts(probe: Probe) -> list[str]:
    """Quota and period in microseconds, as v2's cpu.max has them, of this process's groups and those above."""
    texts = [probe.text(f"{folder}/cpu.max") for folder in _groups(probe, "")]
    for folder in _groups(probe, "cpu"):
        texts.append(probe.text(f"{folder}/cpu.cfs_quota_us") + " " + probe.text(f"{folder}/cpu.cfs_period_us"))
    return texts


def _quota(text: str) -> float | None:
    numbers = [_number(word) for word in text.split()]
    if len(numbers) != 2 or not numbers[0] or not numbers[1] or numbers[0] < 0:
        return None
    return numbers[0] / numbers[1]


def _memory_limit(probe: Probe) -> int | None:
    """The smallest memory limit in bytes of this process's control groups, v1 or v2, and those above."""
    texts = [probe.text(f"{folder}/memory.max") for folder in _groups(probe, "")]
    texts += [probe.text(f"{folder}/memory.limit_in_bytes") for folder in _groups(probe, "memory")]
    return min((int(text) for text in texts if text.strip().isdecimal()), default=None)


def _groups(probe: Probe, controller: str) -> list[str]:
    """Folders of this process's group for a v1 controller, or for "" v2's, and of the groups above it.

    Inside a container the path in /proc/self/cgroup may be the host's; then only the mount's top exists.
    """
    mounts = (f"sys/fs/cgroup/{controller}",) if controller else ("sys/fs/cgroup", "sys/fs/cgroup/unified")
    path = Path("/")
    for line in probe.text("proc/self/cgroup").splitlines():
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            path = Path("/" + group.strip("/"))
    return [f"{mount}{above}".rstrip("/") for mount in mounts for above in (path, *path.parents)]
