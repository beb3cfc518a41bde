"""titan for notebooks and scripts: compose, train, read and compare runs. Importing it does not load torch.

    from titan import api

    run = api.compose("model=debug", "parallelism=fsdp", "training.steps=100", "name=first")
    result = api.train(run)
    saved = api.open_run(result.directory)
    saved.metrics["loss"], saved.config["optimizer"]["lr"], saved.checkpoints[-1].path
    findings = api.compare(["runs/first", "runs/second"], margin=0.01)
    api.law("runs/ladder", target="1.4B,28B").corpora[0].laws[0].floor
    api.plan("recipe=train_8b").days
    module, tokenizer = api.load("runs/first")
    api.generate("runs/first", "def main(")[0]["text"]
    api.sweep("optimizer.lr=1e-3,3e-3", "name=grid").frame()

Where a command prints a sentence and exits with 2 or 1, these functions raise ConfigError or RunError.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from launchers import start
from launchers.command import compose_single, launch_sweep, plan_command
from launchers.supervisor import make_scratch_folder
from titan.checkpoint import manifest
from titan.cluster import devices, rank_info
from titan.config import settings
from titan.config.command import CommandLine
from titan.config.optional import import_optional
from titan.console import output
from titan.console.notebook import Shown, build_table, format_fields
from titan.console.numbers import format_count, format_rounded
from titan.dataset.tokenizers.load import load_tokenizer
from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import EXIT_REQUEUE, ConfigError, ReasonReceiver, RunError, describe_machine_error, ignore_reason
from titan.estimate import plan as estimate
from titan.estimate.plan import Plan
from titan.evaluate import run_evaluation
from titan.files.environment import prepare_environment
from titan.files.run_directory import check_run_directory, shorten_path
from titan.generate import run_generation
from titan.generation.schema import Settings as GenerationSettings
from titan.metrics.reader import METRICS, merge_steps, read_last_steps, read_records
from titan.parallelism.schema import Layout
from titan.precision.schema import Precision
from titan.report import comparison, history
from titan.report.findings import Comparison
from titan.report.law_runs import study_sources
from titan.report.render import law_report
from titan.report.render.comparison_report import format_csv
from titan.report.render.sentences import format_answers, format_lead
from titan.report.schema import Settings as CompareSettings
from titan.run import certificate, evaluated
from titan.run.directory import read_attempts, read_result
from titan.run.run import Run
from titan.scaling.findings import LawFindings
from titan.scaling.schema import Settings as LawSettings
from titan.sweep import ledger
from titan.sweep.labels import format_label
from titan.sweep.ledger import TrialState
from titan.sweep.schema import parse_margin
from titan.training.evaluation.request import Settings as EvaluationSettings
from titan.weights.convert import Convert, run_conversion
from titan.weights.origin import check_source

__all__ = [
    "AttemptRecord",
    "Comparison",
    "ConfigError",
    "LawFindings",
    "LoadedModel",
    "Plan",
    "Result",
    "Run",
    "RunError",
    "SavedCheckpoint",
    "SavedRun",
    "SavedSweep",
    "compare",
    "compose",
    "convert",
    "evaluate",
    "generate",
    "law",
    "load",
    "open_run",
    "plan",
    "sweep",
    "train",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


STOPPED = (130, EXIT_REQUEUE)
"""Exit codes of a run that a signal stopped after it saved what it could."""


def compose(*overrides: str) -> Run:
    """Return the checked run that a command line of `titan.train` describes.

    Args:
        overrides: AXIS=CHOICE and AXIS.SETTING=VALUE, `resume=DIR`, and options such as --config-dir, one string each.

    Raises:
        ConfigError: when the run can't work, and for what only a command line can do: sweeps, Slurm, callbacks.
    """
    return compose_single(overrides)


def plan(*overrides: str) -> Plan:
    """Return the predicted memory, speed and cost of the run that a command line of `titan.plan` describes.

    Args:
        overrides: as for `compose`; the cluster axis describes the devices, which need not be here.

    Raises:
        ConfigError: when the run can't work, a figure of the hardware is missing, or for a sweep.
    """
    plans: list[Plan] = []

    def job(run: Run) -> int:
        plans.append(estimate.build_plan(run, run.layout, run.microbatches, run.machine))
        return 0

    def reject_sweep(trials: Sequence[Any]) -> list[int]:
        raise ConfigError("-m: a sweep takes the command titan.plan; leave it out.")

    plan_command(overrides, job, reject_sweep)
    return plans[0]


class _Folder(Shown):
    """What a directory holds; its functions take the object as well as the path."""

    directory: Path

    def __fspath__(self) -> str:
        return str(self.directory)


FIGURES = (
    "first_loss", "last_loss", "validation_loss", "bits_per_byte", "tokens_per_second", "mfu", "memory_gib", "seconds",
)  # fmt: skip
"""The numbers of result.json that `Result` has as attributes."""


@dataclass(frozen=True, repr=False)
class Result(_Folder):
    """The outcome of a run, as its last attempt wrote it to result.json.

    What it says are attributes, None where it lacks one: `tokens` read; `science_id`, the identity of what was learned;
    `first_loss` and `last_loss`, the training loss of the first and the last step, `validation_loss` and
    `bits_per_byte` of the last evaluation, all in nats per token; `tokens_per_second` of all ranks together, without
    warm-up steps; `mfu`, model FLOP utilization; `memory_gib`, the peak memory of a rank; `seconds`, the duration of
    the last attempt.

    Attributes:
        directory: the run's directory.
        values: everything in result.json.
        exit_code: what the command exits with: 0, 130 after Ctrl-C or SIGTERM, 75 when a scheduler asks to stop.
    """

    directory: Path
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)
    exit_code: int = 0

    def __getattr__(self, name: str) -> Any:
        defaults = {**dict.fromkeys(FIGURES), "tokens": 0, "science_id": ""}
        if name not in defaults:
            raise AttributeError(name)
        value = self.values.get(name)
        return defaults[name] if value is None else value

    @property
    def finished(self) -> bool:
        """Whether all steps are done; False when a signal stopped the run."""
        return bool(self.values.get("finished"))

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        return int(self.values.get("step") or 0)

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the last checkpoint; None when nothing was saved."""
        return Path(self.values["checkpoint"]) if self.values.get("checkpoint") else None

    def list_facts(self) -> dict[str, str]:
        """Return what a reader wants to know first, by name, for notebooks."""
        figures = {name: getattr(self, name) for name in ("last_loss", "validation_loss", "tokens_per_second")}
        state = f"{'finished' if self.finished else 'unfinished'}, step {self.step:,}"
        shown = {name: format_rounded(value) for name, value in figures.items() if value is not None}
        return {"directory": shorten_path(str(self.directory)), "state": state, **shown}

    @cached_property
    def losses(self) -> NDArray[np.float64]:
        """The training loss of each step done, nats per token; NaN where it was not finite."""
        metrics = open_run(self.directory).metrics
        if "loss" not in metrics:
            return np.zeros(0)
        return np.asarray(metrics["loss"][metrics["step"] >= 1], dtype=np.float64)


def train(run: Run, *, in_process: bool = False, quiet: bool = False) -> Result:
    """Train a run on this machine and return its result: start it, resume it, or read it when it has finished.

    It prints what the command prints. The first Ctrl-C stops the run at the end of its step: the result says
    `finished=False`, and another call of `train` resumes it.

    Args:
        run: the run, from `compose`.
        in_process: run a single rank in this process, as the command does, for a debugger; otherwise ranks are
            processes, so that neither their memory nor their crash stays in this one.

    Raises:
        ConfigError: when the run is rejected: the command's exit code 2.
        RunError: when the run fails: exit code 1.
    """
    _check_process()
    certificate.check(run)
    reasons: list[str] = []
    code = launch(run, in_process=in_process, quiet=quiet, report=reasons.append)
    if code not in STOPPED:
        _check_code(code, reasons, f"{run.directory}: the run ended with exit code {code}; see log/ in it.")
    return _read_outcome(Path(run.directory), code)


def _read_outcome(directory: Path, code: int) -> Result:
    """What the last attempt wrote; of one that was killed while it stopped, the steps that metrics.jsonl has."""
    saved = open_run(directory)
    return replace(
        saved.result or Result(directory, {"step": int(saved.metrics["step"].max(initial=0))}), exit_code=code
    )


def launch(run: Run, *, in_process: bool = True, quiet: bool = False, report: ReasonReceiver = ignore_reason) -> int:
    """Run on this machine as the command does and return the exit code.

    Args:
        in_process: run a single rank in this process.
        report: called with the error of the rank that failed first, which the launcher has printed.

    Raises:
        ConfigError: when a rank in this process rejects the run.
        RunError: when a rank in this process fails, or this machine does.
    """
    if in_process:
        prepare_environment(os.environ)
    try:
        with _silence(quiet):
            return start.run_local(run, apart=not in_process, report=report)
    except OSError as error:
        if (sentence := describe_machine_error(error)) is None:
            raise
        raise RunError(sentence) from error


def _silence(quiet: bool) -> AbstractContextManager[None]:
    return output.redirect_output(Path(os.devnull)) if quiet else nullcontext()


def _check_code(code: int, reasons: Sequence[str], default: str = "") -> None:
    """Raise the error of ranks, by the exit code and the last of the reasons that they gave."""
    if code == STOPPED[0]:
        raise KeyboardInterrupt
    if code:
        raise (ConfigError if code == 2 else RunError)((reasons[-1] if reasons else "") or default)


@dataclass(frozen=True, repr=False)
class SavedSweep(_Folder):
    """A sweep's directory, and its trials with their `overrides`, `directory`, `state` and `reason`."""

    directory: Path
    trials: tuple[TrialState, ...]

    def __repr__(self) -> str:
        states = Counter(trial.state for trial in self.trials)
        return format_fields("SavedSweep", {"directory": str(self.directory), **{s: str(n) for s, n in states.items()}})

    def list_facts(self) -> dict[str, str]:
        """Return the state of each trial by its settings, for notebooks."""
        return {format_label(t.overrides): f"{t.state}{f': {t.reason}' if t.reason else ''}" for t in self.trials}

    def frame(self) -> Any:
        """The trials as a pandas DataFrame with one row each: settings, state, and figures of result.json."""
        rows = [
            {
                **dict(override.split("=", 1) for override in trial.overrides),
                **{name: getattr(trial, name) for name in ("state", "reason", "directory")},
                **{name: read_result(Path(trial.directory))[0].get(name) for name in FIGURES},
            }
            for trial in self.trials
        ]
        pandas = import_optional("pandas", "frame()")
        return pandas.read_csv(StringIO(pandas.DataFrame(rows).to_csv(index=False)))  # it finds the types of texts


def sweep(*overrides: str, quiet: bool = False) -> SavedSweep:
    """Run the sweep that a command line of `titan.train -m` describes, and return its trials.

    A trial that fails ends no other: its `state` and `reason` say so. Ctrl-C raises KeyboardInterrupt once the running
    trials have ended; the same call continues.

    Args:
        overrides: as for `compose`, with several values of what varies, as in "optimizer.lr=1e-3,3e-3".

    Raises:
        ConfigError: when a trial can't work; none was started then.
    """
    _check_process("sweep")
    with _silence(quiet):
        directory = launch_sweep(overrides)
    found = ledger.read(directory)
    return SavedSweep(directory, found.trials if found else ())


def _check_process(function: str = "train") -> None:
    """Raise ConfigError where this process can't start ranks and handle their signals."""
    current_rank = rank_info.from_environment(os.environ)
    if current_rank is not None:
        raise ConfigError(
            f"api.{function}: this process is rank {current_rank.rank} of {current_rank.world_size} of torchrun or "
            "srun; start it alone, or start titan.train with torchrun."
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(f"api.{function}: handles signals, which only the main thread can; call it from there.")


@dataclass(frozen=True)
class AttemptRecord:
    """One document of run.yaml: one execution of a run between start or resume and its end.

    Its keys are attributes too: `kind` ("start", "resume", "continuation" or "fork"), `began` (in ISO format),
    `from_step` (updates done before it), `overrides` (the command line), `ids`, `layout` (the degree of each mesh
    dimension) and `config` (resolved).

    Attributes:
        document: everything in the document.
    """

    document: Mapping[str, Any] = field(repr=False)

    @property
    def number(self) -> int:
        """1 for the first."""
        return int(self.document["attempt"])

    def __getattr__(self, name: str) -> Any:
        defaults = {"kind": "", "began": "", "from_step": 0, "overrides": (), "ids": {}, "layout": {}, "config": {}}
        if name not in defaults:
            raise AttributeError(name)
        return self.document.get(name) or defaults[name]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint in a run's directory: updates and tokens done, the layout that saved it, its folder."""

    step: int
    tokens: int
    layout: Mapping[str, int]
    path: Path


class SavedRun(_Folder):
    """A run's directory, read when asked and kept; `open_run` again to see what has been added since."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def list_facts(self) -> dict[str, str]:
        """Return what a reader wants to know first, by name, for notebooks."""
        last: Mapping[str, Any] = next(read_last_steps(self.directory / METRICS), {"step": 0})
        return (self.result or Result(self.directory, {**last, "last_loss": last.get("loss")})).list_facts()

    @cached_property
    def attempts(self) -> tuple[AttemptRecord, ...]:
        """The attempts of the run, oldest first."""
        return tuple(map(AttemptRecord, read_attempts(self.directory)))

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration of the last attempt, by axis."""
        config: Mapping[str, Any] = self.attempts[-1].config
        return config

    @cached_property
    def result(self) -> Result | None:
        """The outcome that the last attempt wrote; None while it runs, and when it was killed."""
        result = Result(self.directory, read_result(self.directory)[0])
        return result if result.values.get("attempt") == self.attempts[-1].number else None

    @cached_property
    def checkpoints(self) -> tuple[SavedCheckpoint, ...]:
        """The complete checkpoints in the directory, oldest first."""
        manifests = [(folder, manifest.read(folder)) for folder in manifest.list_folders(self.directory)]
        return tuple(SavedCheckpoint(m.step, m.tokens, m.layout, folder) for folder, m in manifests if m)

    @cached_property
    def metrics(self) -> Mapping[str, NDArray[Any]]:
        """What metrics.jsonl records, by name; [steps] each, in rising order of `step`.

        Steps that a later attempt did again have that attempt's values. A number that a step lacks, or that was not
        finite, is NaN, and a text is empty; columns of whole numbers without a gap are int64. Lists are left out.
        Figures of a file or task whose content changed later are called `evaluation/NAME@DIGEST/...`.
        """
        documents = tuple(attempt.document for attempt in self.attempts)
        separated = evaluated.separate_figures(read_records(self.directory / METRICS), documents)
        records = merge_steps(separated, history.find_step_limits(documents))
        names = dict.fromkeys(["step", *(name for record in records for name in record)])
        columns = {name: [record.get(name) for record in records] for name in names}
        flat = {n: values for n, values in columns.items() if not any(isinstance(v, (list, dict)) for v in values)}
        return {name: _build_column(values) for name, values in flat.items()}

    def frame(self) -> Any:
        """The metrics as a pandas DataFrame with one row per step."""
        return import_optional("pandas", "frame()").DataFrame(dict(self.metrics)).set_index("step")


def open_run(directory: str | os.PathLike[str]) -> SavedRun:
    """Return what a run's directory holds; it may still be running.

    Raises:
        ConfigError: when it holds no run.
    """
    run = SavedRun(check_run_directory(os.fspath(directory)).absolute())
    if not run.attempts:
        raise ConfigError(f"{directory}: its run.yaml is empty; give another run's directory.")
    return run


def _build_column(values: Sequence[Any]) -> NDArray[Any]:
    """Return numbers with NaN for what is missing, and for what no float can be; or texts."""
    if any(isinstance(value, str) for value in values):
        return np.array(["" if value is None else str(value) for value in values])
    if all(type(value) is int and abs(value) < 2**63 for value in values):
        return np.array(values, dtype=np.int64)
    is_known = [value is not None and not (isinstance(value, int) and abs(value) >= 2**1024) for value in values]
    return np.array([float(v) if known else math.nan for v, known in zip(values, is_known, strict=True)])


def compare(
    directories: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    baseline: str | None = None,
    margin: float | str | None = None,
    target: float | None = None,
) -> NotebookComparison:
    """Compare all runs in and below some directories and return the findings as data.

    Args:
        directories: those of runs and sweeps, or folders that hold some; the first run is the baseline.
        baseline: settings, such as "parallelism=ddp,lr=0.001", or a run's directory.
        margin: validation loss, nats, that counts as no difference, or a share of the baseline's compute such as "2%";
            None: as the sweep says, else 0.02.
        target: validation loss to reach; None: as the sweep says.

    Raises:
        ConfigError: for a directory without runs, a value out of range, and a baseline that is none of the variants.
    """
    folders = _list_paths(directories)
    values = {"directories": folders, "baseline": baseline, "margin": margin, "target": target}
    options = settings.build(CompareSettings, values)
    if options.margin is not None:
        parse_margin(options.margin, "margin")
    found = comparison.compare(folders, baseline=options.baseline, margin=options.margin, target=options.target)
    return NotebookComparison(**{f.name: getattr(found, f.name) for f in fields(Comparison)})


def _list_paths(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    return [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]


class NotebookComparison(Comparison):
    """A comparison that notebooks show as its headline and answers."""

    @property
    def headline(self) -> str:
        """The result in a few sentences, as the report begins."""
        return " ".join(format_lead(self))

    def __repr__(self) -> str:
        return f"Comparison({self.title}: {self.headline})"

    def _repr_html_(self) -> str:
        """Return the headline, the answer for each variant, and failures; all text is escaped."""
        answers = [(variant, " ".join(sentences)) for variant, sentences in self.list_answers()]
        failures = [(run.label, f"{run.state}: {run.reason} ({run.directory})") for run in self.failed]
        return f"<p>{escape(self.headline)}</p>{build_table([*answers, *failures])}"

    def frame(self) -> Any:
        """The runs as a pandas DataFrame with one row each, and the columns of the command's CSV file."""
        return import_optional("pandas", "frame()").read_csv(StringIO(format_csv(self)))

    def list_answers(self) -> list[tuple[str, list[str]]]:
        """Return the label of each variant but the baseline, and the answers for it in sentences."""
        return [(variant.label, list(parts)) for variant, parts in format_answers(self)]


def law(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    target: str | None = None,
    holdout: str | None = None,
    baseline: str | None = None,
    embeddings: bool = False,
    extrapolate: bool = False,
    replicates: int = 1000,
    seed: int = 0,
) -> LawFindings:
    """Fit a scaling law to runs and return every figure that `titan.law` prints, as data; see docs/laws.md.

    Args:
        sources: directories of runs or sweeps, or one CSV file with columns N, D and loss.
        target: parameters and tokens to predict, as in "1.4B,28B".
        holdout: runs with more parameters are predicted instead of fitted, as in "500M".
        baseline: variant that the others are compared with; None: the first.
        embeddings: whether embeddings and head count as parameters.
        extrapolate: whether to predict beyond 30 times the compute of the largest rung.
        replicates: fits to randomised losses, for intervals.

    Raises:
        ConfigError: for a source that is not there, runs that determine no law, and a target out of reach.
    """
    values = {
        "sources": _list_paths(sources), "target": target, "holdout": holdout, "baseline": baseline,
        "embeddings": embeddings, "extrapolate": extrapolate, "replicates": replicates, "seed": seed,
    }  # fmt: skip
    findings = study_sources(settings.build(LawSettings, values))
    return replace(findings, text=law_report.format_text(findings))


class LoadedModel(NamedTuple):
    """A trained model: a torch module in fp32 that computes without gradients, and the tokenizer; None without one."""

    module: Any
    tokenizer: Tokenizer | None

    def __repr__(self) -> str:
        parameters = format_count(sum(parameter.numel() for parameter in self.module.parameters()))
        facts = {"module": type(self.module).__name__, "parameters": parameters}
        return format_fields("LoadedModel", facts | {"tokenizer": getattr(self.tokenizer, "name", "none")})


def load(
    source: str | os.PathLike[str], *, step: int | None = None, device: str = "cpu", tokenizer: str | None = None
) -> LoadedModel:
    """Return trained weights as a whole torch module, whatever layout saved them, and the tokenizer.

    `module.head(module(tokens))` are the logits of tokens [B, T].

    Args:
        source: a run, a checkpoint, weights in Hugging Face's or Meta's format, or OWNER/NAME on the hub.
        step: of the run's checkpoint; None: the last complete one.
        device: "cpu", "cuda", or "auto".
        tokenizer: of weights without one, or whose file is gone; None: that of the weights.

    Raises:
        ConfigError: when there are no such weights, or their model is of a class that is not trusted.
    """
    folder = os.fspath(source)
    check_source(folder)
    machine = devices.detect_machine(device, setting="device")
    import torch  # only now: importing this module does not load it

    from titan.generation.worker import load_model
    from titan.parallelism.mesh import World
    from titan.weights.formats import open_weights

    weights = open_weights(folder if step is None else manifest.folder_of(Path(folder), step), "", verify=True)
    world = World(rank_info.RankInfo(), Layout(), torch.device(machine.device))
    name = tokenizer or weights.tokenizer
    return LoadedModel(load_model(weights, Precision(compute="fp32"), world), load_tokenizer(name) if name else None)


def generate(
    source: str | os.PathLike[str], prompt: str | Sequence[str] | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Continue prompts; return the `prompt`, `text`, `tokens` and `finish_reason` of each continuation.

    Args:
        source: as for `load`.
        prompt: a text or several; None where `tokens` are given.
        options: other settings of `titan.generate`, such as max_tokens=64, samples=4, temperature=0.

    Raises:
        ConfigError: for a setting that can't work, and for prompts that don't fit the model.
        RunError: when a rank fails.
    """
    with make_scratch_folder() as folder:
        file, prompts = folder / "continuations.jsonl", folder / "prompts.jsonl"
        if prompt is not None:
            texts = [prompt] if isinstance(prompt, str) else prompt
            prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            options["prompts"] = str(prompts)
        values = dict(source=os.fspath(source), to=str(file), **{"parallelism": {}, **options})
        _run(run_generation, settings.build(GenerationSettings, values))
        return [json.loads(line) for line in file.read_text().splitlines()]


def evaluate(source: str | os.PathLike[str], *overrides: str, **options: Any) -> dict[str, dict[str, float]]:
    """Measure trained weights; return the figures of the weights, and of each average, by their names.

    Args:
        source: a run, or weights as for `load`.
        overrides: of the run's own command line, such as "parallelism=single".
        options: settings of `titan.evaluate`, such as step=100, sets=["book.txt"], average=4.

    Raises:
        ConfigError: when there is nothing to measure, or it can't be measured here.
        RunError: when a rank fails.
    """
    _check_process("evaluate")
    with make_scratch_folder() as folder:
        file = folder / "evaluation.json"
        asked = settings.build(EvaluationSettings, dict(source=os.fspath(source), to=str(file), **options))
        _run(run_evaluation, asked, overrides)
        results: dict[str, dict[str, float]] = json.loads(file.read_text())["results"]
        return results


def convert(source: str | os.PathLike[str], to: str | os.PathLike[str], **options: Any) -> Path:
    """Convert weights to another format, and return the folder.

    Args:
        source: as for `load`.
        to: the folder to write.
        options: other settings of `titan.convert`, such as format="meta", dtype="keep", overwrite=True.

    Raises:
        ConfigError: for a source without weights, and a target that can't be written.
    """
    asked = settings.build(Convert, {"source": os.fspath(source), "to": os.fspath(to), **options})
    _run(run_conversion, asked)
    return Path(to)


def _run(command: Callable[[CommandLine[Any]], int], asked: Any, overrides: Sequence[str] = ()) -> None:
    """Do what a command does with some settings, and print nothing; raise the error of its ranks."""
    reasons: list[str] = []
    prepare_environment(os.environ)
    with _silence(True):
        code = command(CommandLine(asked, list(overrides), report=reasons.append))
    _check_code(code, reasons, f"{asked.source}: its ranks ended with exit code {code}.")
