"""A ladder through a launcher, in batches: the smaller sizes, the prediction of the largest, the largest, its score.

Each size is two batches, its trunks and then the branches that begin at their checkpoints. What has finished is not
started again, so that the same command goes on where a ladder was killed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hydra.core.override_parser.types import Override

from launchers.session import SweepSession
from launchers.trials import Trial
from titan.console.numbers import format_count, format_fixed, format_interval, format_rounded
from titan.errors import ConfigError, RunError
from titan.estimate import plan as estimate
from titan.files.atomic import write_json
from titan.files.run_directory import shorten_path
from titan.run import identity
from titan.run.directory import read_result
from titan.run.run import Run
from titan.sweep import ladder as ladders
from titan.sweep import ledger, predictions
from titan.sweep.labels import is_same_value
from titan.sweep.ladder import Ladder, Rung, Trunk
from titan.sweep.ladder_rates import AUTO, choose_rates
from titan.sweep.ladder_sizes import SHAPE, Variant
from titan.sweep.predictions import LadderPrediction
from titan.sweep.schema import Sweep

if TYPE_CHECKING:
    from titan.scaling.rung_speedups import RungSpeedup
    from titan.sweep.ladder_law import MeasuredRung
    from titan.sweep.ladder_tuning import TuningRun


class LadderLauncher(Protocol):
    """What a ladder needs of `launchers.plugin.SweepLauncher`."""

    session: SweepSession
    root: Path
    settings: Any

    def expand(self, overrides: Sequence[Sequence[str]], first: int, fixed: frozenset[str] | None) -> list[Trial]:
        """Return the composed and checked trials of these overrides."""

    def start(self, batch: Sequence[Trial]) -> list[int]:
        """Plan or launch checked trials; return their exit codes."""

    def check_inputs(self, batch: Sequence[Trial]) -> None:
        """Raise ConfigError where a trial lacks what it reads."""


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
        if not override.is_sweep_override():
            shared.append(f"{override.get_key_element()}={override.get_value_element_as_str()}")
            continue
        _check_axis(override)
        axes.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
    return shared, list(itertools.product(*axes))


def _check_axis(override: Override) -> None:
    """Raise ConfigError for a setting of several values that can't be variants."""
    key, line = override.key_or_group, override.input_line
    if key in LISTS:
        raise ConfigError(f"{line}: is a list of a ladder's; write {key}=[{str(line).partition('=')[2]}].")
    if key in DECIDED or key.startswith(("sweep.", "hydra.", "hydra/")):
        raise ConfigError(
            f"{line}: a ladder decides it, so it can't be an axis of variants; give one value (sizes, lengths and "
            "seeds are sweep.sizes, sweep.lengths and sweep.seeds), and start a ladder for each."
        )


def climb(launcher: LadderLauncher, parsed: Sequence[Override], sweep: Sweep) -> None:
    """Plan or run a ladder, and add the exit codes of its runs to the launcher's session.

    Raises:
        ConfigError: before anything starts, when some of it can't work.
        RunError: when a run has no loss.
    """
    from titan.sweep import ladder_law  # only now: --help need not wait for numpy

    ladders.check_sweep(sweep)
    overrides, axes = split_overrides(parsed)
    ladders.check_overrides(overrides)
    is_auto = AUTO in overrides
    overrides = [override for override in overrides if override != AUTO]  # each size gets a number
    varied = tuple(dict.fromkeys(_get_key(override) for variant in axes for override in variant))
    bases = _expand(launcher, overrides, axes, 0, varied)
    variants = [Variant(line, trial.run) for line, trial in zip(axes, bases, strict=True)]
    variants = put_baseline_first(variants, sweep)
    ladder = ladders.build_ladder(variants, sweep, choose_rates(variants, sweep, is_auto))
    ladder_law.rehearse(ladder)
    planned = _expand_planned(launcher, ladder, overrides, varied)
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
        Climb(launcher, overrides, varied, tuned, identity.compute_digest(ids), len(tuning)).run()


TUNED = ("model.dim", "optimizer.lr")
"""The settings that name a run that tunes, beside those of its variant."""


def _expand_tuning(
    launcher: LadderLauncher, ladder: Ladder, overrides: Sequence[str], shown: Sequence[str], sweep: Sweep
) -> list[tuple[TuningRun, Trial]]:
    """Return the runs that tune learning rates, checked, and print what they cost; none of them with another rule."""
    from titan.sweep.ladder_tuning import list_tuning_runs

    if sweep.lr_rule != "tuned":
        return []
    runs = list_tuning_runs(ladder, sweep)
    trials = _expand(launcher, overrides, [run.list_overrides() for run in runs], 0, shown)
    hours = [_predict_hours(trial.run) for trial in trials]
    known = [hour for hour in hours if hour is not None]
    cost = format_rounded(sum(known)) if len(known) == len(hours) else "unknown"
    tokens = format_count(sum(run.trunk.rungs[-1].tokens for run in runs))
    print(f"tuning before that: {len(runs)} runs, {tokens} tokens, device-hours {cost}\n", flush=True)
    return list(zip(runs, trials, strict=True))


def _tune(
    launcher: LadderLauncher, ladder: Ladder, tuning: Sequence[tuple[TuningRun, Trial]], sweep: Sweep
) -> Ladder | None:
    """Run what tunes learning rates, and return the ladder with these; None where a run failed."""
    from titan.sweep import ladder_tuning

    if not tuning:
        return ladder
    codes = launcher.start([trial for _, trial in tuning])
    launcher.session.codes += codes
    if any(codes):
        return None
    losses = [_read_metric(Path(trial.run.directory)) for _, trial in tuning]
    tuned = ladder_tuning.find_best_rates([run for run, _ in tuning], losses)
    rates = ladder_tuning.extrapolate_rates(tuned)
    print("\n".join(["", *ladder_tuning.describe_tuned(tuned), f"learning rates {rates.description}"]), flush=True)
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


def _expand_planned(
    launcher: LadderLauncher, ladder: Ladder, overrides: Sequence[str], varied: Sequence[str]
) -> list[Trial]:
    """Return all runs of a ladder, checked, in the order of `list_costs`; branches as runs without a checkpoint."""
    lines = [
        line
        for trunk in ladder.trunks
        for line in (trunk.list_overrides(), *(trunk.list_planned_overrides(rung) for rung in trunk.rungs))
    ]
    return _expand(launcher, overrides, lines, 0, (*varied, "model.dim", "training.seed", "training.steps"))


def _expand(
    launcher: LadderLauncher, overrides: Sequence[str], lines: Sequence[Sequence[str]], first: int, shown: Sequence[str]
) -> list[Trial]:
    """Return the trials of a ladder; each line replaces overrides of the command line, and `shown` names it."""
    trials = [[*(o for o in overrides if _get_key(o) not in set(map(_get_key, line))), *line] for line in lines]
    keys = frozenset(_get_key(override) for trial in trials for override in trial)
    return launcher.expand(trials, first, keys - set(shown))


def _get_key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _predict_hours(run: Run) -> float | None:
    """Return the predicted device-hours of a run; None where its hardware is not described."""
    try:
        return estimate.build_plan(run, run.layout, run.microbatches, run.machine).device_hours.value
    except ConfigError:
        return None


class Climb:
    """A ladder that runs."""

    def __init__(
        self,
        launcher: LadderLauncher,
        overrides: Sequence[str],
        varied: Sequence[str],
        ladder: Ladder,
        key: str,
        count: int,
    ) -> None:
        """Take a ladder that is checked.

        Args:
            overrides: of the command line, which all variants share.
            varied: the settings that distinguish variants.
            key: digest of its settings.
            count: runs that were launched before.

        Raises:
            ConfigError: where the directory has another ladder.
        """
        self.launcher, self.overrides, self.ladder, self.key = launcher, overrides, ladder, key
        self.shown = (*varied, *ladders.SHOWN)
        self.root, self.count = launcher.root, count
        prediction = predictions.read(self.root)
        if prediction is not None and prediction.key != key:
            raise ConfigError(
                f"{self.root / predictions.PREDICTION}: is the prediction of a ladder with other settings, and is "
                "never changed; choose another name for this one."
            )

    def run(self) -> None:
        """Run all that has not finished; stop after a batch in which a run failed, which the same command repeats."""
        measured = self._train(self.ladder.fitted)
        if measured is None:
            return
        prediction = predictions.read(self.root) or self._predict(measured)
        print(f"\npredicted at {prediction.time}, before the largest size ran: {self.root / predictions.PREDICTION}")
        for trunk, rung, loss in self._pair_predictions(prediction):
            print(f"  {_name(trunk, rung)}: {_format_prediction(loss)}", flush=True)
        for content in prediction.details.get("speedups", ()):
            print(f"  {content['text']}", flush=True)
        outcome = self._train(self.ladder.largest)
        if outcome is not None:
            self._score(prediction, measured, outcome)

    def _pair_predictions(self, prediction: LadderPrediction) -> list[tuple[Trunk, Rung, predictions.PredictedLoss]]:
        """Return the rungs of the largest size with their predictions."""
        rungs = [(trunk, rung) for trunk in self.ladder.largest for rung in trunk.rungs]
        return [(trunk, rung, loss) for (trunk, rung), loss in zip(rungs, prediction.losses, strict=True)]

    def _predict(self, measured: Sequence[MeasuredRung]) -> LadderPrediction:
        """Write the prediction of the largest size.

        Raises:
            ConfigError: where the largest size has begun.
            RunError: where the file is gone.
        """
        from titan.sweep import ladder_law

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
        """Run trunks, then their branches; return the losses of the branches; None where a run failed."""
        from titan.sweep.ladder_law import MeasuredRung

        trunk_trials = self._expand([trunk.list_overrides() for trunk in trunks])
        if not self._start(trunk_trials):
            return None
        branches = list(_pair_branches(trunks, trunk_trials))
        trials = self._expand([trunk.list_branch_overrides(rung, folder) for trunk, rung, folder in branches])
        if not self._start(trials):
            return None
        return [
            MeasuredRung(trunk, rung, _read_loss(Path(trial.run.directory)), trial.run.directory)
            for (trunk, rung, _), trial in zip(branches, trials, strict=True)
        ]

    def _expand(self, lines: Sequence[Sequence[str]]) -> list[Trial]:
        return _expand(self.launcher, self.overrides, lines, self.count, self.shown)

    def _start(self, trials: list[Trial]) -> bool:
        """Run a batch; return whether all of it finished."""
        self.count += len(trials)
        codes = self.launcher.start(trials)
        self.launcher.session.codes += codes
        return not any(codes)

    def _score(
        self, prediction: LadderPrediction, measured: Sequence[MeasuredRung], outcome: Sequence[MeasuredRung]
    ) -> None:
        """Print and write what came of the prediction, and add the longest run of each variant to the user's record."""
        from titan.sweep import ladder_law

        rows = [(*pair, m.loss) for pair, m in zip(self._pair_predictions(prediction), outcome, strict=True)]
        speedups = ladder_law.measure_speedups(self.ladder, [*measured, *outcome])
        scores = [
            {"variant": t.variant.label, "length": r.length, "d": p.d, "loss": loss, "inside": p.holds(loss)}
            for t, r, p, loss in rows
        ]
        content = {"digest": prediction.digest, "scores": scores}
        if speedups:
            content["speedups"] = [_describe_rung(speedup, self.ladder.variants[0]) for speedup in speedups]
        write_json(self.root / predictions.SCORE, content)
        print("\nthe largest size, predicted before it ran, and measured")
        for trunk, rung, predicted, loss in rows:
            verdict = "inside" if predicted.holds(loss) else "outside"
            print(f"  {_name(trunk, rung)}: {_format_prediction(predicted)}, measured {format_fixed(loss)}: {verdict}")
        self._print_speedups(speedups)
        self._record(prediction, [(p, loss) for trunk, rung, p, loss in rows if rung == trunk.rungs[-1]])
        print(f"python -m titan.law {shorten_path(str(self.root))} shows the law of all sizes.", flush=True)

    def _print_speedups(self, speedups: Sequence[RungSpeedup]) -> None:
        """Print the measured speed-up of each variant at each rung."""
        from titan.scaling.rung_speedups import describe_rung

        for name in dict.fromkeys(found.variant for found in speedups):
            print(f"\n{name} against {self.ladder.variants[0].label}, as measured at each rung")
            for found in speedups:
                if found.variant == name:
                    print(f"  {describe_rung(found)}")

    def _record(self, prediction: LadderPrediction, longest: Sequence[tuple[predictions.PredictedLoss, float]]) -> None:
        """Add the outcome of the longest run of each variant to the user's record, and print the record's sum."""
        try:
            for predicted, loss in longest:
                predictions.add_score(self.root, prediction, predicted, loss, _read_clock())
        except OSError as error:
            print(f"{predictions.find_record()}: the record of predictions can't be written ({error.strerror}).")
        print(predictions.read_record(prediction.losses[-1].level).describe())


def _name(trunk: Trunk, rung: Rung) -> str:
    return ", ".join(filter(None, (trunk.variant.label, rung.label)))


def _describe_rung(found: RungSpeedup, baseline: Variant) -> dict[str, Any]:
    from titan.sweep import ladder_law

    return {
        "variant": found.variant, "baseline": baseline.label, "n": found.n, "d": found.d, "pairs": found.pairs,
        "baseline_loss": found.baseline_loss, "loss": found.loss, **ladder_law.describe_shares(found.speedup),
    }  # fmt: skip


def _pair_branches(trunks: Sequence[Trunk], trials: Sequence[Trial]) -> Iterator[tuple[Trunk, Rung, Path]]:
    """Yield each trunk and rung with the directory of the trunk."""
    for trunk, trial in zip(trunks, trials, strict=True):
        for rung in trunk.rungs:
            yield trunk, rung, Path(trial.run.directory)


def _format_prediction(loss: predictions.PredictedLoss) -> str:
    return f"predicted {format_fixed(loss.value)} {format_interval(loss.low, loss.high)} ({100 * loss.level:g} %)"


def _read_loss(directory: Path) -> float:
    """Return the final validation loss of a run.

    Raises:
        RunError: where it has none that is finite.
    """
    loss = _read_metric(directory)
    if not math.isfinite(loss):
        raise RunError(
            f"{directory}: has no finite validation loss, so the ladder has no law; see python -m titan.status."
        )
    return loss


def _read_metric(directory: Path) -> float:
    """Return the final validation loss of a run; infinite where it has none that is finite."""
    loss = read_result(directory)[0].get("validation_loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else math.inf


def _read_clock() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
