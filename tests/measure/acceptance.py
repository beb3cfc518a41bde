"""What a new kind of device has to show before it is trusted: `python -m tests.measure suite=acceptance`.

Each part is a question to the device, with the runs that answer it; a report that others can read is written after
each. A part whose result is there, of the same code and device, is not run again: the same command goes on after it was
interrupted, or after a fault was corrected in one part.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.measure.lab import Findings, Lab, TrainedRun
from titan.errors import ConfigError
from titan.files.atomic import write_atomic
from titan.run import prediction
from titan.run.hydra_session import CONF
from titan.run.run import Run

if TYPE_CHECKING:
    from tests.measure.command import Settings

CLOSE = 1e-4
"""Largest relative difference of fp32 losses between devices and layouts."""
HOOKS = "tests.measure.device_checks"
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
    """A part of the suite: its name in files, what it answers, and what runs what is needed and adds what it finds."""

    name: str
    question: str
    check: Callable[[Lab, Findings], None]

    def ask(self, lab: Lab) -> Findings:
        """Return what the part finds."""
        findings = Findings()
        self.check(lab, findings)
        return findings


def check_losses(lab: Lab, findings: Findings) -> None:
    """Train in fp32 on the CPU, and from its first checkpoint on the device: devices draw other initial weights."""
    settings, start = ("precision=fp32", "compile=off"), 1
    on_cpu = ("cluster.device=cpu", "cluster=cpu", "checkpoint=sync", "checkpoint.every=0", f"checkpoint.at=[{start}]")
    cpu_run = lab.train("losses-cpu", *settings, *on_cpu)
    device_run = lab.train("losses-device", *settings, f"checkpoint.resume={cpu_run.folder}/checkpoints/step-{start}")
    _require_success(findings, cpu_run, device_run)
    _compare_losses(findings, "relative_difference", cpu_run.select_after(start), device_run)


def check_attention(lab: Lab, findings: Findings) -> None:
    """Compute each attention kernel on the device and in fp32 on the CPU."""
    from tests.measure.device_checks import NO_TRITON, ROUNDING

    code, output = lab.run("attention", ["-m", "tests.measure.device_checks", "kernels", lab.device])
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


def check_prediction(lab: Lab, findings: Findings) -> None:
    """Train the 1B model, and compare memory and step time with the run's own prediction."""
    cluster_settings = (f"cluster={lab.cluster}", "cluster.devices=1") if lab.cluster else ()
    run = lab.train("predicted", *cluster_settings, small=False)
    _require_success(findings, run)
    if run.code:
        return
    step_seconds = run.compute_median_seconds(skipped=3)
    findings.figures |= {"step_seconds": step_seconds, "memory_gib": run.memory_gib}
    documents = [document for document in yaml.safe_load_all((run.folder / "run.yaml").read_text()) if document]
    run_prediction = next(filter(None, map(prediction.parse_document, reversed(documents))), None)
    if run_prediction is None:
        findings.figures["prediction"] = "none: the hardware is not described"
        findings.require(lab.device != "cuda", "no cluster describes this GPU for a prediction; run titan.calibrate")
        return
    seconds, memory = run_prediction.step_seconds.value, run_prediction.rank0_memory_gib.value
    findings.figures |= {"predicted_step_seconds": seconds, "predicted_memory_gib": memory}
    error, factor = abs(memory / run.memory_gib - 1), max(seconds / step_seconds, step_seconds / seconds)
    findings.require(error <= MOST_MEMORY_ERROR, f"{memory:.1f} GiB are predicted, {run.memory_gib:.1f} GiB measured")
    findings.require(factor <= MOST_TIME_FACTOR, f"{seconds:.2f} s per step are predicted, {step_seconds:.2f} measured")


def check_experts(lab: Lab, findings: Findings) -> None:
    """Train a model with experts in bf16 and in fp32."""
    runs = [lab.train(f"experts-{precision}", *EXPERTS, f"precision={precision}") for precision in ("fp32", "bf16")]
    _require_success(findings, *runs)
    findings.figures |= {"loss fp32": runs[0].losses[-1:], "loss bf16": runs[1].losses[-1:]}
    if all(run.losses for run in runs):
        difference = abs(runs[0].losses[-1] / runs[1].losses[-1] - 1)
        findings.require(difference < 0.02, f"the losses in bf16 and fp32 differ by {difference:.1%}")


def check_standstill(lab: Lab, findings: Findings) -> None:
    """Let the only rank sleep in a step: the run says so, and goes on."""
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


def check_not_finite(lab: Lab, findings: Findings) -> None:
    """Make a gradient NaN: the step changes no weight, is reported, and the run goes on."""
    run = lab.train("not-finite", *_build_hook_overrides("NotFinite", step=3))
    _require_success(findings, run)
    marked = [line["step"] for line in run.steps if line.get("not_finite")]
    findings.figures["marked steps"] = marked
    findings.require(marked == [3], f"steps {marked} are marked as not finite, and not step 3 alone")


def check_out_of_memory(lab: Lab, findings: Findings) -> None:
    """Fill the device's memory: one sentence, exit code 1, a snapshot."""
    if lab.device != "cuda":
        findings.skipped = "a CPU ends a process that takes too much memory"
        return
    run = lab.train("out-of-memory", *_build_hook_overrides("OutOfMemory", step=3))
    findings.figures["said"] = run.find_last_line()
    findings.require(run.code == 1, f"the exit code is {run.code}, not 1")
    findings.require("out of memory" in run.output, "the message does not say that memory is out")
    findings.require(
        (run.folder / "debug" / "out-of-memory-rank-0.pickle").is_file(), "there is no snapshot of the memory"
    )


def check_saves(lab: Lab, findings: Findings) -> None:
    """Save asynchronously in the middle, compare the steps meanwhile with those of a run without saves, and resume."""
    middle, settings = 6, ("training.steps=12", "debug.deterministic=true")
    baseline = lab.train("saves-off", *settings, small=False)
    saving = lab.train("saves-async", *settings, "checkpoint=async", f"checkpoint.every={middle}", small=False)
    source = f"checkpoint.resume={saving.folder}/checkpoints/step-{middle}"
    resumed = lab.train("saves-resumed", *settings, source, small=False)
    _require_success(findings, baseline, saving, resumed)
    _compare_losses(findings, "loss differs by", baseline, saving, tolerance=0.0)
    after = baseline.select_after(middle)
    _compare_losses(findings, "loss differs after a resume by", after, resumed, tolerance=0.0)
    times = [run.select_after(middle).compute_median_seconds() for run in (baseline, saving)]
    findings.figures |= {"step_seconds": times[0], "step_seconds beside a save": times[1]}
    is_judged = lab.device == "cuda" and times[0] >= SHORTEST_JUDGED_STEP
    findings.require(
        not is_judged or times[1] <= MOST_SAVE_FACTOR * times[0],
        f"a step beside a save takes {times[1]:.2f} s, without one {times[0]:.2f} s",
    )
    for run in (saving, resumed):
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # tens of GB


def check_preemption(lab: Lab, findings: Findings) -> None:
    """Stop a run with SIGTERM and start it again: the losses are those of a run that was not stopped."""
    settings = (
        "training.steps=40", "checkpoint=async", "checkpoint.every=1000", "precision=fp32", "debug.deterministic=true"
    )  # fmt: skip
    uninterrupted = lab.train("preemption-whole", *settings)
    attempts = [lab.train("preemption", *settings, stop_after=5), lab.train("preemption", *settings)]
    findings.figures["exit codes"] = [run.code for run in attempts]
    findings.require(attempts[0].code in (75, 130), f"SIGTERM ended the run with exit code {attempts[0].code}")
    _require_success(findings, uninterrupted, attempts[1])
    _compare_losses(findings, "loss differs by", uninterrupted, attempts[1], tolerance=0.0)


def check_profiles(lab: Lab, findings: Findings) -> None:
    """Profile steps with memory."""
    run = lab.train("profile", "profile=memory", "profile.wait=1", "training.steps=6")
    _require_success(findings, run)
    written = sorted(path.name for path in (run.folder / "profile").glob("step-*"))
    findings.figures["written"] = written
    findings.require(bool(written), "no profile was written")


def measure_speeds(lab: Lab, findings: Findings) -> None:
    """Run the suite of speeds, with the search for host waits."""
    file = lab.folder / "speeds.json"
    suite = ["suite=gpu", "case=llama1b"] if lab.device == "cuda" else ["suite=tiny", "case=fp32, compile off"]
    command = ["-m", "tests.measure", *suite, "rounds=3", f"to={file}", *lab.overrides]
    code, output = lab.run("speeds", command, seconds=900)
    findings.require(code == 0, f"the suite of speeds ended with exit code {code}: {output.strip().splitlines()[-1:]}")
    content = json.loads(file.read_text()) if file.is_file() else {}
    for row in content.get("speed", []):
        findings.figures[row["title"]] = {name: row.get(name) for name in ("ratio", "titan", "bare", "mfu")}
        findings.require(not row.get("failure"), f"{row['title']}: {row.get('failure')}")
    for title, sync in content.get("host_sync", {}).items():
        findings.require(not sync["location"], f"{title}: a step waits for the device at {sync['location']}")
    findings.require(bool(findings.figures), "no speed was measured")


def check_layouts(lab: Lab, findings: Findings) -> None:
    """Train on two devices in each layout, and compare with one."""
    if lab.devices < 2:
        findings.skipped = "one device"
        return
    single_runs = {
        model: lab.train(f"layouts-one-{n}", *model, "precision=fp32") for n, model in enumerate(((), EXPERTS))
    }
    for layout in LAYOUTS:
        model = EXPERTS if layout == "ep" else ()
        layout_run = lab.train(
            f"layouts-{layout}", *model, f"parallelism={layout}", "cluster.devices=2", "precision=fp32"
        )
        _require_success(findings, single_runs[model], layout_run)
        _compare_losses(findings, layout, single_runs[model], layout_run, prefix=f"{layout}: ")


def check_hang(lab: Lab, findings: Findings) -> None:
    """Let one of two ranks sleep: it is named, and the Flight Recorder's dumps are kept."""
    if lab.devices < 2:
        findings.skipped = "one device"
        return
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


def check_recorder(lab: Lab, findings: Findings) -> None:
    """Read the Flight Recorder of one rank, on a GPU while a collective waits for a kernel; its content is kept."""
    file = lab.folder / "flight_recorder" / f"{lab.device}-one-rank"
    code, output = lab.run("recorder", ["-m", "tests.measure.device_checks", "recorder", lab.device, str(file)])
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


def _build_hook_overrides(name: str, step: int, key: str = "disturb", **settings: Any) -> Iterable[str]:
    """Return the overrides of a hook, called `key`, that disturbs a step."""
    hook = f"+hooks.{key}"
    values = {"step": step, **settings}
    return ["modules=[tests]", f"{hook}._target_={HOOKS}.{name}", *(f"{hook}.{k}={v}" for k, v in values.items())]


def _require_success(findings: Findings, *runs: TrainedRun) -> None:
    for run in runs:
        findings.require(run.code == 0, f"{run.folder.name}: exit code {run.code}: {run.find_last_line()}")


def _compare_losses(
    findings: Findings, figure: str, first: TrainedRun, second: TrainedRun, tolerance: float = CLOSE, prefix: str = ""
) -> None:
    """Add the largest relative difference of the losses of two runs; more than `tolerance` is a problem."""
    losses, names = (first.losses, second.losses), (first.folder.name, second.folder.name)
    findings.figures[figure] = None
    if not all(losses) or len(losses[0]) != len(losses[1]):
        findings.require(False, f"{names[1]} has {len(losses[1])} losses, {names[0]} {len(losses[0])}")
        return
    differences = [abs(a - b) / abs(a) for a, b in zip(*losses, strict=True)]
    difference = math.nan if any(map(math.isnan, differences)) else max(differences)
    findings.figures[figure] = difference
    problem = f"{prefix}the losses of {names[1]} and {names[0]} differ by {difference:.1e}"
    findings.require(difference <= tolerance, problem)


PARTS = (
    AcceptancePart("losses", "does it compute what a CPU computes", check_losses),
    AcceptancePart("attention", "is each attention kernel right", check_attention),
    AcceptancePart("experts", "do models with experts train", check_experts),
    AcceptancePart("not-finite", "is a NaN reported, and the weights kept", check_not_finite),
    AcceptancePart("stands-still", "is a step that stands still reported", check_standstill),
    AcceptancePart("out-of-memory", "does a full memory end in one sentence", check_out_of_memory),
    AcceptancePart("preemption", "does a stopped run go on exactly", check_preemption),
    AcceptancePart("profile", "can steps be profiled with their memory", check_profiles),
    AcceptancePart("predicted", "are memory and step time as predicted", check_prediction),
    AcceptancePart("saves", "do asynchronous saves cost nothing", check_saves),
    AcceptancePart("layouts", "does each layout of two devices compute the same", check_layouts),
    AcceptancePart("recorder", "what is recorded of collectives", check_recorder),
    AcceptancePart("hang", "is a rank that hangs named", check_hang),
    AcceptancePart("speeds", "how fast is it, and does a step wait for the host", measure_speeds),
)


def select_parts(text: str) -> list[AcceptancePart]:
    """Return the parts whose name contains a text, or one of several with commas between them."""
    parts = [part for part in PARTS if any(word.strip() in part.name for word in text.split(","))]
    if not parts:
        names = ", ".join(part.name for part in PARTS)
        raise ConfigError(f"case={text}: no part has a name that contains this; give a part of one of: {names}.")
    return parts


@dataclass(frozen=True)
class PartOutcome:
    """What became of a part; `key` says of what it is: code and device."""

    name: str
    findings: Findings
    seconds: float
    key: str

    @property
    def word(self) -> str:
        """The outcome in a word."""
        return "skipped" if self.findings.skipped else "fails" if self.findings.problems else "holds"


def accept_device(settings: Settings, overrides: Sequence[str], run: Run, provenance: Mapping[str, Any]) -> int:
    """Run the parts that `case=` names, and return the exit code."""
    device, folder = run.machine.device, Path(settings.to or "acceptance").resolve()
    other_overrides = tuple(override for override in overrides if not override.startswith("cluster.device="))
    count = run.machine.count if device == "cuda" else 2
    lab = Lab(folder, device, count, other_overrides, find_cluster(run.machine.name))
    stable_provenance = {name: value for name, value in provenance.items() if name != "date"}
    return run_parts(lab, select_parts(settings.case), stable_provenance)


def find_cluster(device_name: str) -> str | None:
    """Return the choice of `cluster` that describes devices of this name."""
    for file in sorted((CONF / "cluster").glob("*.yaml")):
        if yaml.safe_load(file.read_text()).get("device_name") == device_name:
            return file.stem
    return None


def run_parts(lab: Lab, parts: Sequence[AcceptancePart], provenance: Mapping[str, Any]) -> int:
    """Run parts, print a line for each, and write the report after each.

    Args:
        provenance: the machine and the versions; a part is run again when they change.
    """
    lab.folder.mkdir(parents=True, exist_ok=True)
    provenance = {**provenance, "settings": list(lab.overrides)}
    key, outcomes = json.dumps(provenance, sort_keys=True, default=str), list[PartOutcome]()
    for part in parts:
        outcome = _load_outcome(lab.folder, part, key) or _run_part(lab, part, key)
        outcomes.append(outcome)
        print(f"{outcome.word:<8}{part.name:<16}{outcome.seconds:>6.0f} s  {part.question}", flush=True)
        for problem in outcome.findings.problems:
            print(f"        {problem}", flush=True)
        found = {"about": provenance, "parts": {o.name: {"outcome": o.word, **asdict(o.findings)} for o in outcomes}}
        write_atomic(lab.folder / "report.json", json.dumps(found, indent=1, default=str))
        write_atomic(lab.folder / "report.md", render_report(provenance, outcomes))
    print(f"report: {lab.folder}/report.md")
    return int(any(outcome.findings.problems for outcome in outcomes))


def _load_outcome(folder: Path, part: AcceptancePart, key: str) -> PartOutcome | None:
    """Return the outcome of a part that held before; None where it has to run."""
    try:
        content = json.loads((folder / "parts" / f"{part.name}.json").read_text())
        outcome = PartOutcome(**{**content, "findings": Findings(**content["findings"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return outcome if outcome.key == key and not outcome.findings.problems else None


def _run_part(lab: Lab, part: AcceptancePart, key: str) -> PartOutcome:
    """Run a part; an error in it is one of its problems."""
    start = time.monotonic()
    lab.remove_runs(part.name)
    try:
        findings = part.ask(lab)
    except Exception as error:
        findings = Findings(problems=[f"{type(error).__name__}: {error}"])
    outcome = PartOutcome(part.name, findings, time.monotonic() - start, key)
    (lab.folder / "parts").mkdir(exist_ok=True)
    write_atomic(lab.folder / "parts" / f"{part.name}.json", json.dumps(asdict(outcome), indent=1))
    return outcome


def render_report(provenance: Mapping[str, Any], outcomes: Sequence[PartOutcome]) -> str:
    """Return the report as Markdown."""
    questions = {part.name: part.question for part in PARTS}
    problems = [f"- {o.name}: {problem}" for o in outcomes for problem in o.findings.problems]
    lines = ["# Acceptance of a device", "", *(f"- {name}: {value}" for name, value in provenance.items()), ""]
    lines += ["All parts hold." if not problems else "Problems:", *problems, ""]
    lines += ["| part | question | outcome | seconds |", "| --- | --- | --- | --- |"]
    for o in outcomes:
        outcome = f"{o.word}: {o.findings.skipped}" if o.findings.skipped else o.word
        lines.append(f"| {o.name} | {questions.get(o.name, '')} | {outcome} | {o.seconds:.0f} |")
    for o in (o for o in outcomes if o.findings.figures):
        lines += ["", f"## {o.name}", "", "| figure | value |", "| --- | --- |"]
        lines += [f"| {name} | {_format_value(value)} |" for name, value in o.findings.figures.items()]
    return "\n".join(lines) + "\n"


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_value(part)}" for name, part in value.items() if part is not None)
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    return str(value).replace("|", "\\|")
