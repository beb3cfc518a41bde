"""Which running trials of a search are asked to end before their last step.

`hydra.sweeper.pruner=margin` follows titan's rule, `titan.scaling.early_stopping`; Optuna's pruners are asked only
where that rule allows a trial to end at all: after its learning rate has decayed, unless trials differ in nothing that
changes the shape of the curve. Positions are tokens, as trials may differ in their batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from titan.errors import ConfigError
from titan.run.run import Run
from titan.scaling.early_stopping import StoppingEvidence, Trajectory, find_decay, find_stop, list_shape_settings
from titan.sweep.schema import OptunaSearch, Sweep

if TYPE_CHECKING:
    import optuna

MEASURED = "validation_loss"
"""The objective by which trials can be ended early."""
RECORDED = "evaluations"
"""The attribute of Optuna's trials that has the tokens of their evaluations, of their end and of the decay."""


class StoppingRule:
    """Decides which trials of a study end early.

    Attributes:
        same_shape: whether what varies leaves the shape of the curve as it is.
    """

    def __init__(self, study: optuna.Study, names: Iterable[str], pruner: str) -> None:
        """Take a study.

        Args:
            names: the settings that vary.
            pruner: `hydra.sweeper.pruner`.
        """
        self.study, self.pruner = study, pruner
        self.same_shape = not list_shape_settings(names)

    def record(self, asked: optuna.trial.Trial, run: Run) -> None:
        """Keep in the study what the rule needs of a trial besides its losses."""
        decayed_from = find_decay_tokens(run)
        recorded = {"tokens": list_evaluation_tokens(run), "end": run.training.total_tokens}
        asked.set_user_attr(RECORDED, recorded | {"decay": decayed_from if math.isfinite(decayed_from) else None})

    def find_reason(self, asked: optuna.trial.Trial) -> str:
        """Return why a trial ends after its last evaluation; empty where it goes on."""
        trials = self.study.get_trials(deepcopy=False)
        trial = trials[asked.number]
        variant = build_trajectory(trial)
        if variant is None or not variant.may_stop(position := max(variant.losses, default=0), self.same_shape):
            return ""
        reason = f"hydra.sweeper.pruner={self.pruner} ended it after evaluation {max(trial.intermediate_values)}"
        if self.pruner != "margin":
            return reason if asked.should_prune() else ""
        latest = dataclasses.replace(variant, losses={position: variant.losses[position]})
        evidence = find_stop(latest, self._list_complete(trials), self.same_shape)
        return "" if evidence is None else f"{reason}: {describe_evidence(evidence)}"

    def _list_complete(self, trials: Sequence[optuna.trial.FrozenTrial]) -> list[Trajectory]:
        from optuna.trial import TrialState

        built = (build_trajectory(trial) for trial in trials if trial.state == TrialState.COMPLETE)
        return [trajectory for trajectory in built if trajectory is not None]


def build_trajectory(trial: optuna.trial.FrozenTrial) -> Trajectory | None:
    """Return the finite losses of a trial by tokens; None where the study has none of its evaluations' tokens."""
    recorded: dict[str, Any] | None = trial.user_attrs.get(RECORDED)
    if recorded is None:
        return None
    tokens, decay = recorded["tokens"], recorded["decay"]
    values = trial.intermediate_values.items()
    losses = {tokens[k - 1]: loss for k, loss in values if k <= len(tokens) and math.isfinite(loss)}
    end = math.inf if trial.values is None else trial.values[0]
    return Trajectory(str(trial.number), losses, recorded["end"], end, math.inf if decay is None else decay)


def describe_evidence(evidence: StoppingEvidence) -> str:
    """Return what earlier trials say of stopping."""
    return (
        f"it is further above the best than the {evidence.margin:.3g} that any of {evidence.variants} trials made up "
        f"from there (rank correlation of their losses there with their ends: {evidence.correlation:.2f})"
    )


def list_evaluation_tokens(run: Run) -> list[int]:
    """Return the tokens after each evaluation before the last step."""
    training = run.training
    return [training.count_rows_before(step + 1) * training.seq_len for step in _list_steps(run)]


def find_decay_tokens(run: Run) -> float:
    """Return the tokens of the evaluation from which on the learning rate has decayed; infinite where there is none."""
    compute = run.schedule.build(run.training.steps)
    rates = [compute(step).lr for step in (*_list_steps(run), run.training.steps)]
    return find_decay([*list_evaluation_tokens(run), run.training.total_tokens], rates)


def _list_steps(run: Run) -> range:
    every = run.evaluation.every
    return range(every, run.training.steps, every) if every else range(0)


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
