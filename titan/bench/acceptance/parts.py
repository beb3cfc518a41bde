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

from titan.bench.acceptance.lab import Findings, Lab, Trained
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


@dataclass(frozen=True)
class Part:
    """A part of the suite.

    Attributes:
        name: in files.
        question: what it answers.
        answer: runs what is needed.
        minutes: what it takes on a GPU, about.
    """

    name: str
    question: str
    answer: Callable[[Lab], Findings]
    minutes: float


def losses(lab: Lab) -> Findings:
    """Train in fp32 on the device and on the CPU."""
    found = Findings()
    there = lab.train("losses-device", "precision=fp32", "compile=off")
    here = lab.train("losses-cpu", "precision=fp32", "compile=off", "cluster.device=cpu", "cluster=cpu")
    _require_success(found, there, here)
    found.figures["relative_difference"] = _difference(found, there, here)
    return found


def attention(lab: Lab) -> Findings:
    """Compute each attention kernel on the device and in fp32 on the CPU."""
    from titan.bench.acceptance.kernels import NO_TRITON, ROUNDING

    found = Findings()
    code, output = lab.run("attention", ["-m", "titan.bench.acceptance.kernels", lab.device])
    found.require(code == 0, f"the comparison of kernels ended with exit code {code}")
    for line in (json.loads(line) for line in output.splitlines() if line.startswith("{")):
        name = f"{line['kernel']} {line['type']}"
        found.figures[name] = line.get("error", line.get("refused"))
        error, most = line.get("error", 0.0), ROUNDING[line["type"]]
        found.require(error <= most, f"{name} differs from fp32 on the CPU by {error:.1e}, more than {most:g}")
    for name in REQUIRED_KERNELS[lab.device]:
        computed = isinstance(found.figures.get(name), float) or found.figures.get(name) == NO_TRITON
        found.require(computed, f"{name} was not computed: {found.figures.get(name)}")
    return found


def predicted(lab: Lab) -> Findings:
    """Train the 1B model, and compare memory and step time with the run's own prediction."""
    found = Findings()
    described = (f"cluster={lab.cluster}", "cluster.devices=1") if lab.cluster else ()
    run = lab.train("predicted", *(LARGE if lab.device == "cuda" else ()), *described, small=lab.device != "cuda")
    _require_success(found, run)
    if run.code:
        return found
    found.figures |= {"step_seconds": run.step_seconds, "memory_gib": run.memory_gib}
    made = _prediction(run.folder)
    if made is None:
        found.figures["prediction"] = "none: the hardware is not described"
        found.require(lab.device != "cuda", "no cluster describes this GPU for a prediction; run titan.calibrate")
        return found
    seconds, memory = made.step_seconds.value, made.rank0_memory_gib.value
    found.figures |= {"predicted_step_seconds": seconds, "predicted_memory_gib": memory}
    error, factor = abs(memory / run.memory_gib - 1), max(seconds / run.step_seconds, run.step_seconds / seconds)
    found.require(error <= MOST_MEMORY_ERROR, f"{memory:.1f} GiB are predicted, {run.memory_gib:.1f} GiB measured")
    found.require(factor <= MOST_TIME_FACTOR, f"{seconds:.2f} s a step are predicted, {run.step_seconds:.2f} measured")
    return found


def _prediction(folder: Path) -> prediction.Prediction | None:
    documents = [one for one in yaml.safe_load_all((folder / "run.yaml").read_text()) if one]
    return next(filter(None, map(prediction.parse_document, reversed(documents))), None)


def experts(lab: Lab) -> Findings:
    """Train a model with experts in bf16 and in fp32."""
    found = Findings()
    runs = [lab.train(f"experts-{precision}", *EXPERTS, f"precision={precision}") for precision in ("fp32", "bf16")]
    _require_success(found, *runs)
    found.figures |= {"loss fp32": runs[0].losses[-1:], "loss bf16": runs[1].losses[-1:]}
    if all(run.losses for run in runs):
        apart = abs(runs[0].losses[-1] / runs[1].losses[-1] - 1)
        found.require(apart < 0.02, f"the losses in bf16 and fp32 differ by {apart:.1%}")
    return found


def stands_still(lab: Lab) -> Findings:
    """Let the only rank sleep in a step: the run says so, and goes on."""
    found = Findings()
    # a fast device ends the run before the watcher looks again, unless another step takes a while
    disturbed = [*_hook("StandStill", step=4, seconds=8), *_hook("StandStill", step=5, key="rest", seconds=0.8)]
    run = lab.train("stands-still", *disturbed, "debug.hang_seconds=2")
    _require_success(found, run)
    said = re.findall(r"no step for .*", run.output)
    found.figures["said"] = said[:1]
    found.require(bool(said), "nothing was said about a step that stood still")
    found.require("the run continues" in run.output, "nothing was said when the run went on")
    return found


def not_finite(lab: Lab) -> Findings:
    """Make a gradient NaN: the step changes no weight, is reported, and the run goes on."""
    found = Findings()
    run = lab.train("not-finite", *_hook("NotFinite", step=3))
    _require_success(found, run)
    marked = [line["step"] for line in run.steps if line.get("not_finite")]
    found.figures["marked steps"] = marked
    found.require(marked == [3], f"steps {marked} are marked as not finite, and not step 3 alone")
    return found


def out_of_memory(lab: Lab) -> Findings:
    """Fill the device's memory: one sentence, exit code 1, a snapshot."""
    if lab.device != "cuda":
        return Findings(skipped="a CPU ends a process that takes too much memory")
    found = Findings()
    run = lab.train("out-of-memory", *_hook("OutOfMemory", step=3))
    found.figures["said"] = run.tail()
    found.require(run.code == 1, f"the exit code is {run.code}, not 1")
    found.require("out of memory" in run.output, "the message does not say that memory is out")
    found.require(
        (run.folder / "debug" / "out-of-memory-rank-0.pickle").is_file(), "there is no snapshot of the memory"
    )
    return found


def saves(lab: Lab) -> Findings:
    """Save asynchronously in the middle, compare the steps meanwhile with those of a run without saves, and resume."""
    found = Findings()
    large, middle = lab.device == "cuda", 6
    settings = (*(LARGE if large else ()), "training.steps=12", "debug.deterministic=true")
    without = lab.train("saves-off", *settings, small=not large)
    saved = (*settings, "checkpoint=async", f"checkpoint.every={middle}")
    saving = lab.train("saves-async", *saved, small=not large)
    source = f"checkpoint.resume={saving.folder}/checkpoints/step-{middle}"
    resumed = lab.train("saves-resumed", *settings, source, small=not large)
    _require_success(found, without, saving, resumed)
    found.figures["loss differs by"] = _difference(found, without, saving, most=0.0)
    found.figures["loss differs after a resume by"] = _difference(found, without.after(middle), resumed, most=0.0)
    times = without.after(middle).median_seconds, saving.after(middle).median_seconds
    found.figures |= {"step_seconds": times[0], "step_seconds beside a save": times[1]}
    free = times[1] <= MOST_SAVE_FACTOR * times[0]
    found.require(free or not large, f"a step beside a save takes {times[1]:.2f} s, without one {times[0]:.2f} s")
    for run in (saving, resumed):
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # tens of GB
    return found


def preemption(lab: Lab) -> Findings:
    """Stop a run with SIGTERM and start it again: the losses are those of a run that was not stopped."""
    found = Findings()
    settings = (
        "training.steps=40", "checkpoint=async", "checkpoint.every=1000", "precision=fp32", "debug.deterministic=true"
    )  # fmt: skip
    whole = lab.train("preemption-whole", *settings)
    parts = [lab.train("preemption", *settings, stop_after=5), lab.train("preemption", *settings)]
    found.figures["exit codes"] = [run.code for run in parts]
    found.require(parts[0].code in (75, 130), f"SIGTERM ended the run with exit code {parts[0].code}")
    _require_success(found, whole, parts[1])
    found.figures["loss differs by"] = _difference(found, whole, parts[1], most=0.0)
    return found


def profiles(lab: Lab) -> Findings:
    """Profile steps with memory."""
    found = Findings()
    run = lab.train("profile", "profile=memory", "profile.wait=1", "training.steps=6")
    _require_success(found, run)
    written = sorted(path.name for path in (run.folder / "profile").glob("step-*"))
    found.figures["written"] = written
    found.require(bool(written), "no profile was written")
    return found


def speeds(lab: Lab) -> Findings:
    """Run the suite of speeds, with the search for host waits."""
    found = Findings()
    file = lab.folder / "speeds.json"
    suite = ["gpu", "--case", "llama1b"] if lab.device == "cuda" else ["tiny", "--case", "fp32, compile off"]
    command = ["-m", "titan.bench", "--suite", *suite, "--rounds", "3", "--json", str(file), *lab.overrides]
    code, output = lab.run("speeds", command, seconds=900)
    found.require(code == 0, f"the suite of speeds ended with exit code {code}: {output.strip().splitlines()[-1:]}")
    content = json.loads(file.read_text()) if file.is_file() else {}
    for row in content.get("speed", []):
        found.figures[row["title"]] = {name: row.get(name) for name in ("ratio", "titan", "bare", "mfu")}
        found.require(not row.get("failure"), f"{row['title']}: {row.get('failure')}")
    for title, sync in content.get("host_sync", {}).items():
        found.require(not sync["location"], f"{title}: a step waits for the device at {sync['location']}")
    found.require(bool(found.figures), "no speed was measured")
    return found


def layouts(lab: Lab) -> Findings:
    """Train on two devices in each layout, and compare with one."""
    if lab.devices < 2:
        return Findings(skipped="one device")
    found = Findings()
    one = {model: lab.train(f"layouts-one-{n}", *model, "precision=fp32") for n, model in enumerate(((), EXPERTS))}
    for layout in LAYOUTS:
        model = EXPERTS if layout == "ep" else ()
        two = lab.train(f"layouts-{layout}", *model, f"parallelism={layout}", "cluster.devices=2", "precision=fp32")
        _require_success(found, one[model], two)
        found.figures[layout] = _difference(found, one[model], two, name=layout)
    return found


def hang(lab: Lab) -> Findings:
    """Let one of two ranks sleep: it is named, and the Flight Recorder's dumps are kept."""
    if lab.devices < 2:
        return Findings(skipped="one device")
    found = Findings()
    limits = ("debug.hang_seconds=4", "cluster.step_timeout=16", "cluster.timeout=60", "training.steps=1000")
    run = lab.train(
        "hang", "parallelism=fsdp", "cluster.devices=2", *_hook("StandStill", 6, rank=1, seconds=120), *limits
    )
    said = re.findall(r"no step for .*", run.output)
    found.figures["said"] = said[-1:]
    found.require(run.code == 1, f"the exit code is {run.code}, not 1")
    found.require(bool(said) and "waiting for rank 1 " in said[-1], f"rank 1 is not named: {said[-1:]}")
    dumps = run.folder / "debug" / "flight_recorder"
    found.require(any(dumps.glob("rank_*")), "there is no dump of the Flight Recorder")
    if dumps.is_dir():
        shutil.copytree(dumps, lab.folder / "flight_recorder", dirs_exist_ok=True)
    return found


def recorder(lab: Lab) -> Findings:
    """Read the Flight Recorder of one rank, on a GPU while a collective waits for a kernel; its content is kept."""
    found = Findings()
    file = lab.folder / "flight_recorder" / f"{lab.device}-one-rank"
    code, output = lab.run("recorder", ["-m", "titan.bench.acceptance.recorder", lab.device, str(file)])
    seen: dict[str, Any] = next((json.loads(line) for line in output.splitlines() if line.startswith("{")), {})
    found.figures |= seen
    found.require(code == 0, f"the recorder was not read: exit code {code}")
    last = 4 if lab.device == "cuda" else 3
    found.require(seen.get("entered") == last, f"{seen.get('entered')} collectives are entered, not {last}")
    found.require(seen.get("completed") == 3, f"{seen.get('completed')} collectives are completed, not 3")
    return found


def _hook(name: str, step: int, key: str = "disturb", **settings: Any) -> Iterable[str]:
    """Return the overrides of a hook, called `key`, that disturbs a step."""
    given = {"step": step, **settings}
    return [f"+hooks.{key}._target_={HOOKS}.{name}", *(f"+hooks.{key}.{k}={v}" for k, v in given.items())]


def _require_success(found: Findings, *runs: Trained) -> None:
    for run in runs:
        found.require(run.code == 0, f"{run.folder.name}: exit code {run.code}: {run.tail()}")


def _difference(found: Findings, one: Trained, two: Trained, most: float = CLOSE, name: str = "") -> float | None:
    """Return the largest relative difference of the losses of two runs; more than `most` is a problem."""
    pairs = list(zip(one.losses, two.losses, strict=False))
    if not pairs or len(one.losses) != len(two.losses):
        found.require(False, f"{two.folder.name} has {len(two.losses)} losses, {one.folder.name} {len(one.losses)}")
        return None
    differences = [abs(a - b) / abs(a) for a, b in pairs]
    apart = math.nan if any(map(math.isnan, differences)) else max(differences)
    words = f"{name}: " if name else ""
    found.require(apart <= most, f"{words}the losses of {two.folder.name} and {one.folder.name} differ by {apart:.1e}")
    return apart


PARTS = (
    Part("losses", "does it compute what a CPU computes", losses, 1),
    Part("attention", "is each attention kernel right", attention, 1),
    Part("experts", "do models with experts train", experts, 1),
    Part("not-finite", "is a NaN reported, and the weights kept", not_finite, 0.5),
    Part("stands-still", "is a step that stands still reported", stands_still, 1),
    Part("out-of-memory", "does a full memory end in one sentence", out_of_memory, 0.5),
    Part("preemption", "does a stopped run go on exactly", preemption, 1.5),
    Part("profile", "can steps be profiled with their memory", profiles, 1),
    Part("predicted", "are memory and step time as predicted", predicted, 2),
    Part("saves", "do asynchronous saves cost nothing", saves, 4),
    Part("layouts", "does each layout of two devices compute the same", layouts, 4),
    Part("recorder", "what is recorded of collectives", recorder, 0.5),
    Part("hang", "is a rank that hangs named", hang, 1),
    Part("speeds", "how fast is it, and does a step wait for the host", speeds, 12),
)


def select(text: str) -> list[Part]:
    """Return the parts whose name contains a text, or one of several with commas between them.

    Raises:
        ConfigError: when there is none.
    """
    found = [part for part in PARTS if any(word.strip() in part.name for word in text.split(","))]
    if not found:
        names = ", ".join(part.name for part in PARTS)
        raise ConfigError(f"--case {text}: no part has a name that contains this; give a part of one of: {names}.")
    return found
