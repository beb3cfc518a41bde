"""What a tracker shows of a run: its description, and the curves of its records. Free of torch."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from titan.config.settings import format_value
from titan.hooks.schema import METRIC_PREFIX
from titan.metrics.secrets import remove_secrets

Warn = Callable[[str], None]


class TrackerRun(Protocol):
    """A run at a tracker, which shows its records; it may raise and block."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one record of metrics.jsonl."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Take the final result and close; nothing follows."""


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What trackers show of a run beside its records.

    Attributes:
        run_id: the same in every attempt of a run, so that a resumed run continues the same tracker run.
        group_id: shared by the seeds of one experiment; that of the run's first attempt.
        name: the run's display name.
        config: the resolved settings as plain containers; values that look like secrets are left out.
        facts: what identifies the run: choices, kinds, ids, commit, data, parameters, sweep and variant.
        sweep: the name of its sweep, if any.
        labels: its recipe, if it has one, and its layout.
    """

    run_id: str
    group_id: str
    name: str
    config: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    sweep: str | None = None
    labels: tuple[str, ...] = ()

    @property
    def metadata(self) -> dict[str, Any]:
        """Settings and facts, without secrets."""
        return remove_secrets({**self.config, **self.facts})


NO_CURVES = ("step", "time", "attempt")
"""Numbers of a record that are no measurements."""


def extract_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record under their names in a tracker: train/loss, validation/loss, hooks/NAME/METRIC.

    Lists, strings and booleans are left out, and so are the step, which is the axis, the attempt, which is no
    measurement, and the time, which trackers record themselves: TensorBoard's values are fp32, in which a time is known
    to two minutes.
    """
    validation = "validation_loss" in record and "loss" not in record
    scalars = {}
    for key, value in record.items():
        if key not in NO_CURVES and isinstance(value, numbers.Real) and not isinstance(value, bool):
            short_name = key.removeprefix("validation_")
            group = "validation" if validation or short_name != key else "train"
            scalars[key if key.startswith(METRIC_PREFIX) else f"{group}/{short_name}"] = float(value)
    return scalars


def extract_numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a result, without booleans."""
    numeric = ((k, v) for k, v in result.items() if isinstance(v, numbers.Real) and not isinstance(v, bool))
    return {key: float(value) for key, value in numeric}


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Return nested settings by dotted names, values that are no scalars as text."""
    flat_settings: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat_settings |= flatten_settings(value, f"{prefix}{key}.")
        else:
            flat_settings[f"{prefix}{key}"] = (
                value if isinstance(value, (bool, int, float, str)) else format_value(value)
            )
    return flat_settings
