"""Find the GPUs that torch will see, without importing torch.

Four questions in turn: which backend is the installed torch built for; which GPUs does the driver report; which of them
do the environment variables leave visible; and if none, why. NVIDIA GPUs are listed by nvidia-smi, else from the
driver's files; AMD GPUs by rocm-smi.

Every reader of files, environment variables and programs goes through a `Probe`, so that a test can simulate any
machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titan.cluster.known_devices import has_bf16, look_up_capability, look_up_memory_gib
from titan.files.platform import count_cores

PROGRAM_SECONDS = 20.0  # a driver without persistence mode wakes eight GPUs for several seconds


def run_program(arguments: Sequence[str]) -> str | None:
    """Return the output of a program; None if it is missing, fails or exceeds `PROGRAM_SECONDS`."""
    try:
        process = subprocess.run(arguments, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout


def _read_torch_version() -> str:
    """Return the text of the installed torch's version file without importing torch; empty without torch."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else ""


@dataclass(frozen=True)
class Probe:
    """How device detection reads the machine; a test passes other values."""

    root: Path = Path("/")  # the directory that contains /proc, /sys and /dev
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))  # the environment variables
    run: Callable[[Sequence[str]], str | None] = run_program  # returns a program's output, or None
    torch_version: str = field(default_factory=_read_torch_version)  # the text of torch/version.py
    cores: int = field(default_factory=count_cores)  # cores in this process's affinity mask
    # the machine's memory
    physical_bytes: int = field(default_factory=lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    architecture: str = field(default_factory=platform.machine)  # the output of `uname -m`

    def read_text(self, path: str | Path) -> str:
        """Return the text of a file below the root; empty if it can't be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def parse_fields(text: str) -> dict[str, str]:
    """Return the pairs of a text of "key: value" lines, as files below /proc have them."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def parse_number(text: str) -> float | None:
    """Return a text as a number; None if it is not one."""
    try:
        return float(text)
    except ValueError:
        return None


GIB = 1024**3
AMPERE = 8.0  # the first compute capability with bf16 tensor cores
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits")
ROCM_SMI = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--json")
MATRIX_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
"""AMD's architectures with bf16 matrix instructions."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver reports it."""

    uuid: str
    name: str
    memory_gib: float | None
    bf16: bool
    capability: float | None = None


@dataclass(frozen=True)
class GpuSearch:
    """The result of `find_gpus`."""

    gpus: list[Gpu]  # those that torch will see
    unused: list[Gpu] = field(default_factory=list)  # those of this machine that torch will not see
    reason: str = ""  # why there is none to use
    remedy: str = ""  # what to change


def find_gpus(probe: Probe) -> GpuSearch:
    """Return the GPUs that torch will see, or the reason why there is none."""
    backends = {
        name for name in ("cuda", "hip") if re.search(rf"^{name}\b[^=\n]*=\s*['\"]", probe.torch_version, re.MULTILINE)
    }
    if not backends:
        reason, remedy = "the installed torch is built for the CPU only", "install a GPU build of torch"
        return GpuSearch([], _list_driver_gpus(probe), reason, remedy)
    if "cuda" in backends:
        smi_gpus = [gpu for line in (probe.run(NVIDIA_SMI) or "").splitlines() if (gpu := _parse_smi_gpu(line))]
        return _apply_masks(smi_gpus or _list_driver_gpus(probe), ("CUDA_VISIBLE_DEVICES",), probe)
    second = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in probe.environ else "CUDA_VISIBLE_DEVICES"
    return _apply_masks(_list_amd_gpus(probe), ("ROCR_VISIBLE_DEVICES", second), probe)


# Visible devices


def _apply_masks(gpus: list[Gpu], variables: Sequence[str], probe: Probe) -> GpuSearch:
    """Apply environment variables in turn; the indices of each count the GPUs that the one before left visible."""
    visible = gpus
    for variable in variables:
        mask = probe.environ.get(variable)
        if mask is not None and visible:
            visible = _select_visible(visible, mask, probe)
            if not visible:
                reason = f"{variable}={mask or '(empty)'} leaves no GPU visible"
                return GpuSearch([], gpus, reason, f"change {variable}")
    if visible:
        return GpuSearch(visible)
    return GpuSearch([], [], "this machine's driver tools show no GPU", "check that nvidia-smi or rocm-smi lists one")


def _select_visible(gpus: list[Gpu], mask: str, probe: Probe) -> list[Gpu]:
    """Return the GPUs of a mask of indices or UUIDs, in its order.

    Entries after the first invalid one are ignored, and a process sees at most one MIG slice (CUDA programming guide,
    environment variables).
    """
    selected: list[Gpu] = []
    for entry in (part.strip() for part in mask.split(",")):
        if entry.startswith("MIG-"):
            return [_find_slice(entry, gpus, probe)]
        gpu = _select_gpu(entry, gpus)
        if gpu is None:
            break
        selected.append(gpu)
    return selected


def _select_gpu(entry: str, gpus: list[Gpu]) -> Gpu | None:
    """Return the GPU of an index or of a UUID, which may be abbreviated; None if there is not exactly one."""
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    matches = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


# NVIDIA


def _parse_smi_gpu(line: str) -> Gpu | None:
    """Return the GPU of a line such as "GPU-8a1f..., NVIDIA H100 80GB HBM3, 81559, 9.0"; None for other lines."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 4 or not parts[0].startswith("GPU-"):
        return None
    uuid, name, mebibytes, capability = parts
    memory, version = parse_number(mebibytes), parse_number(capability)
    return Gpu(uuid, name, memory / 1024 if memory else look_up_memory_gib(name), (version or 0.0) >= AMPERE, version)


def _find_slice(uuid: str, gpus: list[Gpu], probe: Probe) -> Gpu:
    """Return a MIG slice from `nvidia-smi -L`; its memory is in its profile's name, such as 1g.10gb."""
    parent, listing = gpus[0].name, probe.run(("nvidia-smi", "-L")) or ""
    for line in listing.splitlines():
        if gpu_line := re.match(r"GPU \d+: (.+?) \(UUID", line):
            parent = gpu_line[1]
        elif (slice_line := re.search(r"MIG (\S*?(\d+)gb)\b", line)) and uuid in line:
            return Gpu(uuid, f"{parent} MIG {slice_line[1]}", float(slice_line[2]), gpus[0].bf16, gpus[0].capability)
    return Gpu(uuid, f"{parent} MIG", None, gpus[0].bf16, gpus[0].capability)


def _list_driver_gpus(probe: Probe) -> list[Gpu]:
    """Return NVIDIA's GPUs from the driver's files below /proc, in PCI order.

    A container without GPUs sees those files too, so a GPU counts only if its device file exists.
    """
    gpus = []
    for path in sorted((probe.root / "proc/driver/nvidia/gpus").glob("*/information")):
        facts = parse_fields(probe.read_text(path))
        if (probe.root / f"dev/nvidia{facts.get('Device Minor', '-')}").exists():
            name = facts.get("Model", "NVIDIA GPU")
            uuid = facts.get("GPU UUID", "")
            gpus.append(Gpu(uuid, name, look_up_memory_gib(name), has_bf16(name), look_up_capability(name)))
    return gpus


# AMD


def _list_amd_gpus(probe: Probe) -> list[Gpu]:
    cards: dict[str, dict[str, str]] = {}
    with contextlib.suppress(ValueError):
        cards = json.loads(probe.run(ROCM_SMI) or "{}")
    numbers = sorted(int(name[4:]) for name in cards if re.fullmatch(r"card\d+", name))
    return [_parse_amd_gpu(cards[f"card{number}"]) for number in numbers]


def _parse_amd_gpu(card: Mapping[str, str]) -> Gpu:
    """Return a GPU from rocm-smi's JSON, whose keys differ in capitals between releases."""
    facts = {key.lower(): str(value) for key, value in card.items()}
    name = facts.get("card series") or facts.get("card model") or "AMD GPU"
    size = parse_number(facts.get("vram total memory (b)", ""))
    bf16 = has_bf16(name) or facts.get("gfx version", "").startswith(MATRIX_BF16)
    uuid = "GPU-" + facts.get("unique id", "").removeprefix("0x")  # the form that ROCR_VISIBLE_DEVICES takes
    return Gpu(uuid, name, size / GIB if size else look_up_memory_gib(name), bf16)
