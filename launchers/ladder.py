"""A ladder through a launcher, in batches: the smaller sizes, the prediction of the largest, the largest, its score.

Each size is two batches, its trunks and then the branches that begin at their checkpoints. What has finished is not
started again, so that the same command goes on where a ladder was killed. Imported only for a ladder: it needs numpy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from launchers.trials import Trial
from titan.console.numbers import format_count, format_fixed, format_interval
from titan.errors import ConfigError, RunError
from titan.estimate import plan as estimate
from titan.files.atomic import write_json
from titan.files.run_directory import shorten_path
from titan.run import identity
from titan.run.directory import read_result
from titan.run.run import Run
from titan.sweep import ladder as ladders
from titan.sweep import ladder_law, ledger, predictions
from titan.sweep.labels import is_same_value
from titan.sweep.ladder import AUTO, SHAPE, Ladder, Trunk, Variant, choose_rates
from titan.sweep.ladder_law import MeasuredRung, TuningRun
from titan.sweep.predictions import LadderPrediction
from titan.sweep.schema import Sweep

LadderLauncher = Any
"""A `launchers.plugin.SweepLauncher`, whose module imports this one."""
LISTS = ("sweep.sizes", "sweep.lengths")
"""Settings of a ladder that are lists, which look like values of a sweep when their brackets are forgotten."""
DECIDED = (*(f"model.{name}" for name in SHAPE), "training.seed", "optimizer.lr", *ladders.LENGTH_SETTINGS)
"""Settings that distinguish no variants: a ladder decides them."""


def split_overrides(parsed: Sequence[Override]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the overrides that all variants of a ladder share, and those of each variant.

    Raises:
        ConfigError: where a setting has several values that can't be variants.
    """
    shared, axes = [], []
    for override in parsed:
        name, key, line = override.get_key_element(), override.key_or_group, override.input_line
        if not override.is_sweep_override():
            shared.append(f"{name}={override.get_value_element_as_str()}")
            if key in ladders.LENGTH_SETTINGS:
                raise ConfigError(f"{shared[-1]}: a ladder decides it by sweep.lengths; leave it out.")
            continue
        if key in LISTS:
            raise ConfigError(f"{line}: is a list of a ladder's; write {key}=[{str(line).partition('=')[2]}].")
        if key in DECIDED or key.startswith(("sweep.", "hydra.", "hydra/")):
            raise ConfigError(
                f"{line}: a ladder decides it, so it can't be an axis of variants; give one value (sizes, lengths and "
                "seeds are sweep.sizes, sweep.lengths and sweep.seeds), and start a ladder for each."
            )
        axes.append([f"{name}={value}" for value in override.sweep_string_iterator()])
    return shared, list(itertools.product(*axes))


def climb(launcher: LadderLauncher, parsed: Sequence[Override], sweep: Sweep) -> None:
    """Plan or run a ladder, and add the exit codes of its runs to the launcher's session.

    Raises:
        ConfigError: before anything starts, when some of it can't work.
        RunError: when a run has no loss.
    """
    ladders.check_sweep(sweep)
    overrides, axes = split_overrides(parsed)
    is_auto = AUTO in overrides
    overrides = [override for override in overrides if override != AUTO]  # each size gets a number
    varied = tuple(dict.fromkeys(_get_key(override) for variant in axes for override in variant))
    bases = _expand(launcher, overrides, axes, 0, varied)
    variants = [Variant(line, trial.run) for line, trial in zip(axes, bases, strict=True)]
    variants = put_baseline_first(variants, sweep)
    ladder = ladders.build_ladder(variants, sweep, choose_rates(variants, sweep, is_auto))
    ladder_law.rehearse(ladder)
    lines = [
        line
        for trunk in ladder.trunks
        for line in (trunk.list_overrides(), *map(trunk.list_planned_overrides, trunk.rungs))
    ]
    planned = _expand(launcher, overrides, lines, 0, (*varied, "model.dim", "training.seed", "training.steps"))
    print(ladders.format_ladder(ladder, [_predict_hours(trial.run) for trial in planned]), flush=True)
    tuning = _expand_tuning(launcher, ladder, overrides, (*varied, *TUNED), sweep)
    planned += [trial for _, trial in tuning]
    if launcher.session.is_dry_run:
        launcher.session.codes += launcher.start(list({trial.id: trial for trial in planned}.values()))
        return
    if not getattr(launcher.settings, "wait", True):
        raise ConfigError("hydra.launcher.wait=false: a ladder goes on when runs have ended; leave it out.")
    launcher.check_inputs(planned)
    ids = sorted(identity.compute_portable_trial_id(trial.run) for trial in planned)  # it may go on on other machines
    tuned = _tune(launcher, ladder, tuning, sweep)
    if tuned is not None:
        shown = (*varied, *ladders.SHOWN)
        Climb(launcher, overrides, shown, tuned, identity.compute_digest(ids), len(tuning)).run()


TUNED = ("model.dim", "optimizer.lr")  # the settings that name a run that tunes, beside those of its variant


def _expand_tuning(
    launcher: LadderLauncher, ladder: Ladder, overrides: Sequence[str], shown: Sequence[str], sweep: Sweep
) -> list[tuple[TuningRun, Trial]]:
    """Return the runs that tune learning rates, checked, and print what they cost; none of them with another rule."""
    if sweep.lr_rule != "tuned":
        return []
    runs = ladder_law.list_tuning_runs(ladder, sweep)
    trials = _expand(launcher, overrides, [run.list_overrides() for run in runs], 0, shown)
    cost = ladders.format_hours([_predict_hours(trial.run) for trial in trials])
    tokens = format_count(sum(run.trunk.rungs[-1].tokens for run in runs))
    print(f"tuning before that: {len(runs)} runs, {tokens} tokens, device-hours {cost}\n", flush=True)
    return list(zip(runs, trials, strict=True))


def _tune(
    launcher: LadderLauncher, ladder: Ladder, tuning: Sequence[tuple[TuningRun, Trial]], sweep: Sweep
) -> Ladder | None:
    """Run what tunes learning rates, and return the ladder with these; None where a run failed."""
    if not tuning:
        return ladder
    codes = launcher.start([trial for _, trial in tuning])
    launcher.session.codes += codes
    if any(codes):
        return None
    losses = [_read_metric(trial) for _, trial in tuning]
    tuned = ladder_law.find_best_rates([run for run, _ in tuning], losses)
    rates = ladder_law.extrapolate_rates(tuned)
    print("\n".join(["", *ladder_law.describe_tuned(tuned), f"learning rates {rates.description}"]), flush=True)
    return ladders.build_ladder(ladder.variants, sweep, rates)


def put_baseline_first(variants: Sequence[Variant], sweep: Sweep) -> list[Variant]:
    """Return the variants with that of `sweep.baseline` first, which the others are compared with.

    Raises:
        ConfigError: where none has its settings.
    """
    wanted = sweep.baseline_settings

    def is_baseline(variant: Variant) -> bool:
        own = {_get_key(override): override.partition("=")[2] for override in variant.overrides}
        return all(name in own and is_same_value(value, own[name]) for name, value in wanted.items())

    if len(variants) > 1 and not any(map(is_baseline, variants)):
        labels = ", ".join(variant.label for variant in variants)
        raise ConfigError(f"sweep.baseline={wanted}: is none of the ladder's variants; there are {labels}.")
    return sorted(variants, key=lambda variant: not is_baseline(variant))


def _expand(
    launcher: LadderLauncher, overrides: Sequence[str], lines: Sequence[Sequence[str]], first: int, shown: Sequence[str]
) -> list[Trial]:
    """Return the trials of a ladder; each line replaces overrides of the command line, and `shown` names it."""
    trials = [[*(o for o in overrides if _get_key(o) not in set(map(_get_key, line))), *line] for line in lines]
    keys = frozenset(_get_key(override) for trial in trials for override in trial)
    expanded: list[Trial] = launcher.expand(trials, first, keys - set(shown))
    return expanded


def _get_key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _predict_hours(run: Run) -> float | None:
    """Return the predicted device-hours of a run; None where its hardware is not described."""
    try:
        return estimate.build_plan(run, run.layout, run.microbatches, run.machine).device_hours.value
    except ConfigError:
        return None


@dataclass
class Climb:
    """A ladder that is checked, and runs."""

    launcher: LadderLauncher
    overrides: Sequence[str]  # of the command line, which all variants share
    shown: Sequence[str]  # the settings that name its runs
    ladder: Ladder
    key: str  # digest of its settings
    count: int  # runs that were launched before

    def __post_init__(self) -> None:
        prediction = predictions.read(self.root)
        if prediction is not None and prediction.key != self.key:
            raise ConfigError(
                f"{self.root / predictions.PREDICTION}: is the prediction of a ladder with other settings, and is "
                "never changed; choose another name for this one."
            )

    @property
    def root(self) -> Path:
        """The sweep's directory."""
        root: Path = self.launcher.root
        return root

    def run(self) -> None:
        """Run all that has not finished; stop after a batch in which a run failed, which the same command repeats."""
        measured = self._train(self.ladder.fitted)
        if measured is None:
            return
        prediction = predictions.read(self.root) or self._predict(measured)
        print(f"\npredicted at {prediction.time}, before the largest size ran: {self.root / predictions.PREDICTION}")
        names = [trunk.describe(rung) for trunk in self.ladder.largest for rung in trunk.rungs]
        lines = [f"  {name}: {_format_prediction(loss)}" for name, loss in zip(names, prediction.losses, strict=True)]
        print(
            "\n".join([*lines, *(f"  {content['text']}" for content in prediction.details.get("speedups", ()))]),
            flush=True,
        )
        outcome = self._train(self.ladder.largest)
        if outcome is not None:
            self._score(prediction, lines, measured, outcome)

    def _predict(self, measured: Sequence[MeasuredRung]) -> LadderPrediction:
        """Write the prediction of the largest size.

        Raises:
            ConfigError: where the largest size has begun.
            RunError: where the file is gone.
        """
        largest = self._expand([trunk.list_overrides() for trunk in self.ladder.largest])
        begun = {trial.id for trial in ledger.read_trials(self.root) if trial.submissions}
        if any(trial.id in begun or Path(trial.run.directory).exists() for trial in largest):
            raise ConfigError(
                f"{self.root}: has runs of the largest size and no {predictions.PREDICTION} from before; a prediction "
                "would come too late: start the ladder anew under another name."
            )
        losses, details = ladder_law.predict_largest(self.ladder, measured)
        predictions.write_once(self.root, self.key, _read_clock(), losses, details)
        prediction = predictions.read(self.root)
        if prediction is None:
            raise RunError(f"{self.root / predictions.PREDICTION}: was removed while the ladder ran.")
        return prediction

    def _train(self, trunks: Sequence[Trunk]) -> list[MeasuredRung] | None:
        """Run trunks, then their branches; return the losses of the branches; None where a run failed.

        Raises:
            RunError: where a branch has no finite loss.
        """
        trunk_trials = self._run([trunk.list_overrides() for trunk in trunks])
        if trunk_trials is None:
            return None
        folders = [Path(trial.run.directory) for trial in trunk_trials]
        branches = [(t, rung, folder) for t, folder in zip(trunks, folders, strict=True) for rung in t.rungs]
        trials = self._run([trunk.list_branch_overrides(rung, folder) for trunk, rung, folder in branches])
        if trials is None:
            return None
        measured = []
        for (trunk, rung, _), trial in zip(branches, trials, strict=True):
            if not math.isfinite(loss := _read_metric(trial)):
                raise RunError(
                    f"{trial.run.directory}: has no finite validation loss, so the ladder has no law; see python -m "
                    "titan.status."
                )
            measured.append(MeasuredRung(trunk, rung, loss, trial.run.directory))
        return measured

    def _expand(self, lines: Sequence[Sequence[str]]) -> list[Trial]:
        return _expand(self.launcher, self.overrides, lines, self.count, self.shown)

    def _run(self, lines: Sequence[Sequence[str]]) -> list[Trial] | None:
        """Run a batch, and return its trials; None where one has not finished."""
        trials = self._expand(lines)
        self.count += len(trials)
        codes = self.launcher.start(trials)
        self.launcher.session.codes += codes
        return None if any(codes) else trials

    def _score(
        self,
        prediction: LadderPrediction,
        lines: Sequence[str],
        measured: Sequence[MeasuredRung],
        outcome: Sequence[MeasuredRung],
    ) -> None:
        """Print and write what came of the prediction, and add the longest run of each variant to the user's record.

        Args:
            lines: the predictions in words.
        """
        rows = list(zip(prediction.losses, outcome, strict=True))
        baseline = self.ladder.variants[0].label
        speedups = ladder_law.measure_speedups(self.ladder, [*measured, *outcome])
        scores = [
            {"variant": m.trunk.variant.label, "length": m.rung.length, "d": p.d, "loss": m.loss,
             "inside": p.holds(m.loss)}
            for p, m in rows
        ]  # fmt: skip
        described = [ladder_law.describe_measured(found, baseline) for found in speedups]
        content = {"digest": prediction.digest, "scores": scores, **({"speedups": described} if described else {})}
        write_json(self.root / predictions.SCORE, content)
        print("\nthe largest size, predicted before it ran, and measured")
        for line, (p, m) in zip(lines, rows, strict=True):
            print(f"{line}, measured {format_fixed(m.loss)}: {'inside' if p.holds(m.loss) else 'outside'}")
        for name in dict.fromkeys(found.variant for found in speedups):
            print(f"\n{name} against {baseline}, as measured at each rung")
            for found in speedups:
                if found.variant == name:
                    print(f"  {found.describe()}")
        try:
            for predicted, m in rows:
                if m.rung == m.trunk.rungs[-1]:
                    predictions.add_score(self.root, prediction, predicted, m.loss, _read_clock())
        except OSError as error:
            print(f"{predictions.find_record()}: the record of predictions can't be written ({error.strerror}).")
        print(predictions.read_record(prediction.losses[-1].level).describe())
        print(f"python -m titan.law {shorten_path(str(self.root))} shows the law of all sizes.", flush=True)


def _format_prediction(loss: predictions.PredictedLoss) -> str:
    return f"predicted {format_fixed(loss.value)} {format_interval(loss.low, loss.high)} ({100 * loss.level:g} %)"


def _read_metric(trial: Trial) -> float:
    """Return the final validation loss of a run; infinite where it has none that is finite."""
    loss = read_result(Path(trial.run.directory))[0].get("validation_loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else math.inf


def _read_clock() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
