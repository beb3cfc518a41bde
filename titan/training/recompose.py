"""The command line of a run, composed again for a replay or an evaluation on this machine. Free of torch.

Where this machine can start as many ranks as the run had, layout, micro-batches and compilation stay as they were;
elsewhere there is one device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan.checkpoint import select
from titan.checkpoint.manifest import Manifest
from titan.cluster import devices
from titan.console.numbers import format_plural
from titan.console.text import sanitize_line
from titan.dataset import corpora
from titan.dataset.mixture import RowMixture
from titan.errors import ConfigError
from titan.evaluation.schema import Evaluation
from titan.files.run_directory import check_run_directory
from titan.metrics.schema import Metrics
from titan.run import identity, trust
from titan.run.attempts import Attempt
from titan.run.directory import read_attempts
from titan.run.lineage import Parent, count_rows_read, find_parent
from titan.run.run import Run

CPU_RANKS = 16
"""Ranks that are started on a CPU unless the user gives another layout."""
INCLUDED_OVERRIDES = ("checkpoint.resume=", "checkpoint.weights=", "checkpoint.verify=")
LAYOUT_OVERRIDES = ("cluster", "parallelism", "memory.offload")
"""Overrides that another machine may not be able to follow."""

Compose = Callable[[Sequence[str], Sequence[str]], Run]
"""Composes a command line behind a recorded one: `launchers.command.compose_single`."""


def read_run_attempts(name: str) -> list[dict[str, Any]]:
    """Return the documents of a run's run.yaml.

    Raises:
        ConfigError: when there is no run.
    """
    attempts = read_attempts(check_run_directory(name))
    if not attempts:
        raise ConfigError(f"{name}: its run.yaml is empty; give another run's directory, such as runs/NAME.")
    return attempts


def build_command(
    document: Mapping[str, Any], overrides: Sequence[str], excluded: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Return the command line that repeats an attempt on this machine, and notes on what differs.

    Args:
        document: the attempt's in run.yaml.
        overrides: the user's, which come after it.
        excluded: beginnings of the attempt's own overrides that are not repeated.
    """
    user_overrides = [o.lstrip("+") for o in overrides]
    run_overrides = document.get("overrides") or ()
    repeated = [o for o in run_overrides if not o.lstrip("+").startswith(excluded) or o.startswith(INCLUDED_OVERRIDES)]
    same_layout = _fits_machine(document) and not any(o.startswith(("parallelism=", "cluster")) for o in user_overrides)
    notes = []
    if not same_layout:
        repeated = [o for o in repeated if not o.startswith(LAYOUT_OVERRIDES)]
        if not any(o.startswith("parallelism") for o in user_overrides):
            repeated.append("parallelism=single")
            notes.append(f"one device, where the run had {format_plural(_count_ranks(document), 'rank')}")
    config, pins = document["config"], {"precision.compute": document["config"]["precision"]["compute"]}
    if same_layout:
        pins |= {"parallelism.microbatches": document.get("microbatches") or "auto"}
        pins |= {"compile.scope": config.get("compile", {}).get("scope", "auto")}
    overridden_axes = {
        key.partition(".")[0] for key in pins if any(o.startswith(key.partition(".")[0]) for o in user_overrides)
    }
    repeated += [f"{key}={value}" for key, value in pins.items() if key.partition(".")[0] not in overridden_axes]
    if config.get("debug", {}).get("audit"):
        repeated.append("debug.audit=0")  # it changes nothing, and one device has no rank to audit it
    return [*(document.get("options") or ()), *repeated], notes


def _fits_machine(document: Mapping[str, Any]) -> bool:
    """Whether this machine can start the ranks of an attempt."""
    try:
        machine = devices.detect_machine(document["config"].get("cluster", {}).get("device", "auto"))
    except ConfigError:
        return False
    return _count_ranks(document) <= (machine.count if machine.device == "cuda" else CPU_RANKS)


def _count_ranks(document: Mapping[str, Any]) -> int:
    return math.prod(int(degree) for degree in (document.get("layout") or {}).values())


def disable_outputs(run: Run, evaluation: Evaluation, scratch: Path) -> Run:
    """Return the run with what is measured, another directory, and without what it writes by itself."""
    checkpoint = replace(run.checkpoint, mode="sync", every=0, minutes=0, path=None, export=None)
    metrics = Metrics(sample_tokens=0, plot=False, spike_window=0)
    return replace(run, directory=str(scratch), checkpoint=checkpoint, metrics=metrics, evaluation=evaluation)


def open_run_again(
    name: str, document: Mapping[str, Any], run: Run, overrides: Sequence[str]
) -> tuple[RowMixture, Attempt, Parent]:
    """Return the rows of a recorded run, an attempt that begins where its first one did, and what it began from.

    Args:
        run: composed again.
        overrides: the user's that may differ from the run's.

    Raises:
        ConfigError: when data or settings are not the run's.
    """
    mix = corpora.build_mixture(run.dataset, run.training, corpora.prepare_corpora(run.dataset))
    parent = find_parent(replace(run, directory=name), [], mix, has_checkpoint=False)
    science = identity.collect_science(run, corpora.compute_data_digest(mix), parent.id)
    check_science(name, document, science, overrides)
    ids = identity.compute_ids(run, science)
    return mix, Attempt(1, "again", ids, mix.folders, None, 0, 0, "resume", parent.id, parent.weights), parent


def begin_at(attempt: Attempt, run: Run, mix: RowMixture, path: str, saved: Manifest) -> Attempt:
    """Return an attempt that begins at a checkpoint."""
    rows = count_rows_read(run, mix, saved)
    return replace(attempt, checkpoint=path, step=saved.step, rows=rows, weights=None)


def check_science(name: str, document: Mapping[str, Any], science: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raise ConfigError when data or settings differ from the run's, other than by the user's overrides."""
    keys = tuple(o.lstrip("+").partition("=")[0] for o in overrides)
    run_science = document["science"]
    for key in sorted(run_science.keys() | science.keys()):
        if run_science.get(key) == science.get(key) or key.startswith((*keys, "training.steps")):
            continue
        if key == "data":
            raise ConfigError(
                f"{name}: the data here are not those of the run (digest {science.get(key, '')[:12]} instead of "
                f"{run_science.get(key, '')[:12]}); give dataset.path=DIR or what else names the run's data, such as "
                "dataset=prepared dataset.path=FOLDER."
            )
        raise ConfigError(
            f"{name}: {key} was {run_science.get(key, 'the default')}, and its command gives "
            f"{science.get(key, 'the default')} here; give {key} as it was."
        )


def list_checkpoints(
    name: str, document: Mapping[str, Any], run_id: str, check: select.ContentCheck | None = None
) -> dict[int, tuple[str, Manifest]]:
    """Return path and manifest of the complete checkpoints of a run and of its copies, by their steps.

    Args:
        document: the attempt's in run.yaml that says where copies are.
        check: leave out corrupt ones after the last complete one, with a warning.
    """
    copy_path = document["config"].get("checkpoint", {}).get("path")
    if copy_path and trust.is_address(str(copy_path)) and trust.find_foreign(f"checkpoint.path={copy_path}"):
        print(
            f"titan: warning: {name}: its copies in {sanitize_line(str(copy_path))} are not read, because you have not "
            "typed this URL for a run of yours.",
            file=sys.stderr,
        )
        copy_path = None
    folder = Path(name).expanduser()
    candidates = select.list_candidates(folder, copy_path, run_id)
    if check is not None:
        last, notes = select.find_latest(folder, copy_path, run_id, check)
        if last is None and notes:
            raise ConfigError(f"{name}: holds no complete checkpoint ({'; '.join(notes)}); give another run.")
        select.report_skipped(notes, last.path if last else "")
        candidates = {s: found for s, found in candidates.items() if last and s <= last.manifest.step}
    return {step: (candidate.path, candidate.manifest) for step, candidate in candidates.items()}
