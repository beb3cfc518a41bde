"""Which checkpoint, layout and data a replay uses: all checks before work starts. Free of torch.

The run's own command line is composed again, with the user's overrides behind it. Where this machine can start as many
ranks as the run had, layout, micro-batches and compilation stay as they were, and the replay is bitwise; elsewhere it
runs on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titan.checkpoint import select
from titan.checkpoint.manifest import Manifest
from titan.cluster import devices
from titan.config.arguments import operand
from titan.config.settings import MISSING, setting
from titan.dataset import corpora
from titan.dataset.mixture import RowMixture
from titan.errors import ConfigError
from titan.evaluation.schema import Evaluation
from titan.metrics.schema import Metrics
from titan.run import identity
from titan.run.attempts import Attempt
from titan.run.axes import translate_overrides
from titan.run.directory import RUN, read_attempts
from titan.run.lineage import count_rows_read, find_parent
from titan.run.run import Run

CPU_RANKS = 16
"""Ranks that a replay starts on a CPU without being asked for them."""
EXCLUDED_OVERRIDES = ("name", "hydra", "sweep", "checkpoint.", "checkpoint=", "metrics", "evaluation")
"""Overrides of the run that say where it writes, by their beginnings."""
INCLUDED_OVERRIDES = ("checkpoint.resume=", "checkpoint.weights=", "checkpoint.verify=")
LAYOUT_OVERRIDES = ("cluster", "parallelism", "memory.offload")
"""Overrides that another machine may not be able to follow."""

Compose = Callable[[Sequence[str], Sequence[str]], Run]
"""Composes a command line behind a recorded one: `launchers.command.compose_single`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The step of a replay, and what is shown of it."""

    run: str = operand("RUN", "the directory of a run, such as runs/NAME")
    step: int = setting(MISSING, "the step to look at", at_least=1)
    start: int | None = setting(
        None, "the step of the checkpoint to begin at; 0: the initial weights; null: the nearest before", at_least=0
    )
    against: str | None = setting(None, "another run, or overrides for the same step: both are compared", any_text=True)
    tolerance: float | None = setting(
        None, "relative difference of activations that counts as rounding; null: by precision", above=0
    )
    tokens: int = setting(10, "tokens with the largest losses to show", at_least=1, cap=1000)
    to: str | None = setting(None, "a JSON file to write, with everything that is shown")


@dataclass(frozen=True)
class ReplayPlan:
    """A replay that can start.

    Attributes:
        run: with a temporary directory, and nothing that a run writes beside checkpoints.
        attempt: the checkpoint to begin at.
        mix: the rows.
        recorded: the run's line of the step; empty where it has none.
        notes: on what differs from the run.
    """

    run: Run
    attempt: Attempt
    mix: RowMixture
    recorded: Mapping[str, Any]
    notes: tuple[str, ...]


def read_run_attempts(name: str) -> list[dict[str, Any]]:
    """Return the documents of a run's run.yaml.

    Raises:
        ConfigError: when there is no run.
    """
    directory = Path(name).expanduser()
    attempts = read_attempts(directory) if (directory / RUN).is_file() else []
    if not attempts:
        raise ConfigError(f"{name}: there is no run in this directory; give one such as runs/NAME.")
    return attempts


def plan_replay(
    name: str,
    settings: Settings,
    overrides: Sequence[str],
    scratch: Path,
    compose: Compose,
    recorded: Mapping[str, Any],
) -> ReplayPlan:
    """Return the replay of a run's step.

    Args:
        name: the run's directory; nothing is written into it.
        settings: the step, and the checkpoint.
        overrides: of the user.
        scratch: where the ranks write.
        compose: composes command lines.
        recorded: see `ReplayPlan`.

    Raises:
        ConfigError: when the step, the checkpoint or the data are not there, or the run can't work here.
    """
    documents = read_run_attempts(name)
    document = next((d for d in reversed(documents) if int(d.get("from_step") or 0) < settings.step), documents[0])
    steps = int(document["config"]["training"]["steps"])
    if settings.step > steps:
        raise ConfigError(f"step={settings.step}: the run in {name} has {steps} steps; give one of them.")
    command, notes = build_command(document, overrides)
    run = _disable_outputs(compose(overrides, command), scratch)
    folders = corpora.prepare_corpora(run.dataset)
    mix = corpora.build_mixture(run.dataset, run.training, corpora.open_corpora(folders))
    lineage_parent = find_parent(replace(run, directory=name), [], mix, has_checkpoint=False)
    science = identity.collect_science(run, corpora.compute_data_digest(mix), lineage_parent.id)
    check_science(name, document, science, overrides)
    if settings.start == 0 or (settings.start is None and settings.step == 1):
        checkpoint = (
            None
            if lineage_parent.checkpoint is None
            else (lineage_parent.checkpoint.path, lineage_parent.checkpoint.manifest)
        )
    else:
        copy_path = document["config"].get("checkpoint", {}).get("path")
        saved = select.list_candidates(Path(name).expanduser(), copy_path, str(documents[0]["run_id"]))
        checkpoint = _select_checkpoint(
            name,
            settings,
            {step: (saved_checkpoint.path, saved_checkpoint.manifest) for step, saved_checkpoint in saved.items()},
        )
    path, manifest = checkpoint or (None, None)
    step, rows = (manifest.step, count_rows_read(run, mix, manifest)) if manifest else (0, 0)
    weights = None if path else lineage_parent.weights
    ids = identity.compute_ids(run, science)
    attempt = Attempt(1, "replay", ids, folders, path, step, rows, "resume", lineage_parent.id, weights)
    return ReplayPlan(run, attempt, mix, recorded, tuple(notes))


def build_command(
    document: Mapping[str, Any], overrides: Sequence[str], excluded: tuple[str, ...] = EXCLUDED_OVERRIDES
) -> tuple[list[str], list[str]]:
    """Return the command line that repeats an attempt on this machine, and notes on what differs.

    Args:
        document: the attempt's in run.yaml.
        overrides: the user's, which come after it.
        excluded: beginnings of the attempt's own overrides that are not repeated.
    """
    user_overrides = [o.lstrip("+") for o in overrides]
    run_overrides = translate_overrides(document.get("overrides") or (), warn=False)
    repeated = [o for o in run_overrides if not o.lstrip("+").startswith(excluded) or o.startswith(INCLUDED_OVERRIDES)]
    same_layout = _fits_machine(document) and not any(o.startswith(("parallelism=", "cluster")) for o in user_overrides)
    notes = []
    if not same_layout:
        repeated = [o for o in repeated if not o.startswith(LAYOUT_OVERRIDES)]
        if not any(o.startswith("parallelism") for o in user_overrides):
            repeated.append("parallelism=single")
            notes.append(f"one device, where the run had {_format_ranks(document)}")
    config, pins = document["config"], {"precision.compute": document["config"]["precision"]["compute"]}
    if same_layout:
        pins |= {"parallelism.microbatches": document.get("microbatches") or "auto"}
        pins |= {"compile.scope": config.get("compile", {}).get("scope", "auto")}
    overridden_axes = {
        key.partition(".")[0] for key in pins if any(o.startswith(key.partition(".")[0]) for o in user_overrides)
    }
    repeated += [f"{key}={value}" for key, value in pins.items() if key.partition(".")[0] not in overridden_axes]
    return [*(document.get("options") or ()), *repeated], notes


def _fits_machine(document: Mapping[str, Any]) -> bool:
    """Whether this machine can start the ranks of an attempt."""
    try:
        machine = devices.detect_machine(document["config"].get("cluster", {}).get("device", "auto"))
    except ConfigError:
        return False
    return _count_ranks(document) <= (machine.count if machine.device == "cuda" else CPU_RANKS)


def _count_ranks(document: Mapping[str, Any]) -> int:
    ranks = 1
    for degree in (document.get("layout") or {}).values():
        ranks *= int(degree)
    return ranks


def _format_ranks(document: Mapping[str, Any]) -> str:
    count = _count_ranks(document)
    return f"{count} rank{'s' if count > 1 else ''}"


def _disable_outputs(run: Run, scratch: Path) -> Run:
    """Return the run with another directory, and without what it writes beside a checkpoint that is asked for."""
    checkpoint = replace(run.checkpoint, mode="sync", every=0, minutes=0, path=None, export=None)
    metrics = Metrics(sample_tokens=0, plot=False, spike_window=0)
    evaluation = Evaluation(every=0, tokens=0)
    return replace(run, directory=str(scratch), checkpoint=checkpoint, metrics=metrics, evaluation=evaluation)


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
                f"{run_science.get(key, '')[:12]}); give dataset.path=DIR or what else names the run's data."
            )
        raise ConfigError(
            f"{name}: {key} was {run_science.get(key, 'the default')}, and its command gives "
            f"{science.get(key, 'the default')} here; give {key} as it was."
        )


def _select_checkpoint(
    name: str, settings: Settings, checkpoints: Mapping[int, tuple[str, Manifest]]
) -> tuple[str, Manifest]:
    """Return the checkpoint to begin at, of those of the run by their steps.

    Raises:
        ConfigError: when there is none before the step.
    """
    earlier_steps = [step for step in checkpoints if step < settings.step]
    if settings.start is not None and settings.start not in earlier_steps:
        raise ConfigError(
            f"start={settings.start}: the run has no complete checkpoint of this step before step {settings.step}; "
            f"give {_format_steps(earlier_steps)}."
        )
    if not earlier_steps:
        raise ConfigError(
            f"step={settings.step}: the run in {name} has no complete checkpoint before this step"
            f"{f', the first is of step {min(checkpoints)}' if checkpoints else ''}; give a later step, or start=0 to "
            "begin at the initial weights."
        )
    return checkpoints[max(earlier_steps) if settings.start is None else settings.start]


def _format_steps(steps: Sequence[int]) -> str:
    return f"one of {', '.join(map(str, sorted(steps)))}, or 0" if steps else "0, the initial weights"
