"""Plan a run: `python -m titan.plan [AXIS=CHOICE ...] [AXIS.SETTING=VALUE ...] [plan.search=true]`; see `--help`."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from launchers.command import plan_command
from launchers.session import TrialPlans
from titan.config.command import Command, CommandLine
from titan.config.optional import advise_extra
from titan.config.output_files import check_output_files, write_output_file
from titan.config.settings import setting
from titan.console.progress import progress_line
from titan.console.text import redact
from titan.errors import ConfigError
from titan.estimate import fit, overhead, search
from titan.estimate import plan as estimate
from titan.estimate.layout_options import LayoutCandidate
from titan.report.render import plan_text
from titan.report.render.plan_text import PlanOutcome
from titan.run import identity
from titan.run.compose import warn_of_small_work
from titan.run.resolve import list_typed_settings, resolve
from titan.sweep import budget
from titan.sweep.schema import parse_margin

if TYPE_CHECKING:
    from launchers.trials import Trial
    from titan.estimate.traced.replay import TracedStep
    from titan.run.run import Run

FORMATS = (".html", ".json")
"""Of files that it writes."""
TRACED_RESULTS = 3
"""Results of a search that plan.trace=true traces."""


@dataclass(frozen=True)
class PlanSettings:
    """The settings of `python -m titan.plan` that begin with `plan.`."""

    search: bool = setting(False, "search all layouts of the devices for the fastest; typed settings stay")
    keep: int = setting(10, "layouts that a search shows", at_least=1, cap=1000)
    trace: bool = setting(False, "trace a real step of a rank of each pipeline rank on tensors without values")
    whole: bool = setting(False, "with plan.trace: trace all blocks, instead of a few that are repeated")
    effect: str = setting("2%", "of a sweep: the effect, as a share of compute, that its seeds should show")
    noise: str | None = setting(
        None, "of a sweep: a folder of finished runs whose spread over seeds says how many seeds show the effect"
    )


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.plan`."""

    plan: PlanSettings = field(default_factory=PlanSettings)
    to: str | tuple[str, ...] | None = setting(
        None, "files to write: .html (charts) or .json (all figures); null: none"
    )


COMMAND = Command(
    "titan.plan",
    "Predict memory, speed and cost of a run.",
    {
        "recipe=train_8b cluster.price=2.5": "a run on 64 H100, with its cost",
        "recipe=bench_405b_512 plan.search=true": "a faster layout on the same devices",
        "recipe=bench_8b_8 plan.trace=true": "other figures, from a trace of the step",
        "-m recipe=train_8b memory=selective,full": "a sweep, one line per trial",
        "recipe=train_8b to=[plan.html,plan.json]": "charts as a page, and all figures",
    },
    Settings,
    overrides="Other arguments are those of titan.train.",
    options=("-m", "--multirun"),
    uses_torch=True,
    removed={
        "plan.fit": "measure this machine with titan.calibrate; titan.compare shows predicted beside measured values"
    },
    notes="Needs no GPU: the cluster axis describes the devices. It computes on what titan.train would compose, and "
    "starts nothing.",
)


def _run_planning(command_line: CommandLine[Settings]) -> int:
    settings, words = command_line.settings, command_line.words
    _check_settings(settings.plan)
    files = check_output_files(settings.to, FORMATS)
    for file in files:
        if file.suffix == ".html" and importlib.util.find_spec("jinja2") is None:
            raise ConfigError(f"to={file}: needs jinja2, which is not installed: {advise_extra('compare')}.")
    provenance = f"{datetime.now():%Y-%m-%d %H:%M}: {redact(shlex.join(['python', '-m', 'titan.plan', *words]))}"
    typed = tuple(map(redact, command_line.overrides))
    return plan_command(
        command_line.overrides,
        lambda run: _plan_run(run, settings.plan, files, typed, provenance),
        lambda trials: _plan_trials(trials, settings.plan, files, provenance),
        is_searched=settings.plan.search,
    )


def _check_settings(settings: PlanSettings) -> None:
    """Raise ConfigError for settings without effect."""
    if settings.whole and not settings.trace:
        raise ConfigError("plan.whole=true: takes effect with plan.trace=true only; add it, or leave plan.whole out.")
    if settings.keep != PlanSettings.keep and not settings.search:
        raise ConfigError(
            f"plan.keep={settings.keep}: takes effect with plan.search=true only; add it, or leave plan.keep out."
        )


def _plan_run(
    run: Run, settings: PlanSettings, files: Sequence[Path], overrides: tuple[str, ...], provenance: str
) -> int:
    estimate.check_sharding(run)
    search_result = _search_layouts(run, settings) if settings.search else None
    planned_run = run
    if search_result is not None and run.is_layout_open:
        planned_run = _resolve_candidate(run, search_result.best[0].candidate)
        choices = {axis: choice for axis, choice in run.choices.items() if axis != "parallelism"}  # it was searched
        planned_run = replace(planned_run, choices=choices)
        warn_of_small_work(planned_run, planned=True)
    planned = _build_plan(planned_run)
    traced = _trace_step(planned_run, settings) if settings.trace else None
    place = planned_run.layout, planned_run.microbatches
    outcome = PlanOutcome(
        planned_run,
        planned,
        search.find_best_changes(planned_run, *place, planned_run.machine, accepts=partial(_is_accepted, planned_run)),
        search_result,
        overrides,
        traced,
        run if run.is_layout_open else None,
        _trace_results(planned_run, traced, search_result, settings) if traced and search_result else (),
        fit.compute_saved_gib(planned_run, *place, planned_run.machine.device),
    )
    print(plan_text.format_plan(outcome), end="")
    _write_files(files, lambda: plan_text.build_plan_data(outcome), lambda: _render_page(outcome, provenance))
    return 0


def _build_plan(run: Run) -> estimate.Plan:
    return estimate.build_plan(run, run.layout, run.microbatches, run.machine)


def _search_layouts(run: Run, settings: PlanSettings) -> search.SearchOutcome:
    """Return the fastest layouts that have the settings which are typed, with progress on a terminal."""
    with progress_line() as show:
        return search.search_layouts(
            run, run.layout.devices, run.machine, keep=settings.keep, accepts=partial(_is_accepted, run),
            typed=list_typed_settings(run, run.overrides),
            show=show if sys.stderr.isatty() else lambda line: None,
        )  # fmt: skip


def _trace_results(
    planned_run: Run, traced: TracedStep, search_result: search.SearchOutcome, settings: PlanSettings
) -> tuple[TracedStep, ...]:
    """Return a traced step of each of the fastest results of a search; that of the plan is `traced`."""
    fastest = [_resolve_candidate(planned_run, result.candidate) for result in search_result.best[:TRACED_RESULTS]]
    read_step = attrgetter("layout", "microbatches", "parallelism", "memory", "compile")
    is_traced = [read_step(run) == read_step(planned_run) for run in fastest]
    return tuple(traced if known else _trace_step(run, settings) for run, known in zip(fastest, is_traced, strict=True))


def _plan_trials(trials: Sequence[Trial], settings: PlanSettings, files: Sequence[Path], provenance: str) -> list[int]:
    """Print one line per trial of a sweep, and write their figures."""
    if settings.search or settings.trace:
        raise ConfigError(f"plan.{'search' if settings.search else 'trace'}=true: takes one run; leave out -m.")
    for trial in trials:
        warn_of_small_work(trial.run, planned=True)
    effect = parse_margin(settings.effect, "plan.effect").share
    if effect is None:
        raise ConfigError(f"plan.effect={settings.effect}: must be a share of compute, such as 2%.")
    plans = [_build_plan(trial.run) for trial in trials]
    labels = [t.label for t in trials]
    print(plan_text.format_grid(labels, plans), end="")
    for line in _describe_power(trials, plans, effect, settings.noise):
        print(line)
    data = partial(plan_text.build_grid_data, labels, plans)
    _write_files(files, data, lambda: _render_grid_page(labels, plans, provenance))
    return [0] * len(trials)


def _describe_power(
    trials: Sequence[Trial], plans: Sequence[estimate.Plan], effect: float, folder: str | None
) -> list[str]:
    """Return how many seeds show the effect, for a sweep with several variants of one length."""
    seeds = Counter(budget.label_variant(trial.varied) for trial in trials)
    tokens = {trial.run.training.total_tokens for trial in trials}
    variants = {identity.compute_variant_id(trial.run) for trial in trials}  # of those that learn the same there is one
    if len(seeds) < 2 or len(variants) < len(seeds) or len(tokens) > 1 or len(set(seeds.values())) > 1:
        return []
    from titan.report import effort  # only now: a plan without it need not wait for numpy

    noise = effort.PUBLISHED if folder is None else effort.read_noise(Path(folder))
    hours = fmean(plan.device_hours.value for plan in plans)
    return effort.describe_power(effect, noise, float(tokens.pop()), len(seeds), next(iter(seeds.values())), hours)


def describe_trials(trials: Sequence[Trial]) -> TrialPlans:
    """Return the plan of a trial, or one line per trial of a sweep; else a line that says what is missing."""
    planned: list[tuple[Trial, estimate.Plan]] = []
    device_hours: list[float | None] = []
    missing = dict[str, None]()
    for trial in trials:
        try:
            planned.append((trial, _build_plan(trial.run)))
            device_hours.append(planned[-1][1].device_hours.value)
        except ConfigError as error:
            missing[f"no plan: {error}"] = None
            device_hours.append(None)
    text = ""
    if planned and len(trials) == 1:
        text = plan_text.format_plan(PlanOutcome(planned[0][0].run, planned[0][1]))
    elif planned:
        text = plan_text.format_grid([trial.label for trial, _ in planned], [plan for _, plan in planned])
    return TrialPlans("\n".join([text, *missing]).strip() + "\n", tuple(device_hours))


def _trace_step(run: Run, settings: PlanSettings) -> TracedStep:
    from titan.training.trace.rank import trace_run  # only now: no other plan needs torch

    speeds = estimate.derive_device_speeds(
        run, estimate.resolve_hardware(run.cluster, run.machine), run.machine, run.layout
    )
    return trace_run(run, speeds, full=settings.whole)


def _render_page(outcome: PlanOutcome, provenance: str) -> str:
    from titan.report.render.plan_page import render_page

    run, usages = outcome.run, outcome.plan.memory
    rank = max(range(len(usages)), key=lambda rank: usages[rank].bytes)
    steps = overhead.list_step_phases(run, run.layout, run.microbatches, rank, run.machine.device)
    return render_page(outcome, rank, steps, provenance)


def _render_grid_page(labels: Sequence[str], plans: Sequence[estimate.Plan], provenance: str) -> str:
    from titan.report.render.plan_page import render_grid_page

    return render_grid_page(labels, plans, provenance)


def _is_accepted(run: Run, candidate: LayoutCandidate) -> bool:
    try:
        _resolve_candidate(run, candidate)
    except ConfigError:
        return False
    return True


def _resolve_candidate(run: Run, candidate: LayoutCandidate) -> Run:
    """Return the run with a layout."""
    parallelism = replace(candidate.recipe.parallelism, microbatches=candidate.microbatches)
    changed = replace(run, parallelism=parallelism, memory=candidate.recipe.memory, compile=candidate.recipe.compile)
    resolved = resolve(changed, run.machine, run.directory, remote=True, choices=run.choices, hydra=run.hydra)
    return replace(resolved, compile_why=run.compile_why, overrides=run.overrides, options=run.options)


def _write_files(files: Sequence[Path], build_data: Callable[[], Any], render: Callable[[], str]) -> None:
    """Write each file with what its format takes: a page, or plain data as JSON."""
    for file in files:
        write_output_file(file, render() if file.suffix == ".html" else build_data())
        print(f"written: {file}")


main, cli = COMMAND.bind(_run_planning)

if __name__ == "__main__":
    cli()
