"""The parts of the acceptance suite: each is a question to the device, and the runs that answer it. Free of torch."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from titan.bench.acceptance.lab import Findings, Lab, TrainedRun
from titan.errors import ConfigError
from titan.run import prediction

CLOSE = 1e-4
"""Largest relative difference of fp32 losses between devices and layouts."""
HOOKS = "titan.bench.acceptance.disturbances"
LARGE = (
    "model=llama1b", "dataset=synthetic", "training.seq_len=4096", "training.global_batch=16384", "training.steps=12",
    "precision=bf16", "memory=selective", "compile=block", "checkpoint=off", "evaluation.tokens=0",
    "metrics.plot=false", "metrics.sample_tokens=0",
)  # fmt: skip
"""A run that a GPU is busy with."""
REQUIRED_KERNELS = {"cpu": ("math fp32", "math bf16"), "cuda": ("math fp32", "math bf16", "flash bf16", "flex bf16")}
"""Kernels that titan needs on a device; others may be refused for a type or a GPU."""
EXPERTS = ("model=qwen3_moe_debug",)
LAYOUTS = ("fsdp", "ddp", "tp", "cp", "pp", "ep")
"""Layouts of two devices."""
MOST_MEMORY_ERROR, MOST_TIME_FACTOR = 0.15, 2.0
"""How far a prediction may be from what is measured: a fraction of the memory, and a factor of the time."""
MOST_SAVE_FACTOR = 1.1
"""How much longer a step may take beside an asynchronous save; on a CPU both need its cores."""
SHORTEST_JUDGED_STEP = 0.1
"""Seconds of a step below which that is not judged: a step of some milliseconds waits for the host's threads."""


@dataclass(frozen=True)
class AcceptancePart:
    """A part of the suite.

    Attributes:
        name: in files.
        question: what it answers.
        check: runs what is needed.
        minutes: what it takes on a GPU, about.
    """

    name: str
    question: str
    check: Callable[[Lab], Findings]
    minutes: float


def check_losses(lab: Lab) -> Findings:
    """Train in fp32 on the CPU, and from its first checkpoint on the device: devices draw other initial weights."""
    findings = Findings()
    settings, start = ("precision=fp32", "compile=off"), 1
    on_cpu = ("cluster.device=cpu", "cluster=cpu", "checkpoint=sync", "checkpoint.every=0", f"checkpoint.at=[{start}]")
    cpu_run = lab.train("losses-cpu", *settings, *on_cpu)
    device_run = lab.train("losses-device", *settings, f"checkpoint.resume={cpu_run.folder}/checkpoints/step-{start}")
    _require_success(findings, cpu_run, device_run)
    findings.figures["relative_difference"] = _compare_losses(findings, cpu_run.select_after(start), device_run)
    return findings


def check_attention(lab: Lab) -> Findings:
    """Compute each attention kernel on the device and in fp32 on the CPU."""
    from titan.bench.acceptance.kernels import NO_TRITON, ROUNDING

    findings = Findings()
    code, output = lab.run("attention", ["-m", "titan.bench.acceptance.kernels", lab.device])
    findings.require(code == 0, f"the comparison of kernels ended with exit code {code}")
    for line in (json.loads(line) for line in output.splitlines() if line.startswith("{")):
        name = f"{line['kernel']} {line['type']}"
        findings.figures[name] = line.get("error", line.get("refused"))
        error, tolerance = line.get("error", 0.0), ROUNDING[line["type"]]
        findings.require(
            error <= tolerance, f"{name} differs from fp32 on the CPU by {error:.1e}, more than {tolerance:g}"
        )
    for name in REQUIRED_KERNELS[lab.device]:
        is_computed = isinstance(findings.figures.get(name), float) or findings.figures.get(name) == NO_TRITON
        findings.require(is_computed, f"{name} was not computed: {findings.figures.get(name)}")
    return findings


def check_prediction(lab: Lab) -> Findings:
    """Train the 1B model, and compare memory and step time with the run's own prediction."""
    findings = Findings()
    cluster_settings = (f"cluster={lab.cluster}", "cluster.devices=1") if lab.cluster else ()
    run = lab.train(
        "predicted", *(LARGE if lab.device == "cuda" else ()), *cluster_settings, small=lab.device != "cuda"
    )
    _require_success(findings, run)
    if run.code:
        return findings
    findings.figures |= {"step_seconds": run.step_seconds, "memory_gib": run.memory_gib}
    run_prediction = _read_prediction(run.folder)
    if run_prediction is None:
        findings.figures["prediction"] = "none: the hardware is not described"
        findings.require(lab.device != "cuda", "no cluster describes this GPU for a prediction; run titan.calibrate")
        return findings
    seconds, memory = run_prediction.step_seconds.value, run_prediction.rank0_memory_gib.value
    findings.figures |= {"predicted_step_seconds": seconds, "predicted_memory_gib": memory}
    error, factor = abs(memory / run.memory_gib - 1), max(seconds / run.step_seconds, run.step_seconds / seconds)
    findings.require(error <= MOST_MEMORY_ERROR, f"{memory:.1f} GiB are predicted, {run.memory_gib:.1f} GiB measured")
    findings.require(
        factor <= MOST_TIME_FACTOR, f"{seconds:.2f} s per step are predicted, {run.step_seconds:.2f} measured"
    )
    return findings


def _read_prediction(folder: Path) -> prediction.Prediction | None:
    documents = [document for document in yaml.safe_load_all((folder / "run.yaml").read_text()) if document]
    return next(filter(None, map(prediction.parse_document, reversed(documents))), None)


def check_experts(lab: Lab) -> Findings:
    """Train a model with experts in bf16 and in fp32."""
    findings = Findings()
    runs = [lab.train(f"experts-{precision}", *EXPERTS, f"precision={precision}") for precision in ("fp32", "bf16")]
    _require_success(findings, *runs)
    findings.figures |= {"loss fp32": runs[0].losses[-1:], "loss bf16": runs[1].losses[-1:]}
    if all(run.losses for run in runs):
        difference = abs(runs[0].losses[-1] / runs[1].losses[-1] - 1)
        findings.require(difference < 0.02, f"the losses in bf16 and fp32 differ by {difference:.1%}")
    return findings


def check_standstill(lab: Lab) -> Findings:
    """Let the only rank sleep in a step: the run says so, and goes on."""
    findings = Findings()
    # a fast device ends the run before the watcher looks again, unless another step takes a while
    disturbed = [
        *_build_hook_overrides("StandStill", step=4, seconds=8),
        *_build_hook_overrides("StandStill", step=5, key="rest", seconds=0.8),
    ]
    run = lab.train("stands-still", *disturbed, "debug.hang_seconds=2")
    _require_success(findings, run)
    messages = re.findall(r"no step for .*", run.output)
    findings.figures["said"] = messages[:1]
    findings.require(bool(messages), "nothing was said about a step that stood still")
    findings.require("the run continues" in run.output, "nothing was said when the run went on")
    return findings


def check_not_finite(lab: Lab) -> Findings:
    """Make a gradient NaN: the step changes no weight, is reported, and the run goes on."""
    findings = Findings()
    run = lab.train("not-finite", *_build_hook_overrides("NotFinite", step=3))
    _require_success(findings, run)
    marked = [line["step"] for line in run.steps if line.get("not_finite")]
    findings.figures["marked steps"] = marked
    findings.require(marked == [3], f"steps {marked} are marked as not finite, and not step 3 alone")
    return findings


def check_out_of_memory(lab: Lab) -> Findings:
    """Fill the device's memory: one sentence, exit code 1, a snapshot."""
    if lab.device != "cuda":
        return Findings(skipped="a CPU ends a process that takes too much memory")
    findings = Findings()
    run = lab.train("out-of-memory", *_build_hook_overrides("OutOfMemory", step=3))
    findings.figures["said"] = run.find_last_line()
    findings.require(run.code == 1, f"the exit code is {run.code}, not 1")
    findings.require("out of memory" in run.output, "the message does not say that memory is out")
    findings.require(
        (run.folder / "debug" / "out-of-memory-rank-0.pickle").is_file(), "there is no snapshot of the memory"
    )
    return findings


def check_saves(lab: Lab) -> Findings:
    """Save asynchronously in the middle, compare the steps meanwhile with those of a run without saves, and resume."""
    findings = Findings()
    is_large, middle = lab.device == "cuda", 6
    settings = (*(LARGE if is_large else ()), "training.steps=12", "debug.deterministic=true")
    baseline = lab.train("saves-off", *settings, small=not is_large)
    saving_settings = (*settings, "checkpoint=async", f"checkpoint.every={middle}")
    saving = lab.train("saves-async", *saving_settings, small=not is_large)
    source = f"checkpoint.resume={saving.folder}/checkpoints/step-{middle}"
    resumed = lab.train("saves-resumed", *settings, source, small=not is_large)
    _require_success(findings, baseline, saving, resumed)
    findings.figures["loss differs by"] = _compare_losses(findings, baseline, saving, tolerance=0.0)
    findings.figures["loss differs after a resume by"] = _compare_losses(
        findings, baseline.select_after(middle), resumed, tolerance=0.0
    )
    times = baseline.select_after(middle).median_seconds, saving.select_after(middle).median_seconds
    findings.figures |= {"step_seconds": times[0], "step_seconds beside a save": times[1]}
    is_judged = is_large and times[0] >= SHORTEST_JUDGED_STEP
    findings.require(
        not is_judged or times[1] <= MOST_SAVE_FACTOR * times[0],
        f"a step beside a save takes {times[1]:.2f} s, without one {times[0]:.2f} s",
    )
    for run in (saving, resumed):
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # tens of GB
    return findings


def check_preemption(lab: Lab) -> Findings:
    """Stop a run with SIGTERM and start it again: the losses are those of a run that was not stopped."""
    findings = Findings()
    settings = (
        "training.steps=40", "checkpoint=async", "checkpoint.every=1000", "precision=fp32", "debug.deterministic=true"
    )  # fmt: skip
    uninterrupted = lab.train("preemption-whole", *settings)
    attempts = [lab.train("preemption", *settings, stop_after=5), lab.train("preemption", *settings)]
    findings.figures["exit codes"] = [run.code for run in attempts]
    findings.require(attempts[0].code in (75, 130), f"SIGTERM ended the run with exit code {attempts[0].code}")
    _require_success(findings, uninterrupted, attempts[1])
    findings.figures["loss differs by"] = _compare_losses(findings, uninterrupted, attempts[1], tolerance=0.0)
    return findings


def check_profiles(lab: Lab) -> Findings:
    """Profile steps with memory."""
    findings = Findings()
    run = lab.train("profile", "profile=memory", "profile.wait=1", "training.steps=6")
    _require_success(findings, run)
    written = sorted(path.name for path in (run.folder / "profile").glob("step-*"))
    findings.figures["written"] = written
    findings.require(bool(written), "no profile was written")
    return findings


def measure_speeds(lab: Lab) -> Findings:
    """Run the suite of speeds, with the search for host waits."""
    findings = Findings()
    file = lab.folder / "speeds.json"
    suite = ["suite=gpu", "case=llama1b"] if lab.device == "cuda" else ["suite=tiny", "case=fp32, compile off"]
    command = ["-m", "titan.bench", *suite, "rounds=3", f"to={file}", *lab.overrides]
    code, output = lab.run("speeds", command, seconds=900)
    findings.require(code == 0, f"the suite of speeds ended with exit code {code}: {output.strip().splitlines()[-1:]}")
    content = json.loads(file.read_text()) if file.is_file() else {}
    for row in content.get("speed", []):
        findings.figures[row["title"]] = {name: row.get(name) for name in ("ratio", "titan", "bare", "mfu")}
        findings.require(not row.get("failure"), f"{row['title']}: {row.get('failure')}")
    for title, sync in content.get("host_sync", {}).items():
        findings.require(not sync["location"], f"{title}: a step waits for the device at {sync['location']}")
    findings.require(bool(findings.figures), "no speed was measured")
    return findings


def check_layouts(lab: Lab) -> Findings:
    """Train on two devices in each layout, and compare with one."""
    if lab.devices < 2:
        return Findings(skipped="one device")
    findings = Findings()
    single_runs = {
        model: lab.train(f"layouts-one-{n}", *model, "precision=fp32") for n, model in enumerate(((), EXPERTS))
    }
    for layout in LAYOUTS:
        model = EXPERTS if layout == "ep" else ()
        layout_run = lab.train(
            f"layouts-{layout}", *model, f"parallelism={layout}", "cluster.devices=2", "precision=fp32"
        )
        _require_success(findings, single_runs[model], layout_run)
        findings.figures[layout] = _compare_losses(findings, single_runs[model], layout_run, name=layout)
    return findings


def check_hang(lab: Lab) -> Findings:
    """Let one of two ranks sleep: it is named, and the Flight Recorder's dumps are kept."""
    if lab.devices < 2:
        return Findings(skipped="one device")
    findings = Findings()
    limits = ("debug.hang_seconds=4", "cluster.step_timeout=16", "cluster.timeout=60", "training.steps=1000")
    run = lab.train(
        "hang",
        "parallelism=fsdp",
        "cluster.devices=2",
        *_build_hook_overrides("StandStill", 6, rank=1, seconds=120),
        *limits,
    )
    messages = re.findall(r"no step for .*", run.output)
    findings.figures["said"] = messages[-1:]
    findings.require(run.code == 1, f"the exit code is {run.code}, not 1")
    findings.require(bool(messages) and "waiting for rank 1 " in messages[-1], f"rank 1 is not named: {messages[-1:]}")
    dumps = run.folder / "debug" / "flight_recorder"
    findings.require(any(dumps.glob("rank_*")), "there is no dump of the Flight Recorder")
    if dumps.is_dir():
        shutil.copytree(dumps, lab.folder / "flight_recorder", dirs_exist_ok=True)
    return findings


def check_recorder(lab: Lab) -> Findings:
    """Read the Flight Recorder of one rank, on a GPU while a collective waits for a kernel; its content is kept."""
    findings = Findings()
    file = lab.folder / "flight_recorder" / f"{lab.device}-one-rank"
    code, output = lab.run("recorder", ["-m", "titan.bench.acceptance.recorder", lab.device, str(file)])
    recorder_state: dict[str, Any] = next(
        (json.loads(line) for line in output.splitlines() if line.startswith("{")), {}
    )
    findings.figures |= recorder_state
    findings.require(code == 0, f"the recorder was not read: exit code {code}")
    last = 4 if lab.device == "cuda" else 3
    findings.require(
        recorder_state.get("entered") == last, f"{recorder_state.get('entered')} collectives are entered, not {last}"
    )
    findings.require(
        recorder_state.get("completed") == 3, f"{recorder_state.get('completed')} collectives are completed, not 3"
    )
    return findings


def _build_hook_overrides(name: str, step: int, key: str = "disturb", **settings: Any) -> Iterable[str]:
    """Return the overrides of a hook, called `key`, that disturbs a step."""
    values = {"step": step, **settings}
    return [f"+hooks.{key}._target_={HOOKS}.{name}", *(f"+hooks.{key}.{k}={v}" for k, v in values.items())]


def _require_success(findings: Findings, *runs: TrainedRun) -> None:
    for run in runs:
        findings.require(run.code == 0, f"{run.folder.name}: exit code {run.code}: {run.find_last_line()}")


def _compare_losses(
    findings: Findings, first: TrainedRun, second: TrainedRun, tolerance: float = CLOSE, name: str = ""
) -> float | None:
    """Return the largest relative difference of the losses of two runs; more than `tolerance` is a problem."""
    pairs = list(zip(first.losses, second.losses, strict=False))
    if not pairs or len(first.losses) != len(second.losses):
        findings.require(
            False, f"{second.folder.name} has {len(second.losses)} losses, {first.folder.name} {len(first.losses)}"
        )
        return None
    differences = [abs(a - b) / abs(a) for a, b in pairs]
    difference = math.nan if any(map(math.isnan, differences)) else max(differences)
    prefix = f"{name}: " if name else ""
    findings.require(
        difference <= tolerance,
        f"{prefix}the losses of {second.folder.name} and {first.folder.name} differ by {difference:.1e}",
    )
    return difference


PARTS = (
    AcceptancePart("losses", "does it compute what a CPU computes", check_losses, 1),
    AcceptancePart("attention", "is each attention kernel right", check_attention, 1),
    AcceptancePart("experts", "do models with experts train", check_experts, 1),
    AcceptancePart("not-finite", "is a NaN reported, and the weights kept", check_not_finite, 0.5),
    AcceptancePart("stands-still", "is a step that stands still reported", check_standstill, 1),
    AcceptancePart("out-of-memory", "does a full memory end in one sentence", check_out_of_memory, 0.5),
    AcceptancePart("preemption", "does a stopped run go on exactly", check_preemption, 1.5),
    AcceptancePart("profile", "can steps be profiled with their memory", check_profiles, 1),
    AcceptancePart("predicted", "are memory and step time as predicted", check_prediction, 2),
    AcceptancePart("saves", "do asynchronous saves cost nothing", check_saves, 4),
    AcceptancePart("layouts", "does each layout of two devices compute the same", check_layouts, 4),
    AcceptancePart("recorder", "what is recorded of collectives", check_recorder, 0.5),
    AcceptancePart("hang", "is a rank that hangs named", check_hang, 1),
    AcceptancePart("speeds", "how fast is it, and does a step wait for the host", measure_speeds, 12),
)


def select_parts(text: str) -> list[AcceptancePart]:
    """Return the parts whose name contains a text, or one of several with commas between them.

    Raises:
        ConfigError: when there is none.
    """
    parts = [part for part in PARTS if any(word.strip() in part.name for word in text.split(","))]
    if not parts:
        names = ", ".join(part.name for part in PARTS)
        raise ConfigError(f"case={text}: no part has a name that contains this; give a part of one of: {names}.")
    return parts
