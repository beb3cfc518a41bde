"""Repeat a step of a run and look at it: `python -m titan.replay RUN step=N [SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from titan.checkpoint import manifest
from titan.cluster.environment import prepare_environment
from titan.config.arguments import describe_settings, parse_arguments, show_help
from titan.console import output
from titan.errors import ConfigError, RunError, exit_code
from titan.files.atomic import write_atomic
from titan.metrics.reader import METRICS, read_steps
from titan.run.directory import RUN
from titan.training.replay import show
from titan.training.replay.job import ReplayJob, read_rank_replays
from titan.training.replay.request import ReplayPlan, Settings, plan_replay
from titan.training.replay.result import ReplayedStep, choose_tolerance, compare_replays, merge_ranks

HELP = f"""\
Repeat a step of a run and look at it: python -m titan.replay RUN step=N [SETTING=VALUE ...] [OVERRIDE ...]

  python -m titan.replay runs/first step=120                            from the nearest checkpoint before it
  python -m titan.replay runs/first step=120 parallelism=single         on another layout
  python -m titan.replay runs/first step=120 against=precision=fp32     and the same step in another precision
  python -m titan.replay runs/first step=120 against=runs/second        and that step of another run

{describe_settings(Settings)}

What is no setting is an override of the run's own command line. Nothing is written into the run's directory.

Exit codes: 0 done, 1 failed, 2 wrong settings (the message says how to correct them), 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    prepare_environment(os.environ)
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run_replay(words))


def _run_replay(words: list[str]) -> int:
    if show_help(words, HELP):
        return 0
    name, settings, overrides = parse_words(words)
    _check_output(settings)
    from launchers.scratch import make_scratch_folder

    with make_scratch_folder() as folder:
        sides = _plan_replays(name, settings, overrides, folder)
        observations: list[ReplayedStep] = []
        for index, side in enumerate(sides):
            side = _align_start(side, sides[0], settings) if index and not _is_run(settings.against) else side
            code, observation = _run_side(side, settings, save=index == 0 and len(sides) > 1)
            if observation is None:
                return code
            observations.append(observation)
    _print_report(name, settings, sides, observations)
    return 0


def parse_words(words: Sequence[str]) -> tuple[str, Settings, list[str]]:
    """Return the run, the settings, and the overrides of the run.

    Raises:
        ConfigError: when there is not one run, or a setting is wrong.
    """
    runs = [word for word in words if "=" not in word]
    if len(runs) != 1:
        typed_runs = " ".join(runs) or "nothing"
        raise ConfigError(f"{typed_runs}: a replay needs the directory of one run; give RUN step=N, or see --help.")
    keys = {field.name for field in fields(Settings)}
    settings_words = [word for word in words if word.partition("=")[0] in keys]
    return (
        runs[0],
        parse_arguments(Settings, settings_words),
        [word for word in words if "=" in word and word not in settings_words],
    )


def _check_output(settings: Settings) -> None:
    target = Path(settings.output or "x").expanduser()
    if target.is_dir() or not target.parent.is_dir():
        problem = "is a directory" if target.is_dir() else f"there is no directory {target.parent}"
        raise ConfigError(f"output={settings.output}: {problem}; give another file.")


def _is_run(against: str | None) -> bool:
    """Whether `against` names a run; else it holds overrides.

    Raises:
        ConfigError: when it is neither.
    """
    if against is None:
        return False
    if (Path(against).expanduser() / RUN).is_file():
        return True
    if "=" not in against:
        raise ConfigError(f"against={against}: is no run's directory and no override; give runs/NAME or SETTING=VALUE.")
    return False


def _plan_replays(name: str, settings: Settings, overrides: Sequence[str], folder: Path) -> list[ReplayPlan]:
    """Return the replay, and the one that it is compared with."""
    from launchers.command import compose_single

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
    name: str, settings: Settings, sides: Sequence[ReplayPlan], observations: Sequence[ReplayedStep]
) -> None:
    for line in show.format_replay(observations[0], sides[0].recorded):
        print(line)
    content = show.as_json(observations[0], sides[0].recorded)
    if len(observations) > 1:
        limit = settings.tolerance or choose_tolerance(*(side.run.precision for side in sides))
        step_differences = compare_replays(observations[0], observations[1])
        print()
        labels = name[-22:], str(settings.against)[-22:]
        for line in show.format_differences(labels, observations[0], observations[1], step_differences, limit):
            print(line)
        content["against"] = show.as_json(observations[1], sides[1].recorded)
        content["differences"] = {"/".join(d.key): d.relative for d in step_differences}
        content["verdict"] = show.format_verdict(step_differences, limit)
    if settings.output:
        try:
            write_atomic(Path(settings.output).expanduser(), show.to_text(content))
        except OSError as error:
            raise RunError(f"output={settings.output}: can't be written ({error.strerror}).") from error


def cli() -> None:
    """The console script `titan-replay`."""
    output.run(main, keep_going=False)


if __name__ == "__main__":
    cli()
