"""Memory estimates on a CPU, traced and measured peaks: `python -m tests.measure.measured_memory [NAME ...]`.

Each case is a separate short run, started as a user would. The measured peak is the largest resident set of any rank.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.support.composing import compose_test_run
from titan.estimate import fit, memory

FEW = ("training.steps=4", "metrics.plot=false")
MANY = "training.steps=40"
"""Of experts in bf16: after so many steps the kernels' cache is full."""
SMALL = ("model.dim=512", "model.layers=8", "model.heads=8", "model.kv_heads=4", "model.ffn=1408", "model.vocab=8192")
M125 = (
    "model.dim=768",
    "model.layers=12",
    "model.heads=12",
    "model.kv_heads=12",
    "model.ffn=2048",
    "model.vocab=32000",
)
ROWS = ("training.seq_len=512", "training.global_batch=2048")
MIDDLE = (
    "model.dim=384", "model.layers=10", "model.heads=6", "model.kv_heads=2", "model.ffn=1024", "model.vocab=16000",
    "training.seq_len=1024", "training.global_batch=8192",
)  # fmt: skip
LONG = ("training.seq_len=2048", "training.global_batch=8192")
M87 = (
    "model.dim=768", "model.layers=6", "model.heads=12", "model.kv_heads=4", "model.ffn=2048", "model.vocab=32000",
    "training.seq_len=256", "training.global_batch=1024", "compile=off",
)  # fmt: skip
M30 = (*SMALL, *ROWS, "compile=off")
FP32, FSDP = "precision=fp32", "parallelism=fsdp"
EXPERT_ROWS = ("training.seq_len=256", "training.global_batch=4096", "compile=off")
QWEN3 = (
    "model=qwen3_moe_debug", "model.dim=384", "model.layers=6", "model.heads=6", "model.kv_heads=2",
    "model.expert_ffn=384", "model.vocab=8192", *EXPERT_ROWS,
)  # fmt: skip
DEEPSEEK = (
    "model=deepseek_v3_debug", "model.dim=384", "model.layers=6", "model.heads=6", "model.kv_heads=6",
    "model.expert_ffn=384", "model.ffn=1024", "model.vocab=8192", *EXPERT_ROWS,
)  # fmt: skip
PIPELINED = (*M30, "precision=bf16", "parallelism.microbatches=8", "training.global_batch=8192")
INTERLEAVED = (*PIPELINED, "parallelism=fsdp_pp", "parallelism.schedule=Interleaved1F1B", "parallelism.stages=8")
CASES: dict[str, tuple[str, ...]] = {
    "87M fp32 fsdp": (*M87, FP32, FSDP),
    "87M fp32 fsdp, 2 micro-batches": (
        *M87,
        FP32,
        FSDP,
        "parallelism.microbatches=2",
        "parallelism.accumulate=whole",
    ),
    "87M fsdp": (*M87, FSDP),
    "87M fp32": (*M87, FP32),
    "87M fsdp kept muon": (*M87, FSDP, "parallelism.reshard=never", "optimizer=muon"),
    "87M documents": (*M87, "dataset.mask_documents=true"),
    "87M fp32 tp": (*M87, FP32, "parallelism=tp"),
    "87M fp32 pp": (*M87, FP32, "parallelism=pp"),
    "30M fp32 ddp sgd": (*M30, FP32, "parallelism=ddp", "optimizer=sgd"),
    "30M cp documents": (*M30, "parallelism=cp", "dataset.mask_documents=true"),
    "30M fp32 fsdp full": (*M30, FP32, FSDP, "memory=full"),
    "30M selective": (*M30, "memory=selective"),
    "30M fp32 fsdp block": (*SMALL, *ROWS, FP32, FSDP, "compile=block"),
    "30M model": (*SMALL, *ROWS, "compile=model"),
    "30M fsdp async": (*M30, FSDP, "checkpoint=async", "checkpoint.every=2"),
    "debug": (),
    "fp32": ("precision=fp32",),
    "ddp": ("parallelism=ddp",),
    "fsdp": ("parallelism=fsdp",),
    "tp": ("parallelism=tp",),
    "pp": ("parallelism=pp",),
    "cp": ("parallelism=cp",),
    "fsdp_tp": ("parallelism=fsdp_tp",),
    "vocab 32k": ("model.vocab=32000", "training.global_batch=4096"),
    "vocab 32k, chunks": ("model.vocab=32000", "training.global_batch=4096", "training.loss_chunk=512"),
    "vocab 32k tp": ("model.vocab=32000", "training.global_batch=4096", "parallelism=tp"),
    "rows of 2048": LONG,
    "rows of 2048, full": (*LONG, "memory=full"),
    "rows of 2048, selective": (*LONG, "memory=selective"),
    "rows of 2048 fp32": (*LONG, "precision=fp32"),
    "rows of 2048 fsdp": (*LONG, "parallelism=fsdp"),
    "rows of 2048 tp": (*LONG, "parallelism=tp"),
    "rows of 2048 pp": (*LONG, "parallelism=pp"),
    "vocab 16k pp": (*MIDDLE, "parallelism=pp", "compile=off"),
    "vocab 16k pp compiled": (*MIDDLE, "parallelism=pp", "compile=block"),
    "30M": (*SMALL, *ROWS),
    "30M fsdp, 2 micro-batches": (*SMALL, *ROWS, "parallelism=fsdp", "parallelism.microbatches=2"),
    "30M 3d": (*SMALL, *ROWS, "parallelism=3d"),
    "125M": (*M125, *ROWS),
    "125M fp32": (*M125, *ROWS, "precision=fp32"),
    "125M fsdp": (*M125, *ROWS, "parallelism=fsdp"),
    "125M ddp": (*M125, *ROWS, "parallelism=ddp"),
    "125M tp": (*M125, *ROWS, "parallelism=tp"),
    "125M pp": (*M125, *ROWS, "parallelism=pp"),
    "125M average": (*M125, *ROWS, "evaluation=ema"),
    "125M fsdp average": (*M125, *ROWS, "parallelism=fsdp", "evaluation=ema"),
    "125M async": (*M125, *ROWS, "checkpoint=async", "checkpoint.every=2"),
    "qwen3_moe": (*QWEN3, MANY),
    "qwen3_moe fp32": (*QWEN3, FP32),
    "qwen3_moe fp32 full": (*QWEN3, FP32, "memory=full"),
    "qwen3_moe fsdp": (*QWEN3, FSDP, MANY),
    "qwen3_moe fp32 ep": (*QWEN3, FP32, "parallelism=ep"),
    "qwen3_moe ep": (*QWEN3, "parallelism=ep", MANY),
    "qwen3_moe ep of 4": (*QWEN3, "parallelism=ep", "cluster.devices=4", MANY),
    "deepseek_v3": (*DEEPSEEK, MANY),
    "deepseek_v3 fp32 fsdp": (*DEEPSEEK, FP32, FSDP),
    "deepseek_v3 ep": (*DEEPSEEK, "parallelism=ep", MANY),
    "qwen3_moe of 8192 tokens": (*QWEN3, "training.seq_len=512", "training.global_batch=8192", MANY),
    "qwen3_moe_debug": ("model=qwen3_moe_debug", "compile=off", MANY),
    "qwen3_moe of 16 ep": (
        "model=qwen3_moe_debug",
        "model.experts=16",
        "model.top_k=4",
        "model.dim=512",
        "model.heads=8",
        *EXPERT_ROWS,
        "parallelism=ep",
        MANY,
    ),
    "deepseek_v3 fp32 selective": (*DEEPSEEK, FP32, "memory=selective"),
    "87M fsdp of 4": (*M87, FSDP, "cluster.devices=4"),
    "30M pp": (*PIPELINED, "parallelism=pp"),
    "30M interleaved": INTERLEAVED,
    "30M interleaved, gradients in bf16": (*INTERLEAVED, "precision.accumulate=bf16"),
    "30M zbv": (*PIPELINED, "parallelism=fsdp_pp", "parallelism.schedule=ZBVZeroBubble"),
}


def measure_resident(overrides: tuple[str, ...], folder: Path) -> float:
    """Return the largest resident set of any rank of a run, in bytes.

    Raises:
        RuntimeError: if the run fails.
    """
    command = [sys.executable, "-m", "titan.train", *list_words(overrides)]
    run = subprocess.Popen([*command, f"hydra.run.dir={folder}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    most: dict[int, int] = {}
    while run.poll() is None:
        for pid in _list_processes(run.pid):
            most[pid] = max(most.get(pid, 0), _read_peak(pid))
        time.sleep(0.05)
    if run.returncode:
        raise RuntimeError((run.stderr.read() if run.stderr else b"").decode()[-500:])
    return max(most.values())


def list_words(overrides: tuple[str, ...]) -> list[str]:
    """Return a case's command line: its own words replace those that all cases have."""
    keys = {word.partition("=")[0] for word in overrides}
    common = ("model=debug", "dataset=synthetic", *FEW)
    return [*(word for word in common if word.partition("=")[0] not in keys), *overrides]


def _list_processes(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]


def _read_peak(pid: int) -> int:
    """Return the peak resident set, which psutil does not report on Linux."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def main(names: list[str]) -> None:
    """Print one row per case."""
    from tests.estimate.test_memory import traced

    print(f"{'case':<28} {'live':>8} {'traced':>8} {'estimate':>8} {'measured':>9}  MiB, and the estimate's error")
    for name, overrides in CASES.items():
        if names and name not in names:
            continue
        run = compose_test_run(list_words(overrides))
        live = memory.estimate_peaks(run, run.layout, run.microbatches, "cpu")
        fullest = max(range(len(live)), key=lambda rank: live[rank].bytes)
        rank = fullest * (run.layout.devices // run.layout.pipeline)
        trace = 0 if run.compile.scope != "off" else traced(run, rank).bytes  # compiled graphs can't be traced
        estimate = fit.estimate_memory(run, run.layout, run.microbatches, "cpu").bytes
        with tempfile.TemporaryDirectory() as folder:
            measured = measure_resident(overrides, Path(folder) / "run")
        figures = (live[fullest].bytes, trace, estimate, measured)
        print(f"{name:<28} " + " ".join(f"{figure / 2**20:8.0f}" for figure in figures), end=" ")
        print(f" {estimate / measured - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
