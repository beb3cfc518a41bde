"""Whether a command continues the run in its directory, or would make it another experiment. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan.checkpoint.manifest import Manifest
from titan.checkpoint.select import CheckpointCandidate
from titan.config.kinds import get_kind
from titan.config.settings import format_value
from titan.dataset.mixture import RowMixture
from titan.errors import ConfigError
from titan.files.run_directory import RUN
from titan.model.schema import Llama
from titan.run import identity
from titan.run.lineage import count_rows_read
from titan.run.run import Run, as_config, flatten_config
from titan.run.summary import shorten_path

_DEFAULT = object()


def check_same(
    run: Run, last: Mapping[str, Any], science: Mapping[str, Any], mix: RowMixture, saved: CheckpointCandidate | None
) -> None:
    """Raise ConfigError when the run's settings make it another experiment than its last attempt's.

    More steps are a continuation. So is what changes only the rows after those that the last checkpoint has read: a
    later stage of the mixture, rows to skip, a larger batch.
    """
    old, new = dict(last["science"]), dict(science)
    differ = sorted(k for k in old.keys() | new.keys() if _is_different(k, old, new))
    if differ and not (saved and _concerns_later_rows(run, differ, mix, saved.manifest)):
        _reject_other(run, last, new, differ)
    _reject_fewer_steps(run, last)


def check_same_without_data(run: Run, last: Mapping[str, Any]) -> None:
    """Raise ConfigError when settings that need neither data nor checkpoints show another experiment."""
    new = {k: v for k, v in identity.select_settings(run, science=True).items() if not _needs_data(k)}
    old = {k: v for k, v in last["science"].items() if not _needs_data(k)}
    _reject_other(run, last, new, sorted(k for k in old.keys() | new.keys() if _is_different(k, old, new)))
    _reject_fewer_steps(run, last)


def _needs_data(key: str) -> bool:
    """Return whether a science setting can be compared only with the data and checkpoints at hand."""
    return key.split(".")[0] in ("dataset", "data", "parent") or key == "training.grow"


def _is_different(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return key != "training.steps" and old.get(key, _DEFAULT) != new.get(key, _DEFAULT)


def _concerns_later_rows(run: Run, differ: list[str], mix: RowMixture, saved: Manifest) -> bool:
    """Return whether the differing settings only concern rows that the last checkpoint has not read."""
    order_only = [k for k in differ if k in ("dataset", "data", "training.grow") or k.startswith("dataset.")]
    if order_only != differ or "dataset.mask_documents" in differ:
        return False
    try:
        return count_rows_read(run, mix, saved) > 0
    except ConfigError:
        return False


def _reject_other(run: Run, last: Mapping[str, Any], new: Mapping[str, Any], differ: list[str]) -> None:
    """Raise ConfigError that names the settings that differ, if any do."""
    if differ:
        last_values = {"model": get_kind(Llama), **flatten_config(last["config"]), **last["science"]}
        new_values = {"model": get_kind(Llama), **flatten_config(as_config(run)), **new}  # which ids leave out
        differences = "; ".join(
            f"{k} was {format_value(last_values.get(k))}, now {format_value(new_values.get(k))}" for k in differ
        )
        raise ConfigError(
            f"{_name_setting(run)}: holds another experiment ({differences}); choose another name for this one, and "
            f"checkpoint.resume={shorten_path(run.directory)} if it is to begin where that one ended."
        )


def _reject_fewer_steps(run: Run, last: Mapping[str, Any]) -> None:
    """Raise ConfigError for fewer steps than the last attempt had."""
    steps = int(last["config"]["training"]["steps"])
    if run.training.steps < steps:
        raise ConfigError(
            f"training.steps={run.training.steps}: the run in {run.directory} has {steps}; give {steps} or more."
        )


def _name_setting(run: Run) -> str:
    """Return where the run is: its directory, or the setting that names a copy of it, with its value."""
    if (Path(run.directory) / RUN).is_file() or run.checkpoint.path is None:
        return shorten_path(run.directory)
    return f"checkpoint.path={run.checkpoint.path}"
