"""A ladder through a launcher, in batches: the smaller sizes, the prediction of the largest, the largest, its score.

Each size is two batches, its trunks and then the branches that begin at their checkpoints. What has finished is not
started again, so that the same command goes on where a ladder was killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hydra.core.override_parser.types import Override

from launchers.session import SweepSession
from launchers.trials import Trial
from titan.console.numbers import format_fixed, format_interval
from titan.errors import ConfigError, RunError
from titan.estimate import plan as estimate
from titan.files.atomic import write_json
from titan.run import identity, summary
from titan.run.directory import read_result
from titan.run.run import Run
from titan.sweep import ladder as ladders
from titan.sweep import ledger, predictions
from titan.sweep.ladder import Ladder, Rung, Trunk
from titan.sweep.predictions import LadderPrediction
from titan.sweep.schema import Sweep

if TYPE_CHECKING:
    from titan.sweep.ladder_law import MeasuredRung


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


def list_fixed_overrides(parsed: Sequence[Override]) -> list[str]:
    """Return the overrides of a ladder's command line.

    Raises:
        ConfigError: where a setting has several values.
    """
    for override in parsed:
        if override.is_sweep_override() and override.key_or_group in ("sweep.sizes", "sweep.lengths"):
            key, _, values = str(override.input_line).partition("=")
            raise ConfigError(f"{override.input_line}: is a list of a ladder's; write {key}=[{values}].")
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: a ladder varies sizes and lengths only, by sweep.sizes and sweep.lengths; "
                "give one value, and start a ladder for each."
            )
    return [f"{override.get_key_element()}={override.get_value_element_as_str()}" for override in parsed]


def climb(launcher: LadderLauncher, overrides: Sequence[str], sweep: Sweep) -> None:
    """Plan or run a ladder, and add the exit codes of its runs to the launcher's session.

    Raises:
        ConfigError: before anything starts, when some of it can't work.
        RunError: when a run has no loss.
    """
    from titan.sweep import ladder_law  # only now: --help need not wait for numpy

    ladders.check_sweep(sweep)
    base = _expand(launcher, overrides, [[]], 0, ())[0].run
    ladder = ladders.build_ladder(base, overrides, sweep)
    ladder_law.rehearse(ladder)
    planned = _expand_planned(launcher, ladder, overrides)
    print(ladders.format_ladder(ladder, base, [_predict_hours(trial.run) for trial in planned]), flush=True)
    if launcher.session.is_dry_run:
        launcher.session.codes += launcher.start(list({trial.id: trial for trial in planned}.values()))
        return
    if not getattr(launcher.settings, "wait", True):
        raise ConfigError("hydra.launcher.wait=false: a ladder goes on when runs have ended; leave it out.")
    launcher.check_inputs(planned)
    ids = sorted(identity.compute_portable_trial_id(trial.run) for trial in planned)  # it may go on on other machines
    Climb(launcher, overrides, ladder, identity.compute_digest(ids)).run()


def _expand_planned(launcher: LadderLauncher, ladder: Ladder, overrides: Sequence[str]) -> list[Trial]:
    """Return all runs of a ladder, checked, in the order of `list_costs`; branches as runs without a checkpoint."""
    lines = [
        line
        for trunk in ladder.trunks
        for line in (trunk.list_overrides(), *(trunk.list_planned_overrides(rung) for rung in trunk.rungs))
    ]
    return _expand(launcher, overrides, lines, 0, ("model.dim", "training.seed", "training.steps"))


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

    def __init__(self, launcher: LadderLauncher, overrides: Sequence[str], ladder: Ladder, key: str) -> None:
        """Take a ladder that is checked.

        Args:
            launcher: starts its runs.
            overrides: of the command line.
            ladder: what is to run.
            key: digest of its settings.

        Raises:
            ConfigError: where the directory has another ladder.
        """
        self.launcher, self.overrides, self.ladder, self.key = launcher, overrides, ladder, key
        self.root, self.count = launcher.root, 0
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
        for rung, loss in zip(self.ladder.largest.rungs, prediction.losses, strict=True):
            print(f"  {rung.label}: {_format_prediction(loss)}", flush=True)
        outcome = self._train((self.ladder.largest,))
        if outcome is not None:
            self._score(prediction, [m.loss for m in outcome])

    def _predict(self, measured: Sequence[MeasuredRung]) -> LadderPrediction:
        """Write the prediction of the largest size.

        Raises:
            ConfigError: where the largest size has begun.
            RunError: where the file is gone.
        """
        from titan.sweep import ladder_law

        (largest,) = self._expand([self.ladder.largest.list_overrides()])
        begun = {trial.id for trial in ledger.read_trials(self.root) if trial.submissions}
        if largest.id in begun or Path(largest.run.directory).exists():
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
            MeasuredRung(rung, trunk.seed, _read_loss(Path(trial.run.directory)), trial.run.directory)
            for (trunk, rung, _), trial in zip(branches, trials, strict=True)
        ]

    def _expand(self, lines: Sequence[Sequence[str]]) -> list[Trial]:
        return _expand(self.launcher, self.overrides, lines, self.count, ladders.SHOWN)

    def _start(self, trials: list[Trial]) -> bool:
        """Run a batch; return whether all of it finished."""
        self.count += len(trials)
        codes = self.launcher.start(trials)
        self.launcher.session.codes += codes
        return not any(codes)

    def _score(self, prediction: LadderPrediction, losses: Sequence[float]) -> None:
        """Print and write what came of the prediction, and add the longest run to the user's record."""
        rows = list(zip(self.ladder.largest.rungs, prediction.losses, losses, strict=True))
        scores = [{"length": r.length, "d": p.d, "loss": loss, "inside": p.holds(loss)} for r, p, loss in rows]
        write_json(self.root / predictions.SCORE, {"digest": prediction.digest, "scores": scores})
        print("\nthe largest size, predicted before it ran, and measured")
        for rung, predicted, loss in rows:
            verdict = "inside" if predicted.holds(loss) else "outside"
            print(f"  {rung.label}: {_format_prediction(predicted)}, measured {format_fixed(loss)}: {verdict}")
        try:
            predictions.add_score(self.root, prediction, losses[-1], _read_clock())
        except OSError as error:
            print(f"{predictions.find_record()}: the record of predictions can't be written ({error.strerror}).")
        print(predictions.read_record(prediction.losses[-1].level).describe())
        print(f"python -m titan.law {summary.shorten_path(str(self.root))} shows the law of all sizes.", flush=True)


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
    loss = read_result(directory)[0].get("validation_loss")
    if not isinstance(loss, float) or not math.isfinite(loss):
        raise RunError(
            f"{directory}: has no finite validation loss, so the ladder has no law; see python -m titan.status."
        )
    return loss


def _read_clock() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
