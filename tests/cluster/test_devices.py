"""Detection on machines simulated through a `Probe`; only the last test depends on the real machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.cluster import devices
from titan.cluster.devices import Machine, detect_machine
from titan.cluster.gpus import GpuSearch, Probe
from titan.cluster.known_devices import PEAKS, look_up_peak_tflops
from titan.errors import ConfigError

CUDA_TORCH = "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
HIP_TORCH = "cuda: Optional[str] = None\nhip: Optional[str] = '7.0.1'\n"
CPU_TORCH = "cuda: Optional[str] = None\nhip: Optional[str] = None\n"
GIB = 1024**3

Runner = Callable[[Sequence[str]], str | None]


def h100s(count: int, name: str = "NVIDIA H100 80GB HBM3", mebibytes: str = "81559", capability: str = "9.0") -> str:
    return "".join(f"GPU-{i}{i}aa-bb, {name}, {mebibytes}, {capability}\n" for i in range(count))


def prints(**outputs: str) -> Runner:
    """Return a runner with these programs' outputs; underscores in a key stand for dashes."""
    known = {key.replace("_", "-"): text for key, text in outputs.items()}
    return lambda arguments: known.get(arguments[0])


NO_PROGRAMS = prints()


def probe(root: Path, run: Runner = NO_PROGRAMS, torch: str = CUDA_TORCH, **environ: str) -> Probe:
    return Probe(
        root=root,
        environ=environ,
        run=run,
        torch_version=torch,
        cores=16,
        physical_bytes=64 * GIB,
        architecture="x",
    )


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def driver_files(count: int, model: str = "NVIDIA A100-SXM4-80GB") -> dict[str, str]:
    files: dict[str, str] = {}
    for i in range(count):
        facts = f"Model: \t\t {model}\nGPU UUID: \t GPU-{i}{i}aa\nDevice Minor: \t {i}\n"
        files |= {f"proc/driver/nvidia/gpus/0000:0{i}:00.0/information": facts, f"dev/nvidia{i}": ""}
    return files


def test_eight_h100(tmp_path: Path) -> None:
    machine = detect_machine("auto", probe(tmp_path, prints(nvidia_smi=h100s(8))))
    assert (machine.device, machine.name, machine.count, machine.cores) == ("cuda", "NVIDIA H100 80GB HBM3", 8, 16)
    assert machine.memory_gib == pytest.approx(79.65, abs=0.01)
    assert machine.bf16_fast
    assert machine.describe() == "8 x NVIDIA H100 80GB HBM3, 79.6 GiB each, bf16, 16 CPU cores"


def test_volta_has_no_fast_bf16(tmp_path: Path) -> None:
    run = prints(nvidia_smi=h100s(2, "Tesla V100-SXM2-16GB", "16384", "7.0"))
    assert not detect_machine("cuda", probe(tmp_path, run)).bf16_fast


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        pytest.param("2,3", 2, id="indices"),
        pytest.param(" 0 , 7", 2, id="spaces"),
        pytest.param("0,2,-1,1", 2, id="what-follows-an-invalid-index-is-invisible"),
        pytest.param("1,8,2", 1, id="index-too-large"),
        pytest.param("GPU-33aa-bb,GPU-5", 2, id="uuids-whole-and-abbreviated"),
        pytest.param("GPU-", 0, id="ambiguous-uuid"),
        pytest.param("", 0, id="empty"),
        pytest.param("-1", 0, id="minus-one"),
        pytest.param("NoDevFiles", 0, id="slurm-without-gpus"),
    ],
)
def test_visible_devices(tmp_path: Path, mask: str, count: int) -> None:
    simulated = probe(tmp_path, prints(nvidia_smi=h100s(8)), CUDA_VISIBLE_DEVICES=mask)
    machine = detect_machine("auto", simulated)
    assert (machine.device, machine.count) == (("cuda", count) if count else ("cpu", 1))
    if not count:
        assert "8 x NVIDIA H100 80GB HBM3 not used: CUDA_VISIBLE_DEVICES=" in machine.note
        with pytest.raises(ConfigError, match=r"^cluster.device=cuda: .*CUDA_VISIBLE_DEVICES=.*cluster.device=cpu\.$"):
            detect_machine("cuda", simulated)


@given(order=st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
def test_the_first_visible_gpu_names_the_machine(order: list[int]) -> None:
    lines = "".join(f"GPU-{i}, GPU number {i}, {1024 * (i + 1)}, 9.0\n" for i in range(8))
    simulated = probe(Path("/nowhere"), prints(nvidia_smi=lines), CUDA_VISIBLE_DEVICES=",".join(map(str, order)))
    machine = detect_machine("auto", simulated)
    assert (machine.name, machine.count) == (f"GPU number {order[0]}", len(order))
    assert machine.memory_gib == min(order) + 1  # the smallest decides what fits


def test_a_mig_slice_is_one_small_device(tmp_path: Path) -> None:
    listing = (
        "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-00aa)\n"
        "  MIG 3g.40gb     Device  0: (UUID: MIG-first)\n"
        "  MIG 1g.10gb     Device  1: (UUID: MIG-second)\n"
    )

    def run(arguments: Sequence[str]) -> str | None:
        return listing if arguments[1] == "-L" else h100s(1, "NVIDIA A100-SXM4-80GB", "81920", "8.0")

    machine = detect_machine("auto", probe(tmp_path, run, CUDA_VISIBLE_DEVICES="MIG-second,MIG-first"))
    assert (machine.count, machine.name) == (1, "NVIDIA A100-SXM4-80GB MIG 1g.10gb")
    assert machine.memory_gib == 10
    assert look_up_peak_tflops(machine.name, "bf16") is None


def test_unified_memory_is_taken_from_the_table(tmp_path: Path) -> None:
    machine = detect_machine("auto", probe(tmp_path, prints(nvidia_smi=h100s(1, "NVIDIA GH200 480GB", "[N/A]"))))
    assert machine.memory_gib == 94


@pytest.mark.parametrize("output", [None, "", "NVIDIA-SMI has failed because it couldn't communicate\n"])
def test_without_nvidia_smi_the_drivers_files_are_read(tmp_path: Path, output: str | None) -> None:
    write(tmp_path, driver_files(4))
    machine = detect_machine("auto", probe(tmp_path, lambda _: output, CUDA_VISIBLE_DEVICES="2,3"))
    assert (machine.device, machine.name, machine.count) == ("cuda", "NVIDIA A100-SXM4-80GB", 2)
    assert (machine.memory_gib, machine.bf16_fast) == (79, True)


def test_a_container_without_gpus_sees_the_hosts_driver_folder(tmp_path: Path) -> None:
    write(tmp_path, {k: v for k, v in driver_files(4).items() if not k.startswith("dev")})
    assert detect_machine("auto", probe(tmp_path)).device == "cpu"


def test_cpu_torch_on_a_gpu_machine(tmp_path: Path) -> None:
    write(tmp_path, driver_files(2))
    simulated = probe(tmp_path, prints(nvidia_smi=h100s(2)), torch=CPU_TORCH)
    machine = detect_machine("auto", simulated)
    assert machine.device == "cpu"
    assert machine.describe().endswith(
        "(2 x NVIDIA A100-SXM4-80GB not used: the installed torch is built for the CPU only)"
    )
    with pytest.raises(ConfigError, match=r"built for the CPU only; install a GPU build of torch, or use cluster"):
        detect_machine("cuda", simulated)


def test_no_gpu_is_an_error_only_when_one_is_requested(tmp_path: Path) -> None:
    assert detect_machine("auto", probe(tmp_path)).note == ""
    with pytest.raises(ConfigError, match=r"^cluster.device=cuda: this machine's driver tools show no GPU; "):
        detect_machine("cuda", probe(tmp_path))


def test_a_command_without_launchers_names_its_own_setting(tmp_path: Path) -> None:
    sentence = r"^device=cuda: this machine's driver tools show no GPU; check that .* lists one, or use device=cpu\.$"
    with pytest.raises(ConfigError, match=sentence):
        detect_machine("cuda", probe(tmp_path), setting="device")


def test_cpu_runs_no_gpu_program(tmp_path: Path) -> None:
    assert detect_machine("cpu", probe(tmp_path, never)).device == "cpu"


def never(arguments: Sequence[str]) -> str | None:
    raise AssertionError(arguments)


def rocm(**more: Any) -> str:
    card = {"Card Series": "AMD Instinct MI300X OAM", "VRAM Total Memory (B)": str(192 * GIB)} | more
    cards = {f"card{i}": card | {"Unique ID": f"0xabc{i}"} for i in (10, 9, 2, 1)}
    return json.dumps(cards | {"system": {"Driver version": "6.10"}})


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        pytest.param({}, 4, id="all"),
        pytest.param({"HIP_VISIBLE_DEVICES": "0,1"}, 2, id="hip"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "3"}, 1, id="cuda"),
        pytest.param({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "0,1,2"}, 2, id="hip-counts-after-rocr"),
        pytest.param({"ROCR_VISIBLE_DEVICES": "GPU-abc9"}, 1, id="rocr-uuid"),
    ],
)
def test_rocm(tmp_path: Path, environ: dict[str, str], count: int) -> None:
    machine = detect_machine("auto", probe(tmp_path, prints(rocm_smi=rocm()), HIP_TORCH, **environ))
    assert (machine.device, machine.name, machine.count) == ("cuda", "AMD Instinct MI300X OAM", count)
    assert (machine.memory_gib, machine.bf16_fast) == (192, True)


@pytest.mark.parametrize("output", ["", "not json", "{}"])
def test_rocm_smi_without_gpus_is_the_cpu(tmp_path: Path, output: str) -> None:
    assert detect_machine("auto", probe(tmp_path, prints(rocm_smi=output), HIP_TORCH)).device == "cpu"


V1, V2 = "4:memory:/job/x\n3:cpu,cpuacct:/job\n0::/\n", "0::/slice/job\n"


@pytest.mark.parametrize(
    ("files", "gib", "cores"),
    [
        pytest.param({}, 64, 16, id="no-proc"),
        pytest.param({"proc/self/cgroup": V2, "sys/fs/cgroup/slice/job/memory.max": "max\n"}, 64, 16, id="v2-max"),
        pytest.param(
            {"proc/self/cgroup": V2, "sys/fs/cgroup/slice/memory.max": f"{8 * GIB}\n"}, 8, 16, id="v2-group-above"
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{8 * GIB}"}, 8, 16, id="v2-container"
        ),
        pytest.param({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 64, 2, id="v2-cores"),
        pytest.param({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64, 16, id="v2-all-cores"),
        pytest.param(
            {"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "20000 100000\n"}, 64, 1, id="v2-part-of-a-core"
        ),
        pytest.param(
            {"proc/self/cgroup": V1, "sys/fs/cgroup/memory/job/x/memory.limit_in_bytes": f"{4 * GIB}\n"}, 4, 16, id="v1"
        ),
        pytest.param(
            {"proc/self/cgroup": V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
            64,
            16,
            id="v1-no-limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            64,
            4,
            id="v1-cores",
        ),
    ],
)
def test_control_groups(tmp_path: Path, files: dict[str, str], gib: float, cores: int) -> None:
    write(tmp_path, files)
    machine = detect_machine("cpu", probe(tmp_path))
    assert (machine.memory_gib, machine.cores) == (gib, cores)


@pytest.mark.parametrize(
    ("cpuinfo", "name", "fast"),
    [
        pytest.param("model name\t: AMD EPYC 9654\nflags\t\t: avx2 avx512_bf16\n", "AMD EPYC 9654", True, id="zen4"),
        pytest.param("model name\t: Xeon\nflags\t\t: fpu amx_bf16\n", "Xeon", True, id="amx"),
        pytest.param("model name\t: Old\nflags\t\t: fpu avx2 avx512f\n", "Old", False, id="avx2"),
        pytest.param("processor\t: 0\nFeatures\t: fp asimd bf16\n", "x CPU", True, id="arm"),
        pytest.param("", "x CPU", False, id="no-proc"),
    ],
)
def test_cpu(tmp_path: Path, cpuinfo: str, name: str, fast: bool) -> None:
    if cpuinfo:
        write(tmp_path, {"proc/cpuinfo": cpuinfo})
    machine = detect_machine("auto", probe(tmp_path, torch=CPU_TORCH))
    assert machine == Machine("cpu", name, 1, 16, 64, fast)


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        pytest.param("NVIDIA H100 80GB HBM3", 989, 67, id="h100-sxm"),
        pytest.param("NVIDIA H100 PCIe", 756, 51, id="h100-pcie"),
        pytest.param("NVIDIA H100 NVL", 835, 60, id="h100-nvl"),
        pytest.param("NVIDIA GH200 480GB", 989, 67, id="gh200"),
        pytest.param("NVIDIA A100 80GB PCIe", 312, 19.5, id="a100-pcie"),
        pytest.param("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None, id="mig"),
        pytest.param("NVIDIA A10G", 70, 31.2, id="a10g"),
        pytest.param("NVIDIA L40", 181, 90.5, id="l40"),
        pytest.param("NVIDIA GeForce RTX 4090", 165.2, 82.6, id="rtx4090"),
        pytest.param("NVIDIA GeForce RTX 4090 Laptop GPU", None, None, id="rtx4090-laptop-is-another-chip"),
        pytest.param("NVIDIA GeForce RTX 3090 Ti", None, None, id="rtx3090ti"),
        pytest.param("Tesla V100-SXM2-32GB", None, 15.7, id="v100"),
        pytest.param("AMD Instinct MI300X OAM", 1307.4, 163.4, id="mi300x"),
        pytest.param("AMD INSTINCT MI250X", 191.5, 47.9, id="mi250x-one-die"),
        pytest.param("AMD EPYC 9654 96-Core Processor", None, None, id="cpu"),
    ],
)
def test_peaks(name: str, bf16: float | None, fp32: float | None) -> None:
    assert (look_up_peak_tflops(name, "bf16"), look_up_peak_tflops(name, "fp32")) == (bf16, fp32)


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: row.pattern)
def test_peaks_are_plausible(row: Any) -> None:
    assert row.memory_gib > 0 and row.fp32 > 0
    assert row.bf16 is None or 1.5 < row.bf16 / row.fp32 < 40


def test_without_any_gpu_the_first_advice_is_not_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        devices, "find_gpus", lambda probe: GpuSearch([], [], "it is for the CPU only", "install torch")
    )
    with pytest.raises(
        ConfigError, match=r"only; send it to GPU nodes with hydra/launcher=slurm, .* or install torch\."
    ):
        detect_machine("cuda")


@pytest.mark.full
def test_the_real_machine_without_torch() -> None:
    """detect() works here and imports no torch; a program that fails or is missing gives None."""
    code = (
        "import sys; from titan.cluster.devices import detect_machine; m = detect_machine('cpu');"
        "from titan.cluster.gpus import run_program;"
        "assert m.cores >= 1 and m.memory_gib > 0, m; assert 'torch' not in sys.modules;"
        "assert run_program(['no-such-program-here']) is None and run_program(['false']) is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
