"""Plan a run: `python -m titan.plan [AXIS=CHOICE ...] [AXIS.SETTING=VALUE ...] [plan.search=true]`; see `--help`."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers.command import plan_command
from titan.cluster.environment import prepare_environment
from titan.config.arguments import describe_settings, parse_arguments, show_help
from titan.config.settings import setting
from titan.console import output
from titan.console.text import redact
from titan.errors import ConfigError, RunError, exit_code
from titan.estimate import overhead, search
from titan.estimate import plan as estimate
from titan.estimate.refine import UNCHANGED, Refinement
from titan.files.atomic import write_atomic
from titan.report.render import plan_text
from titan.report.render.plan_data import PlanOutcome
from titan.run.resolve import resolve

if TYPE_CHECKING:
    from launchers.trials import Trial
    from titan.estimate.traced.result import TracedStep
    from titan.run.run import Run

HELP = """\
Predict memory, speed and cost of a run: python -m titan.plan [OVERRIDES OF titan.train] [SETTING=VALUE ...]

  python -m titan.plan model=llama8b parallelism=fsdp cluster=h100         one run on eight H100
  python -m titan.plan recipe=bench_405b_512 plan.search=true              a faster layout on the same devices
  python -m titan.plan recipe=bench_8b_8 plan.trace=true                   other figures, from a trace of the step
  python -m titan.plan -m model=llama1b parallelism=ddp,fsdp cluster=h100  a sweep, one line per trial
  python -m titan.plan recipe=train_8b to=[plan.html,plan.json]            charts as a page, and all figures

Needs no GPU: the cluster axis describes the devices. It computes on what titan.train would compose, and starts nothing.

Settings and their defaults:

{settings}

Exit codes: 0 success, 1 error, 2 wrong arguments (the message says what to change), 130 interrupted.
"""
PREFIX, TO = "plan.", "to="
"""Begin the settings of this command."""
FORMATS = (".html", ".json")
"""Of files that it writes."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.plan`."""

    search: bool = setting(False, "search all layouts on the same devices for faster ones")
    keep: int = setting(10, "layouts that a search shows", at_least=1, cap=1000)
    trace: bool = setting(False, "trace a real step of a rank of each pipeline rank on tensors without values")
    whole: bool = setting(False, "with plan.trace: trace all blocks, instead of a few that are repeated")
    fit: str | None = setting(None, "a run, or a folder of runs, whose measured speed and memory refine the prediction")


@dataclass(frozen=True)
class OutputSettings:
    """Where `python -m titan.plan` writes to."""

    to: str | tuple[str, ...] | None = setting(
        None, "files to write: .html (charts) or .json (all figures); null: none"
    )

    def files(self) -> tuple[Path, ...]:
        """Return the files to write."""
        names = [self.to] if isinstance(self.to, str) else self.to or ()
        return tuple(Path(name).expanduser() for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run_planning(words))


def _run_planning(words: list[str]) -> int:
    help_text = HELP.format(settings=f"{describe_settings(Settings, PREFIX)}\n{describe_settings(OutputSettings)}")
    if show_help([g for g in words if g in ("-h", "--help", "--version")], help_text):
        return 0
    settings = parse_arguments(Settings, [text.removeprefix(PREFIX) for text in words if text.startswith(PREFIX)])
    files = parse_arguments(OutputSettings, [text for text in words if text.startswith(TO)]).files()
    _check_files(files)
    rest = [text for text in words if not text.startswith((PREFIX, TO))]
    provenance = f"{datetime.now():%Y-%m-%d %H:%M}: {redact(shlex.join(['python', '-m', 'titan.plan', *words]))}"
    return plan_command(
        rest,
        lambda run: _plan_run(run, settings, files, tuple(map(redact, rest)), provenance),
        lambda trials: _plan_trials(trials, settings, files, provenance),
    )


def _check_files(files: Sequence[Path]) -> None:
    """Raise ConfigError when a file can't be written, before any work."""
    for file in files:
        if file.suffix not in FORMATS:
            raise ConfigError(f"to={file}: unknown file format; use one of {', '.join(FORMATS)}.")
        if file.is_dir() or not file.parent.is_dir():
            problem = "is a directory" if file.is_dir() else f"there is no directory {file.parent}"
            raise ConfigError(f"to={file}: {problem}; give another file.")
        if file.suffix == ".html" and importlib.util.find_spec("jinja2") is None:
            raise ConfigError(f"to={file}: needs jinja2, which is not installed: pip install 'titan[compare]'.")


def _plan_run(run: Run, settings: Settings, files: Sequence[Path], overrides: tuple[str, ...], provenance: str) -> int:
    def accepts(candidate: search.LayoutCandidate) -> bool:
        return _is_accepted(run, candidate)

    planned = estimate.build_plan(run, run.layout, run.microbatches, run.machine)
    refinement = _fit_runs(run, settings.fit) if settings.fit is not None else None
    planned, factors = (refinement.refine_plan(planned), refinement.factors) if refinement else (planned, UNCHANGED)
    changes = search.find_best_changes(run, run.layout, run.microbatches, run.machine, accepts=accepts, factors=factors)
    search_result = None
    if settings.search:
        search_result = search.search_layouts(
            run, run.layout.devices, run.machine, keep=settings.keep, accepts=accepts, factors=factors
        )
    traced = _trace_step(run, settings) if settings.trace else None
    outcome = PlanOutcome(run, planned, changes, search_result, overrides, traced, refinement)
    print(plan_text.format_plan(outcome), end="")
    _write_files(
        files, {".json": lambda: plan_text.build_plan_data(outcome), ".html": lambda: _render_page(outcome, provenance)}
    )
    return 0


def _fit_runs(run: Run, source: str) -> Refinement:
    """Return what the user's own runs ask for, and print it.

    Raises:
        ConfigError: when no run can be used.
    """
    from titan.report import own_runs  # only now: a plan without it need not wait for numpy

    runs = own_runs.read(source, run)
    refinement = runs.fit_refinement()
    print(own_runs.format_fit(runs, refinement))
    return refinement


def _plan_trials(trials: Sequence[Trial], settings: Settings, files: Sequence[Path], provenance: str) -> list[int]:
    """Print one line per trial of a sweep, and write their figures."""
    if settings.search or settings.trace:
        raise ConfigError(f"plan.{'search' if settings.search else 'trace'}=true: takes one run; leave out -m.")
    plans = [estimate.build_plan(t.run, t.run.layout, t.run.microbatches, t.run.machine) for t in trials]
    if settings.fit is not None:
        plans = _refine_plans(trials, plans, settings.fit)
    labels = [t.label for t in trials]
    print(plan_text.format_grid(labels, plans), end="")
    _write_files(
        files,
        {
            ".json": lambda: plan_text.build_grid_data(labels, plans),
            ".html": lambda: _render_sweep_page(labels, plans, provenance),
        },
    )
    return [0] * len(trials)


def _refine_plans(trials: Sequence[Trial], plans: Sequence[estimate.Plan], source: str) -> list[estimate.Plan]:
    """Return the plans of trials, refined by the user's own runs of the same kind."""
    fits: dict[tuple[str, ...], Refinement] = {}
    for trial in trials:
        if _build_fit_key(trial.run) not in fits:
            fits[_build_fit_key(trial.run)] = _fit_runs(trial.run, source)
    return [fits[_build_fit_key(trial.run)].refine_plan(planned) for trial, planned in zip(trials, plans, strict=True)]


def _build_fit_key(run: Run) -> tuple[str, ...]:
    """Return what decides which runs refine a prediction, and their own: device, compute type and its hardware."""
    return run.machine.name, run.precision.compute, repr(run.cluster.hardware)


def describe_trials(trials: Sequence[Trial]) -> str:
    """Return the plan of a trial, or one line per trial of a sweep; else a line that says what is missing."""
    planned: list[tuple[Trial, estimate.Plan]] = []
    missing = dict[str, None]()
    for trial in trials:
        try:
            run = trial.run
            planned.append((trial, estimate.build_plan(run, run.layout, run.microbatches, run.machine)))
        except ConfigError as error:
            missing[f"no plan: {error}"] = None
    return "\n".join([_format_trials(planned, is_single=len(trials) == 1), *missing]).strip() + "\n"


def _format_trials(planned: Sequence[tuple[Trial, estimate.Plan]], is_single: bool) -> str:
    if not planned:
        return ""
    if is_single:
        return plan_text.format_plan(PlanOutcome(planned[0][0].run, planned[0][1]))
    return plan_text.format_grid([trial.label for trial, _ in planned], [plan for _, plan in planned])


def _trace_step(run: Run, settings: Settings) -> TracedStep:
    prepare_environment(os.environ)
    from titan.training.trace.ranks import trace_run  # only now: no other plan needs torch

    speeds = estimate.derive_device_speeds(
        run, estimate.resolve_hardware(run.cluster, run.machine), run.machine, run.layout
    )
    return trace_run(run, speeds, full=settings.whole)


def _render_page(outcome: PlanOutcome, provenance: str) -> str:
    from titan.report.render.plan_html import render_page

    run = outcome.run
    rank = max(range(len(outcome.plan.memory)), key=lambda rank: outcome.plan.memory[rank].bytes)
    steps = overhead.list_step_phases(run, run.layout, run.microbatches, rank, run.machine.device)
    return render_page(outcome, rank, steps, provenance)


def _render_sweep_page(labels: Sequence[str], plans: Sequence[estimate.Plan], provenance: str) -> str:
    from titan.report.render.plan_html import render_grid_page

    return render_grid_page(labels, plans, provenance)


def _is_accepted(run: Run, candidate: search.LayoutCandidate) -> bool:
    """Return whether titan.train would start a layout."""
    parallelism = replace(candidate.recipe.parallelism, microbatches=candidate.microbatches)
    changed = replace(run, parallelism=parallelism, memory=candidate.recipe.memory, compile=candidate.recipe.compile)
    try:
        resolve(changed, run.machine, run.directory, remote=True)
    except ConfigError:
        return False
    return True


def _write_files(files: Sequence[Path], contents: Mapping[str, Callable[[], Any]]) -> None:
    """Write each file with what its format takes: text, or plain data as JSON."""
    for file in files:
        content = contents[file.suffix]()
        text = content if isinstance(content, str) else json.dumps(content, indent=1) + os.linesep
        try:
            write_atomic(file, text)
        except OSError as error:
            raise RunError(f"to={file}: can't be written ({error.strerror}).") from error
        print(f"written: {file}")


def cli() -> None:
    """The console script `titan-plan`."""
    output.run(main)


if __name__ == "__main__":
    cli()
