"""Repeat a step of a run and look at it: `python -m titan.replay RUN step=N [KEY=VALUE ...]`; see `--help`."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from titan.config.command import Command, CommandLine
from titan.config.optional import advise_extra
from titan.config.output_files import check_output_file, write_output_file
from titan.console.numbers import format_plural
from titan.console.text import sanitize_line
from titan.errors import ConfigError
from titan.files.run_directory import RUN, describe_runs_below
from titan.metrics.reader import METRICS, read_steps
from titan.numerics.differences import START, compare_routes, compare_tensors
from titan.training.replay import show
from titan.training.replay.compare import ReplayComparison, compare_plans, run_passes, run_single
from titan.training.replay.observation import ReplayedStep
from titan.training.replay.request import (
    ReplayEndedError,
    ReplayJob,
    ReplayPlan,
    Settings,
    check_comparison,
    find_changes,
    plan_replay,
)

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
    uses_torch=True,
    keep_going=False,
)


def _run_replay(command_line: CommandLine[Settings]) -> int:
    settings, overrides = command_line.settings, command_line.overrides
    file = _check_file(settings)
    for word in overrides:
        if os.path.isfile(os.path.join(word, RUN)):
            raise ConfigError(f"{word}: is another run; give against={word} to compare with it.")
    if settings.python is not None:
        from launchers.supervisor import check_interpreter

        check_interpreter(settings.python)
    chosen_settings = _choose_step(settings)
    if chosen_settings is None:
        return 0
    from launchers.supervisor import make_scratch_folder

    try:
        if settings.leave is not None:  # for another interpreter, which reads what the ranks saw
            folder = Path(settings.leave).expanduser()
            if not folder.is_dir() or any(folder.iterdir()):
                raise ConfigError(f"leave={settings.leave}: is no empty folder; create one.")
            (side,) = _plan_replays(replace(chosen_settings, against=None), overrides, folder)
            run_passes(side, replace(chosen_settings, tokens=0), exact=True)
            return 0
        with make_scratch_folder() as folder:
            content, page = _replay_sides(chosen_settings, overrides, folder)
    except ReplayEndedError as ended:  # the ranks have said why
        return ended.code
    if file is not None:
        write_output_file(file, page if file.suffix == ".html" else show.to_text(content))
    return 0


def _check_file(settings: Settings) -> Path | None:
    """Return the file to write; raises ConfigError when it can't be."""
    file = None if settings.to is None else check_output_file(settings.to, (".json", ".html"))
    if file is None or file.suffix != ".html":
        return file
    if settings.against is None and settings.python is None:
        raise ConfigError(f"to={settings.to}: a page shows two replays; add against=..., or write a .json file.")
    if importlib.util.find_spec("jinja2") is None:
        raise ConfigError(f"to={settings.to}: needs jinja2, which is not installed: {advise_extra('compare')}.")
    return file


def _replay_sides(settings: Settings, overrides: Sequence[str], folder: Path) -> tuple[dict[str, Any], str]:
    """Replay and print; return what is shown as plain data, and as a page where one is asked for."""
    sides = _plan_replays(settings, overrides, folder)
    check_comparison(settings, sides)
    if len(sides) == 1:
        return _print_step(run_single(sides[0], settings), sides[0]), ""
    comparison = compare_plans(sides[0], sides[1], settings, shares_start=not _is_run(settings.against))
    content = _print_step(comparison.a, sides[0]) | _print_comparison(settings, sides, comparison)
    wants_page = str(settings.to).endswith(".html")
    return content, _render_page(settings, comparison) if wants_page else ""


def _start_foreign(settings: Settings, overrides: Sequence[str], side: ReplayPlan, job: ReplayJob) -> int:
    """Run the ranks of the second replay by another interpreter; return its exit code."""
    from launchers.supervisor import run_module

    if job.repeats:
        raise RuntimeError("repetitions are those of the first replay")
    is_run, left = _is_run(settings.against), Path(side.run.directory) / "left"
    left.mkdir()
    words = [str(settings.against) if is_run else settings.run, f"step={settings.step}", f"leave={left}"]
    words += [f"exact={settings.exact}"] if settings.exact != "fp32" else []
    words += [f"begin={job.attempt.checkpoint}"] if job.attempt.checkpoint else ["start=0"]
    words += [*overrides, *(() if is_run else shlex.split(settings.against or ""))]
    print(f"titan: by {sanitize_line(str(settings.python))}, {side.run.layout}", file=sys.stderr)
    code = run_module(str(settings.python), "titan.replay", words)
    for file in left.glob("*/replayed-*.npz"):
        if file.is_file() and not file.is_symlink():
            file.rename(Path(side.run.directory) / file.name)
    return code


def _render_page(settings: Settings, comparison: ReplayComparison) -> str:
    from titan.report.render.replay_report import render_page  # only here: it needs jinja2

    a, b = comparison.a.record, comparison.b.record
    figures = [(key, f"{a[key]:.6g}", f"{b[key]:.6g}") for key in ("loss", "grad_norm", "lr")]
    title = f"Step {a['step']:,} of {settings.run} against {_name_other(settings)}"
    return render_page(comparison.answers, title, figures, f"titan.replay, {datetime.now():%Y-%m-%d %H:%M}")


def _name_other(settings: Settings) -> str:
    """Return what the second replay is, in words."""
    return " ".join(filter(None, (settings.against, f"python={settings.python}" if settings.python else "")))


def _choose_step(settings: Settings) -> Settings | None:
    """Return the settings with the step to look at; None where both runs agree, which is printed."""
    if settings.step:
        return settings
    if not _is_run(settings.against):
        raise ConfigError("step=0: give the step to look at, or against=RUN, another run, to find where they differ.")
    from titan.report import parity  # only now: a step that is given needs no metrics

    pair = parity.read_pair(settings.run, str(settings.against))
    print(pair.describe())
    if pair.difference is None:
        return None
    start = settings.start if settings.start is not None or pair.has_checkpoints else 0
    return replace(settings, step=pair.difference.step, start=start)


def _is_run(against: str | None) -> bool:
    """Whether `against` names a run; else it holds overrides; raises ConfigError when it is neither."""
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

    requests = [(settings.run, list(overrides))]
    if settings.against is not None or settings.python is not None:
        words = [*overrides, *shlex.split(settings.against or "")]
        is_run = _is_run(settings.against)
        requests.append((str(settings.against), list(overrides)) if is_run else (settings.run, words))
    plans = []
    for index, (run, words) in enumerate(requests):
        replay_folder = folder / f"replay-{index}"
        replay_folder.mkdir()
        records = read_steps(Path(run).expanduser() / METRICS)
        recorded = next((line for line in records if line["step"] == settings.step and "loss" in line), {})
        plans.append(plan_replay(run, settings, words, replay_folder, compose_single, _start_ranks, recorded))
    if settings.python is not None:
        start = partial(_start_foreign, settings, list(overrides))
        plans[1] = replace(plans[1], is_foreign=True, start=start)
    return plans


def _start_ranks(side: ReplayPlan, job: ReplayJob) -> int:
    """Run the ranks of a replay; return their exit code."""
    from launchers.supervisor import run_job

    print(f"titan: {_describe_job(side, job)}", file=sys.stderr)
    return run_job(job, side.run.layout.devices, Path(side.run.directory))


def _describe_job(side: ReplayPlan, job: ReplayJob) -> str:
    """Return where a replay starts, its layout, its precisions, and what differs from the run."""
    start = f"the checkpoint of step {job.attempt.step}" if job.attempt.step else "the initial weights"
    if before := job.step - 1 - job.attempt.step:
        start += f" ({format_plural(before, 'step')} before step {job.step})"
    precisions = ", then ".join(run.precision.describe() for _, run in job.passes)
    if job.repeats:
        precisions = f"{job.repeats} repetitions, randomly rounded, {precisions}"
    return "; ".join((f"from {start}, {side.run.layout}, {precisions}", *side.notes))


def _print_step(seen: ReplayedStep, side: ReplayPlan) -> dict[str, Any]:
    """Print what was observed; return it as plain data."""
    for line in show.format_replay(seen, side.recorded):
        print(line)
    return show.as_json(seen, side.recorded)


def _print_comparison(settings: Settings, sides: Sequence[ReplayPlan], comparison: ReplayComparison) -> dict[str, Any]:
    """Print two replays side by side, their modules where both begin the step alike, and the answers."""
    a, b, answers = comparison.a, comparison.b, comparison.answers
    print()
    for line in show.format_figures((settings.run[-22:], _name_other(settings)[-22:]), a, b):
        print(line)
    print()
    for line in (*show.format_modules(answers), "") if answers.comparable else ():
        print(line)
    for line in show.format_routes(compare_routes(a.routes, b.routes), b.figures):
        print(line)
    for sentence in (*answers.sentences, *comparison.operations, answers.verdict):
        print(sentence)
    if not answers.comparable and answers.findings[0].kind == START and _is_run(settings.against):
        for line in _advise_earlier(settings):
            print(line)
    weights = {d.name: d.relative for d in compare_tensors(a.tensors, b.tensors, START)}
    content = {"against": show.as_json(b, sides[1].recorded), "weights": weights}
    return content | show.answers_as_json(answers)


def _advise_earlier(settings: Settings) -> list[str]:
    """Return what to look at where weights have drifted: an earlier step, or this one from the weights of one run."""
    from titan.report import parity

    lines = []
    with suppress(ConfigError):  # they can't be compared
        difference = parity.read_pair(settings.run, str(settings.against)).difference
        if difference is not None and difference.step < settings.step:
            lines.append(f"the runs differ since {difference.describe()}: give step={difference.step}")
    if changes := find_changes(settings.run, str(settings.against)):
        start = [] if settings.start is None else [f"start={settings.start}"]
        words = [settings.run, f"step={settings.step}", *start, f"against={shlex.join(changes)}"]
        command = sanitize_line(f"python -m titan.replay {shlex.join(words)}")
        lines.append(f"the same step from the weights of {settings.run}: {command}")
    return lines


main, cli = COMMAND.bind(_run_replay)

if __name__ == "__main__":
    cli()
