"""Known GPUs: peak speed, memory and compute capability by device name. Free of torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DevicePeak:
    """The peak speed and the memory of one kind of device, from its vendor's data sheet."""

    pattern: str  # a regular expression for the device's name as the driver reports it, case-insensitive
    bf16: float | None  # dense bf16 matmuls with fp32 accumulation, TFLOP/s; None for hardware without bf16
    fp32: float | None  # plain fp32 matmuls (no TF32), TFLOP/s
    memory_gib: float | None  # roughly what the driver reports, rounded down


UNKNOWN = DevicePeak("", None, None, None)


# The first matching pattern applies. NVIDIA's sheets give most tensor-core figures "with sparsity": those are halved.
PEAKS: tuple[DevicePeak, ...] = (
    # NVIDIA Blackwell data sheet: HGX B200 and GB200 NVL72, per GPU: 4,500 and 5,000 sparse; Blackwell Ultra the same.
    DevicePeak(r"\bGB300\b", 2500, 80, 277),
    DevicePeak(r"\bB300\b", 2250, 75, 268),
    DevicePeak(r"\bGB200\b", 2500, 80, 184),
    DevicePeak(r"\bB200\b", 2250, 75, 178),
    # NVIDIA Blackwell architecture brief: HGX B100, per GPU: 3,500 sparse.
    DevicePeak(r"\bB100\b", 1750, 60, 178),
    # NVIDIA H200, H100 and GH200 data sheets: SXM 1,979, NVL 1,671, PCIe 1,513, all sparse. H800: fewer links only.
    DevicePeak(r"\bGH200 144G", 989, 67, 140),
    DevicePeak(r"\bGH200\b", 989, 67, 94),
    DevicePeak(r"\bH200 NVL", 835, 60, 140),
    DevicePeak(r"\bH200\b", 989, 67, 140),
    DevicePeak(r"\bH100 NVL", 835, 60, 93),
    DevicePeak(r"\bH[18]00\b.*PCIe", 756, 51, 79),
    DevicePeak(r"\bH[18]00\b", 989, 67, 79),
    # NVIDIA H20 product sheet, as given by vendors of servers: 148 dense.
    DevicePeak(r"\bH20\b", 148, 44, 95),
    # NVIDIA A100 data sheet: 312 dense, the same for SXM and PCIe. A800: fewer links only.
    DevicePeak(r"\bA[18]00\b.*80GB", 312, 19.5, 79),
    DevicePeak(r"\bA[18]00\b.*40GB", 312, 19.5, 39),
    # NVIDIA A30, A10 and A40 data sheets (dense), A10G data sheet (140 sparse).
    DevicePeak(r"\bA30\b", 165, 10.3, 23),
    DevicePeak(r"\bA10\b", 125, 31.2, 22),
    DevicePeak(r"\bA10G\b", 70, 31.2, 22),
    DevicePeak(r"\bA40\b", 149.7, 37.4, 44),
    # NVIDIA L40S (362 dense, 733 sparse), L40 (181 dense) and L4 (242 sparse) data sheets.
    DevicePeak(r"\bL40S\b", 362, 91.6, 44),
    DevicePeak(r"\bL40\b", 181, 90.5, 44),
    DevicePeak(r"\bL4\b", 121, 30.3, 22),
    # NVIDIA's white papers on the GA102, Ada and Blackwell RTX architectures: bf16 with fp32 accumulate, dense.
    DevicePeak(r"RTX 5090$", 209.5, 104.8, 31),
    DevicePeak(r"RTX 6000 Ada", 364.2, 91.1, 47),
    DevicePeak(r"RTX 4090$", 165.2, 82.6, 23),
    DevicePeak(r"RTX A6000$", 154.8, 38.7, 47),
    DevicePeak(r"RTX 3090$", 71, 35.6, 24),
    # NVIDIA V100 and T4 data sheets; their tensor cores support fp16 only.
    DevicePeak(r"\bV100S", None, 16.4, 31),
    DevicePeak(r"\bV100.*SXM", None, 15.7, 15),
    DevicePeak(r"\bV100", None, 14, 15),
    DevicePeak(r"\bT4$", None, 8.1, 14),
    # AMD Instinct data sheets, matrix peaks without sparsity; torch sees each die of an MI250 as one device.
    DevicePeak(r"\bMI355X", 2516.6, 157.3, 287),
    DevicePeak(r"\bMI350X", 2306.9, 144.2, 287),
    DevicePeak(r"\bMI325X", 1307.4, 163.4, 255),
    DevicePeak(r"\bMI300X", 1307.4, 163.4, 191),
    DevicePeak(r"\bMI300A", 980.6, 122.6, 127),
    DevicePeak(r"\bMI250X", 191.5, 47.9, 63),
    DevicePeak(r"\bMI250\b", 181, 45.3, 63),
    DevicePeak(r"\bMI210", 181, 45.3, 63),
)


# docs.nvidia.com/cuda/cuda-programming-guide, compute capabilities; the first matching pattern applies.
CAPABILITIES = (
    (r"\bG?B300\b", 10.3), (r"\bG?B[12]00\b", 10.0), (r"\b(GH200|H[128]00|H20)\b", 9.0),
    (r"\b(L4|L20|L40S?|RTX 40\d\d|RTX \d000 Ada)\b", 8.9), (r"\b(A40|A10G?|A16|A2|RTX A\d000|RTX 30\d\d)\b", 8.6),
    (r"\b(A100|A30|A800)\b", 8.0), (r"\b(T4|RTX 20\d\d)\b", 7.5), (r"\bV100\b", 7.0), (r"\bP100\b", 6.0),
)  # fmt: skip
"""CUDA compute capability by a regular expression for the GPU's name, for where the driver does not report it."""


def look_up_peak_tflops(name: str, dtype: Literal["bf16", "fp32"]) -> float | None:
    """Return the dense peak of a device in TFLOP/s by its name; None for CPUs, MIG slices and unknown devices.

    fp32 is plain fp32, with TF32 off.
    """
    peak = _find_peak(name)
    return peak.bf16 if dtype == "bf16" else peak.fp32


def look_up_memory_gib(name: str) -> float | None:
    """Return the memory of a device in GiB by its name; None for unknown devices."""
    return _find_peak(name).memory_gib


def look_up_capability(name: str) -> float | None:
    """Return the CUDA compute capability of a GPU by its name; None for unknown and other vendors' GPUs."""
    return next((number for pattern, number in CAPABILITIES if re.search(pattern, name, re.IGNORECASE)), None)


def has_bf16(name: str) -> bool:
    """Return whether a device is known to have bf16 matmuls."""
    return _find_peak(name).bf16 is not None


def _find_peak(name: str) -> DevicePeak:
    if re.search(r"\bMIG\b", name):
        return UNKNOWN
    return next((peak for peak in PEAKS if re.search(peak.pattern, name.strip(), re.IGNORECASE)), UNKNOWN)
