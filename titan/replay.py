"""Repeat a step of a run and look at it: `python -m titan.replay RUN step=N [KEY=VALUE ...]`; see `--help`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.checkpoint import manifest
from titan.cluster.environment import prepare_environment
from titan.config.command import Command, CommandLine
from titan.console import output
from titan.console.text import sanitize_line
from titan.errors import ConfigError
from titan.files.output_files import check_output_file, write_output_file
from titan.files.run_directory import RUN, describe_runs_below
from titan.metrics.reader import METRICS, read_steps
from titan.training.replay import show
from titan.training.replay.job import ReplayJob, read_rank_replays
from titan.training.replay.request import ReplayPlan, Settings, find_changes, find_start, plan_replay
from titan.training.replay.result import ReplayedStep, choose_tolerance, compare_replays, merge_ranks

if TYPE_CHECKING:
    from titan.report.parity import StepDifference
    from titan.training.replay.weights import WeightDifference

COMMAND = Command(
    "titan.replay",
    "Repeat a step of a run, and look at it.",
    {
        "runs/first step=120": "from the nearest checkpoint before it",
        "runs/first step=120 parallelism=single": "on another layout",
        "runs/first step=120 against=precision=fp32": "and the same step in another precision",
        "runs/first step=120 against=runs/second": "and that step of another run",
        "runs/first against=runs/second": "and the first step at which both runs differ",
    },
    Settings,
    overrides="Other arguments are overrides of the run's own command line.",
    notes="Nothing is written into the run's directory.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    prepare_environment(os.environ)
    return COMMAND.run(_run_replay, argv)


def _run_replay(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    file = None if settings.to is None else check_output_file(settings.to, (".json",))
    for word in command_line.overrides:
        if os.path.isfile(os.path.join(word, RUN)):
            raise ConfigError(f"{word}: is another run; give against={word} to compare with it.")
    chosen_settings = _choose_step(settings)
    if chosen_settings is None:
        return 0
    from launchers.scratch import make_scratch_folder

    with make_scratch_folder() as folder:
        content = _replay_sides(chosen_settings, command_line.overrides, folder)
    if isinstance(content, int):
        return content
    if file is not None:
        write_output_file(file, show.to_text(content))
    return 0


def _replay_sides(settings: Settings, overrides: Sequence[str], folder: Path) -> dict[str, Any] | int:
    """Replay and print; return what is shown as plain data, or the exit code of ranks that failed."""
    sides = _plan_replays(settings, overrides, folder)
    is_run = _is_run(settings.against)
    observations: list[ReplayedStep] = []
    for index, side in enumerate(sides):
        side = _align_start(side, sides[0], settings) if index and not is_run else side
        save = is_run or (index == 0 and len(sides) > 1 and settings.step > 1)
        code, observation = _run_side(side, settings, save)
        if observation is None:
            return code
        observations.append(observation)
    return _print_report(settings, sides, observations)


def _choose_step(settings: Settings) -> Settings | None:
    """Return the settings with the step to look at; None where both runs agree, which is printed.

    Raises:
        ConfigError: where no step is given and there is no other run.
    """
    if settings.step:
        return settings
    if not _is_run(settings.against):
        raise ConfigError("step=0: give the step to look at, or against=RUN, another run, to find where they differ.")
    from titan.report import run_pair  # only now: a step that is given needs no metrics

    pair = run_pair.read_pair(settings.run, str(settings.against))
    print(pair.describe())
    if pair.difference is None:
        return None
    start = settings.start if settings.start is not None or pair.has_checkpoints else 0
    return replace(settings, step=pair.difference.step, start=start)


def _is_run(against: str | None) -> bool:
    """Whether `against` names a run; else it holds overrides.

    Raises:
        ConfigError: when it is neither.
    """
    if against is None:
        return False
    if (Path(against).expanduser() / RUN).is_file():
        return True
    if runs := describe_runs_below(against):
        raise ConfigError(f"against={against}: {runs}.")
    if "=" not in against:
        raise ConfigError(f"against={against}: is no run's directory and no override; give runs/NAME or SETTING=VALUE.")
    return False


def _plan_replays(settings: Settings, overrides: Sequence[str], folder: Path) -> list[ReplayPlan]:
    """Return the replay, and the one that it is compared with."""
    from launchers.command import compose_single

    name = settings.run
    requests = [(name, list(overrides))]
    if settings.against is not None:
        is_run = _is_run(settings.against)
        requests.append(
            (settings.against, list(overrides)) if is_run else (name, [*overrides, *shlex.split(settings.against)])
        )
    plans = []
    for index, (run, words) in enumerate(requests):
        replay_folder = folder / f"replay-{index}"
        replay_folder.mkdir()
        plans.append(
            plan_replay(run, settings, words, replay_folder, compose_single, _read_recorded_step(run, settings.step))
        )
    return plans


def _read_recorded_step(name: str, step: int) -> dict[str, Any]:
    """Return the run's line of a step; empty where it has none."""
    records = read_steps(Path(name).expanduser() / METRICS)
    return next((record for record in records if record["step"] == step and "loss" in record), {})


def _align_start(side: ReplayPlan, first: ReplayPlan, settings: Settings) -> ReplayPlan:
    """Return the second replay, which begins with the weights that the first one has before the step."""
    step = settings.step - 1
    saved = manifest.folder_of(Path(first.run.directory), step)
    if not saved.is_dir():  # the first one began there
        return replace(side, attempt=replace(first.attempt, ids=side.attempt.ids))
    rows = side.run.training.count_rows_before(settings.step)
    return replace(side, attempt=replace(side.attempt, checkpoint=str(saved), weights=None, step=step, rows=rows))


def _run_side(side: ReplayPlan, settings: Settings, save: bool) -> tuple[int, ReplayedStep | None]:
    """Run the ranks of a replay; return their exit code and what they saw, None after an error."""
    job = ReplayJob(side.run, side.attempt, settings.step, settings.tokens, save)
    ranks, directory = side.run.layout.devices, Path(side.run.directory)
    start = f"the checkpoint of step {side.attempt.step}" if side.attempt.step else "the initial weights"
    print(f"titan: {'; '.join((f'from {start}, {side.run.layout}', *side.notes))}", file=sys.stderr)
    if ranks == 1:
        from titan.cluster.rank_info import RankInfo
        from titan.training.replay.worker import work

        code = work(job, RankInfo())
    else:
        from launchers.supervisor import run_ranks

        code = run_ranks(job, ranks, directory, module="titan.training.replay.rank")
    if code:
        return code, None
    first = side.run.training.count_rows_before(settings.step)
    return 0, merge_ranks(read_rank_replays(directory, ranks), side.mix, first, settings.tokens)


def _print_report(
    settings: Settings, sides: Sequence[ReplayPlan], observations: Sequence[ReplayedStep]
) -> dict[str, Any]:
    """Print what was observed; return it as plain data."""
    for line in show.format_replay(observations[0], sides[0].recorded):
        print(line)
    content = show.as_json(observations[0], sides[0].recorded)
    if len(observations) > 1:
        content |= _print_comparison(settings, sides, observations)
    return content


def _print_comparison(
    settings: Settings, sides: Sequence[ReplayPlan], observations: Sequence[ReplayedStep]
) -> dict[str, Any]:
    """Print two replays side by side: their modules, where both begin the step alike, and a verdict."""
    a, b = observations
    limit = settings.tolerance or choose_tolerance(*(side.run.precision for side in sides))
    weights = _compare_starts(sides, settings.step) if _is_run(settings.against) else []
    print()
    for line in show.format_figures((settings.run[-22:], str(settings.against)[-22:]), a, b):
        print(line)
    for line in ("", *show.format_weights(settings.step, weights, limit)) if weights else ():
        print(line)
    content: dict[str, Any] = {"against": show.as_json(b, sides[1].recorded)}
    content["weights"] = {difference.name: difference.relative for difference in weights}
    return content | _print_verdict(settings, observations, weights, limit)


def _compare_starts(sides: Sequence[ReplayPlan], step: int) -> list[WeightDifference]:
    """Return how far the weights of two runs are apart before a step."""
    from titan.training.replay.weights import compare_weights  # only now: it imports torch

    return compare_weights(*(find_start(side, step) for side in sides))


def _print_verdict(
    settings: Settings,
    observations: Sequence[ReplayedStep],
    weights: Sequence[WeightDifference],
    limit: float,
) -> dict[str, Any]:
    """Print the modules' differences and which is the first, or why they are not compared."""
    a, b = observations
    reason = show.explain_unequal_start(a, b, weights, limit)
    step_differences = [] if reason else compare_replays(a, b)
    print()
    for line in () if reason else (*show.format_modules(step_differences), ""):
        print(line)
    verdict = reason or show.format_verdict(step_differences, limit)
    print(verdict)
    if reason and weights and weights[0].relative > limit:
        for line in _advise_earlier(settings):
            print(line)
    return {"differences": {"/".join(d.key): d.relative for d in step_differences}, "verdict": verdict}


def _advise_earlier(settings: Settings) -> list[str]:
    """Return what to look at where weights have drifted: an earlier step, or this one from the weights of one run."""
    lines = []
    difference = _find_difference(settings)
    if difference is not None and difference.step < settings.step:
        lines.append(f"the runs differ since {difference.describe()}: give step={difference.step}")
    if changes := find_changes(settings.run, str(settings.against)):
        words = [settings.run, f"step={settings.step}", f"against={shlex.join(changes)}"]
        command = sanitize_line(f"python -m titan.replay {shlex.join(words)}")
        lines.append(f"the same step from the weights of {settings.run}: {command}")
    return lines


def _find_difference(settings: Settings) -> StepDifference | None:
    """Return the first step at which the metrics of both runs differ; None where they don't, or can't be compared."""
    from titan.report import run_pair

    try:
        return run_pair.read_pair(settings.run, str(settings.against)).difference
    except ConfigError:
        return None


def cli() -> None:
    """The console script `titan-replay`."""
    output.run(main, keep_going=False)


if __name__ == "__main__":
    cli()
