"""Plan a run: `python -m titan.plan [AXIS=CHOICE ...] [AXIS.SETTING=VALUE ...] [plan.search=true]`; see `--help`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers.command import plan_command
from titan.config.arguments import arguments, describe, shows
from titan.config.settings import setting
from titan.console import output
from titan.errors import ConfigError, RunError, exit_code
from titan.estimate import plan as estimate
from titan.estimate import search
from titan.estimate.refine import UNCHANGED, Refinement
from titan.files.atomic import write_atomic
from titan.report.render import plan_text
from titan.run.resolve import resolve

if TYPE_CHECKING:
    from launchers.trials import Trial
    from titan.run.run import Run

HELP = """\
Predict memory, speed and cost of a run: python -m titan.plan [OVERRIDES OF titan.train] [SETTING=VALUE ...]

  python -m titan.plan model=llama8b parallelism=fsdp cluster=h100         one run on eight H100
  python -m titan.plan recipe=bench_405b_512 plan.search=true              a faster layout on the same devices
  python -m titan.plan -m model=llama1b parallelism=ddp,fsdp cluster=h100  a sweep, one line per trial
  python -m titan.plan recipe=train_8b to=plan.json                        all figures

Needs no GPU: the cluster axis describes the devices. It computes on what titan.train would compose, and starts nothing.

Settings and their defaults:

{settings}

Exit codes: 0 success, 1 error, 2 wrong arguments (the message says what to change), 130 interrupted.
"""
PREFIX = "plan."
"""Begins the settings of this command."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.plan`."""

    search: bool = setting(False, "search all layouts on the same devices for faster ones")
    keep: int = setting(10, "layouts that a search shows", at_least=1, cap=1000)
    fit: str | None = setting(None, "a run, or a folder of runs, whose measured speed and memory refine the prediction")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _main(given))


def _main(given: list[str]) -> int:
    if shows([g for g in given if g in ("-h", "--help", "--version")], HELP.format(settings=_settings_help())):
        return 0
    own = [text.removeprefix(PREFIX) for text in given if text.startswith(PREFIX)]
    files = [Path(text.removeprefix("to=")) for text in given if text.startswith("to=")]
    settings = arguments(Settings, own)
    _check_files(files)
    rest = [text for text in given if not text.startswith((PREFIX, "to="))]
    return plan_command(
        rest, lambda run: _plan(run, settings, files), lambda trials: _plan_trials(trials, settings.fit)
    )


def _settings_help() -> str:
    lines = describe(Settings).splitlines()
    return "\n".join([*(f"  {PREFIX}{line.strip()}" for line in lines), "  to=                  a file: .json"])


def _check_files(files: Sequence[Path]) -> None:
    for file in files:
        if file.suffix != ".json":
            raise ConfigError(f"to={file}: the format is not known; give a file whose name ends in .json.")
        if not file.parent.is_dir():
            raise ConfigError(f"to={file}: there is no directory {file.parent}; give another file.")


def _plan(run: Run, settings: Settings, files: Sequence[Path]) -> int:
    planned = estimate.plan(run, run.layout, run.microbatches, run.machine)
    fitted = _fit(run, settings.fit) if settings.fit is not None else None
    planned, factors = (fitted.plan(planned), fitted.factors) if fitted else (planned, UNCHANGED)
    how: dict[str, Any] = {"accepts": lambda candidate: _accepted(run, candidate), "factors": factors}
    changes = search.best_changes(run, run.layout, run.microbatches, run.machine, **how)
    print(plan_text.text(run, planned, changes), end="")
    found = None
    if settings.search:
        found = search.search(run, run.layout.devices, run.machine, keep=settings.keep, **how)
        print(plan_text.search_text(run, planned, found), end="")
    for file in files:
        _write(file, plan_text.as_json(planned, found) | ({"fit": asdict(fitted)} if fitted else {}))
    return 0


def _fit(run: Run, source: str) -> Refinement:
    """Return what the user's own runs ask for, and print it.

    Raises:
        ConfigError: when no run can be used.
    """
    from titan.report import own_runs  # only now: a plan without it need not wait for numpy

    runs = own_runs.read(source, run)
    fitted = runs.refinement()
    print(own_runs.text(runs, fitted))
    return fitted


def _plan_trials(trials: Sequence[Trial], source: str | None) -> list[int]:
    """Print one line per trial of a sweep."""
    plans = [estimate.plan(t.run, t.run.layout, t.run.microbatches, t.run.machine) for t in trials]
    if source is not None:
        fits: dict[tuple[str, ...], Refinement] = {}
        for trial in trials:
            if _kind(trial.run) not in fits:
                fits[_kind(trial.run)] = _fit(trial.run, source)
        plans = [fits[_kind(trial.run)].plan(planned) for trial, planned in zip(trials, plans, strict=True)]
    print(plan_text.grid_text([t.label for t in trials], plans), end="")
    return [0] * len(trials)


def _kind(run: Run) -> tuple[str, ...]:
    """Return what decides which runs refine a prediction, and their own: device, compute type and its hardware."""
    return run.machine.name, run.precision.compute, repr(run.cluster.hardware)


def describe_trials(trials: Sequence[Trial]) -> str:
    """Return the plan of a trial, or one line per trial of a sweep; else a line that says what is missing."""
    planned: list[tuple[Trial, estimate.Plan]] = []
    missing = dict[str, None]()
    for trial in trials:
        try:
            run = trial.run
            planned.append((trial, estimate.plan(run, run.layout, run.microbatches, run.machine)))
        except ConfigError as error:
            missing[f"no plan: {error}"] = None
    return "\n".join([_short(planned, alone=len(trials) == 1), *missing]).strip() + "\n"


def _short(planned: Sequence[tuple[Trial, estimate.Plan]], alone: bool) -> str:
    if not planned:
        return ""
    if alone:
        return plan_text.text(planned[0][0].run, planned[0][1])
    return plan_text.grid_text([trial.label for trial, _ in planned], [plan for _, plan in planned])


def _accepted(run: Run, candidate: search.Candidate) -> bool:
    """Return whether titan.train would start a layout."""
    parallelism = replace(candidate.recipe.parallelism, microbatches=candidate.microbatches)
    changed = replace(run, parallelism=parallelism, memory=candidate.recipe.memory, compile=candidate.recipe.compile)
    try:
        resolve(changed, run.machine, run.directory, elsewhere=True)
    except ConfigError:
        return False
    return True


def _write(file: Path, content: dict[str, Any]) -> None:
    try:
        write_atomic(file, json.dumps(content, indent=1) + os.linesep)
    except OSError as error:
        raise RunError(f"to={file}: can't be written ({error.strerror}).") from error
    print(f"written: {file}")


def cli() -> None:
    """The console script `titan-plan`."""
    output.run(main)


if __name__ == "__main__":
    cli()
