"""The trials of a search: which to start next, what to tell Optuna of those that ended, and which to end early.

A launcher asks the pool for trials as long as it has room, and hands it the exit code of each that has ended. Optuna's
study has a trial from the moment it is asked for: after a kill those that were running come first, in their folders,
where finished ones are not started again and others resume.

`hydra.sweeper.pruner=margin` follows titan's rule, `titan.scaling.early_stopping`; Optuna's pruners are asked only
where that rule allows a trial to end at all: after its learning rate has decayed, unless trials differ in nothing that
changes the shape of the curve. Positions are tokens, as trials may differ in their batches. Imported only where Optuna
is installed.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState
from optuna.trial import Trial as AskedTrial

from launchers.search.study import Space, format_values, list_corners, open_study
from launchers.session import RESULTS
from launchers.trials import Trial
from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.files.atomic import write_atomic
from titan.files.run_directory import shorten_path
from titan.hooks import stop_request
from titan.metrics.reader import METRICS, read_new_records
from titan.run.directory import is_done, read_result
from titan.run.run import Run
from titan.scaling.early_stopping import Trajectory, find_decay, find_stop, list_shape_settings
from titan.sweep.objective import read_objective
from titan.sweep.schema import OptunaSearch, Sweep

HOOK = "pruning"  # the name of the hook by which trials are ended early
HOOK_OVERRIDE = f"+hooks.{HOOK}={{_target_:titan.hooks.stop_request.StopOnRequest}}"
POLL_SECONDS = 1.0  # how often the validation losses of running trials are read
MEASURED = "validation_loss"  # the objective by which trials can be ended early
RECORDED = "evaluations"
"""The attribute of Optuna's trials that has the tokens of their evaluations, of their end and of the decay."""


def run_search(
    launcher: Any, options: OptunaSearch, sweep: Sweep, space: Space, fixed: Sequence[str], begin: Any
) -> None:
    """Run a search through a launcher, and add the exit codes of its trials to the launcher's session.

    Args:
        launcher: a `launchers.plugin.SweepLauncher`, whose module imports this package.
        fixed: the overrides that all trials share.
        begin: called once the search is checked.

    Raises:
        ConfigError: before anything starts, when some of it can't work.
    """
    direction = options.direction or ("minimize" if sweep.direction == "auto" else sweep.direction)
    shared = [*fixed, *([HOOK_OVERRIDE] if options.pruner != "none" else [])]
    keys = frozenset(override.partition("=")[0].lstrip("+~") for override in shared)

    def expand(values: Sequence[str], number: int) -> Trial:
        trial: Trial = launcher.expand([[*shared, *values]], number, keys)[0]
        return trial

    corners = [expand(format_values(corner), 0) for corner in list_corners(space)]
    worst = launcher.check_feedback(corners)
    check_pruning(options, sweep, direction, space, [trial.run for trial in corners])
    launcher.check_inputs(corners)
    begin()
    with open_study(launcher.root, options, direction, space, shared) as study:
        pool = TrialPool(study, space, options, sweep, worst, expand)
        try:
            launcher.launch_pool(pool)
        except KeyboardInterrupt:
            pool.print_end(launcher.root)
            raise
        finally:
            launcher.session.codes += pool.codes or [0]
            write_best(study, launcher.root / RESULTS)
        pool.print_end(launcher.root)


@dataclass
class ActiveTrial:
    """A trial that runs."""

    trial: Trial  # what the launcher has
    asked: list[AskedTrial]  # Optuna's trials with its values: several where they were drawn again
    offset: int = 0  # the byte of metrics.jsonl up to which it was read
    reported: set[int] = field(default_factory=set)  # the evaluations that Optuna has
    is_pruned: bool = False  # whether it was asked to end


@dataclass
class TrialPool:
    """Trials by ask and tell."""

    study: optuna.Study  # open
    space: Space
    settings: OptunaSearch
    sweep: Sweep
    worst: float  # the objective of a trial that has none that is finite
    # returns the checked trial of drawn values and a number; raises ConfigError
    expand: Callable[[Sequence[str], int], Trial]
    active: dict[str, ActiveTrial] = field(default_factory=dict)  # the trials that run, by their ids
    codes: list[int] = field(default_factory=list)  # the exit code of each that has ended
    _is_blocked: bool = False
    _failures: int = 0
    _next_poll: float = 0.0

    def __post_init__(self) -> None:
        self.same_shape = not list_shape_settings(self.space)  # whether what varies leaves the curve's shape as it is
        self._interrupted: list[AskedTrial] = []  # those that ran when an earlier command ended
        for frozen in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self.space.keys() <= frozen.params.keys():
                self._interrupted.append(AskedTrial(self.study, frozen._trial_id))
            else:  # the kill came before all values were drawn
                self.study.tell(frozen.number, state=TrialState.FAIL)

    def ask(self) -> list[Trial]:
        """Return trials to start now, and ask running ones to end that are not worth their time."""
        if self.settings.pruner != "none" and time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + POLL_SECONDS
            self.prune()
        trials: list[Trial] = []
        while len(self.active) < self.settings.n_jobs and not self._is_blocked:
            if self._interrupted:
                asked = self._interrupted.pop(0)
            elif self._failures >= self.settings.max_failures or not self._has_left():
                break
            else:
                asked = self.study.ask(self.space)
            try:
                trial = self.expand(format_values(asked.params), asked.number)
            except ConfigError as error:  # these values can't work together, which counts as failed
                print(f"not started: {error}", flush=True)
                self.study.tell(asked, state=TrialState.FAIL)
                self.codes.append(1)
                self._failures += 1
                continue
            if self._add(trial, asked):
                trials.append(trial)
        return trials

    def tell(self, trial: Trial, code: int) -> None:
        """Take the exit code of a trial that has ended; one that was stopped runs again with the same command.

        Raises:
            ConfigError: when its result lacks the objective.
        """
        self._report_losses(self.active[trial.id])
        active = self.active.pop(trial.id)
        self.codes.append(code)
        self._is_blocked = False
        if code == 130:
            return
        self._failures = self._failures + 1 if code else 0
        directory, state, value = Path(trial.run.directory), TrialState.FAIL, None
        if not code and read_result(directory)[0].get("ended_by", {}).get("hook") == HOOK:
            state = TrialState.PRUNED
        elif not code or self.sweep.worst is not None:
            state, value = TrialState.COMPLETE, read_objective(self.sweep, directory, code, self.worst)
        for asked in active.asked:
            self.study.tell(asked, value, state)

    def prune(self) -> None:
        """Report new validation losses, and ask the trials to end that the rule of early stopping gives up."""
        for active in self.active.values():
            if not self._report_losses(active) or active.is_pruned:
                continue
            if reason := self._find_reason(active.asked[0]):
                active.is_pruned = True
                stop_request.request_stop(Path(active.trial.run.directory), reason)

    def _find_reason(self, asked: AskedTrial) -> str:
        """Return why a trial ends after its last evaluation; empty where it goes on."""
        trials = self.study.get_trials(deepcopy=False)
        trial = trials[asked.number]
        variant, pruner = build_trajectory(trial), self.settings.pruner
        if variant is None or not variant.may_stop(position := max(variant.losses, default=0), self.same_shape):
            return ""
        reason = f"hydra.sweeper.pruner={pruner} ended it after evaluation {max(trial.intermediate_values)}"
        if pruner != "margin":
            return reason if asked.should_prune() else ""
        latest = dataclasses.replace(variant, losses={position: variant.losses[position]})
        built = (build_trajectory(trial) for trial in trials if trial.state == TrialState.COMPLETE)
        evidence = find_stop(latest, [earlier for earlier in built if earlier is not None], self.same_shape)
        if evidence is None:
            return ""
        return (
            f"{reason}: it is further above the best than the {evidence.margin:.3g} that any of {evidence.variants} "
            "trials made up from there (rank correlation of their losses there with their ends: "
            f"{evidence.correlation:.2f})"
        )

    def print_end(self, root: Path) -> None:
        """Print how many trials of the study are finished, the next command, and why no more were started."""
        states = Counter(trial.state.name.lower() for trial in self.study.get_trials(deepcopy=False))
        print(f"\n{self._describe_end(states, shorten_path(str(root)))}")
        names = {"complete": "complete", "pruned": "pruned", "fail": "failed", "running": "not finished"}
        counts = ", ".join(f"{states[state]} {name}" for state, name in names.items() if states[state])
        print(f"study: {counts or 'no trials'} (hydra.sweeper.n_trials={self.settings.n_trials})", flush=True)
        if states["waiting"] and self.settings.sampler == "grid" and not self._has_left():
            all_count, verb = sum(states.values()), "has" if states["waiting"] == 1 else "have"
            print(
                f"{states['waiting']} of {all_count} combinations {verb} not begun; hydra.sweeper.n_trials={all_count} "
                "runs all"
            )
        if self._failures >= self.settings.max_failures:
            print(f"no more trials were started: {self._failures} failed in a row (hydra.sweeper.max_failures).")

    def _describe_end(self, states: Mapping[str, int], root: str) -> str:
        """Return how many trials of all that the study is to have are finished, and the next commands.

        Args:
            states: the number of the study's trials in each state.
            root: the sweep's directory, as a command names it.
        """
        finished, all_trials = states.get("complete", 0) + states.get("pruned", 0), sum(states.values())
        begun = all_trials - states.get("waiting", 0)
        wanted = min(self.settings.n_trials, all_trials) if self.settings.sampler == "grid" else self.settings.n_trials
        total, is_over = max(begun, wanted), begun >= wanted and not states.get("running")
        hint = "; nothing to do" if is_over and not self.codes else "" if is_over else "; the same command continues it"
        verb = "compare" if finished else "status"
        purpose = "compares them" if finished else "shows why"
        line = f"finished: {finished} of {format_plural(total, 'trial')} of the study{hint}; "
        return f"{line}python -m titan.{verb} {root} {purpose}."

    def _has_left(self) -> bool:
        trials = self.study.get_trials(deepcopy=False)
        waiting = sum(trial.state == TrialState.WAITING for trial in trials)
        if self.settings.sampler == "grid" and not waiting:
            return False
        return len(trials) - waiting < self.settings.n_trials

    def _add(self, trial: Trial, asked: AskedTrial) -> bool:
        """Add a trial; return whether it is to be started. One with the values of a running one waits for it."""
        reported = set(self.study.get_trials(deepcopy=False)[asked.number].intermediate_values)
        decay = find_decay_tokens(trial.run)  # kept in the study with what else the rule needs of a trial
        recorded = {"tokens": list_evaluation_tokens(trial.run), "end": trial.run.training.total_tokens}
        asked.set_user_attr(RECORDED, recorded | {"decay": decay if math.isfinite(decay) else None})
        if trial.id in self.active:
            self.active[trial.id].asked.append(asked)
            self._is_blocked = True
            return False
        self.active[trial.id] = ActiveTrial(trial, [asked], reported=reported)
        if not (reported or is_done(trial.run)):
            stop_request.withdraw_request(Path(trial.run.directory))
        return True

    def _report_losses(self, active: ActiveTrial) -> bool:
        """Report the validation losses before the last step that are new; return whether there were any."""
        run = active.trial.run
        records, active.offset = read_new_records(Path(run.directory) / METRICS, active.offset)
        has_new = False
        for record in records:
            number, rest = divmod(record.get("step", 0), max(1, run.evaluation.every))
            loss = record.get("validation_loss")
            if loss is None or math.isnan(loss) or rest or number in active.reported or not number:
                continue
            if record["step"] < run.training.steps:
                has_new = True
                active.reported.add(number)
                for asked in active.asked:
                    asked.report(loss, number)
        return has_new


def write_best(study: optuna.Study, file: Path) -> None:
    """Write the best trial of a study, where one is complete."""
    if study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        best = study.best_trial
        content = {"name": "optuna", "best_params": best.params, "best_value": best.value}
        write_atomic(file, yaml.safe_dump(content, sort_keys=False))


def build_trajectory(trial: FrozenTrial) -> Trajectory | None:
    """Return the finite losses of a trial by tokens; None where the study has none of its evaluations' tokens."""
    recorded: dict[str, Any] | None = trial.user_attrs.get(RECORDED)
    if recorded is None:
        return None
    tokens, decay = recorded["tokens"], recorded["decay"]
    values = trial.intermediate_values.items()
    losses = {tokens[k - 1]: loss for k, loss in values if k <= len(tokens) and math.isfinite(loss)}
    end = math.inf if trial.values is None else trial.values[0]
    return Trajectory(str(trial.number), losses, recorded["end"], end, math.inf if decay is None else decay)


def list_evaluation_tokens(run: Run) -> list[int]:
    """Return the tokens after each evaluation before the last step."""
    every, training = run.evaluation.every, run.training
    steps = range(every, training.steps, every) if every else ()
    return [training.count_rows_before(step + 1) * training.seq_len for step in steps]


def find_decay_tokens(run: Run) -> float:
    """Return the tokens of the evaluation from which on the learning rate has decayed; infinite where there is none."""
    every, steps = run.evaluation.every, run.training.steps
    compute = run.schedule.build(steps)
    rates = [compute(step).lr for step in (*(range(every, steps, every) if every else ()), steps)]
    return find_decay([*list_evaluation_tokens(run), run.training.total_tokens], rates)


def check_pruning(
    options: OptunaSearch, sweep: Sweep, direction: str, names: Iterable[str], runs: Sequence[Run]
) -> None:
    """Raise ConfigError where a pruner would have nothing to decide by.

    Args:
        direction: "minimize" or "maximize".
        names: the settings that vary.
        runs: some of the trials.
    """
    if options.pruner == "none":
        return
    setting = f"hydra.sweeper.pruner={options.pruner}"
    if sweep.objective != MEASURED or direction != "minimize":
        raise ConfigError(
            f"{setting}: ends trials by their validation loss; leave it out, or minimize sweep.objective={MEASURED}."
        )
    shapes = list_shape_settings(names)
    for run in runs:
        every, steps = run.evaluation.every, run.training.steps
        if not 0 < every < steps:
            raise ConfigError(
                f"{setting}: needs validation losses before the last step; give evaluation.every below "
                f"training.steps={steps} (evaluation.every={every})."
            )
        if shapes and find_decay_tokens(run) >= run.training.total_tokens:
            raise ConfigError(
                f"{setting}: trials that differ in {', '.join(shapes[:4])} may end only after the learning rate has "
                f"decayed to half its peak, and no evaluation lies between there and the last step; give a smaller "
                f"evaluation.every={every}, or a schedule that decays sooner."
            )
