"""The trials of a sweep: composed, checked and named before any of them starts. Free of torch."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from launchers import frozen
from launchers.composing import Composer
from titan.cluster import devices
from titan.cluster.devices import Machine
from titan.cluster.schema import Cluster
from titan.console.progress import progress_line
from titan.console.text import redact, safe
from titan.errors import ConfigError
from titan.run import compose, identity
from titan.run.hydra_choices import check_optional
from titan.run.run import Run
from titan.sweep import ledger

AUTO = "auto"
"""The value of `hydra.sweep.subdir` that names a trial's folder after what it varies."""
LONGEST = 100
"""Characters of a folder's name."""
TERMINAL_SECONDS, LOG_SECONDS = 0.1, 5.0
"""The time between two progress lines: on a terminal, and in a log."""
MANY = 20
"""From so many trials on, a log has progress lines too."""
Machines = Callable[[Cluster], Machine]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        id: see `known`.
        varied: its overrides, without those that all trials share.
        run: the frozen run.
        config: what Hydra composed, for callbacks.
    """

    id: str
    varied: tuple[str, ...]
    run: Run
    config: DictConfig | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return safe(" ".join(self.varied) or self.run.name)


def expand_trials(
    loader: Any,
    config: DictConfig,
    overrides: Sequence[Sequence[str]],
    first: int,
    elsewhere: bool,
    trusted: tuple[str, ...] = (),
    fixed: Collection[str] | None = None,
) -> list[Trial]:
    """Compose and check every trial, and choose its folder: the one that it has had, or a new one.

    Args:
        loader, config: Hydra's, of the sweep.
        overrides: of each trial.
        first: Hydra's number of the first trial.
        elsewhere, trusted: see `titan.run.compose.freeze`.
        fixed: the settings that do not vary, of a sweeper that comes with one batch of trials after another, in which a
            trial may be there twice; None: those that are the same in all trials.

    Raises:
        ConfigError: for a trial that is rejected, with its number and overrides, and for two that are the same.
    """
    root = Path(os.path.abspath(config.hydra.sweep.dir))
    composer, machine = Composer(loader, config), _remembered(devices.describe_remote_node if elsewhere else _here)
    shared = [o for o, count in Counter(o for trial in overrides for o in trial).items() if count == len(overrides)]
    if (root / "run.yaml").exists():
        raise ConfigError(f"hydra.sweep.dir={root}: holds a single run; choose another name for a sweep.")
    noted = ledger.trials_by_ledger(root)
    kept = {trial.id: Path(trial.directory) for trial in noted}
    found: dict[str, Trial] = {}
    chosen: list[Trial] = []
    for number, one in enumerate(_counted(overrides)):
        same = shared if fixed is None else [o for o in one if o.partition("=")[0].lstrip("+~") in fixed]
        varied = tuple(redact(o) for o in one if o not in same)
        with _name_trial_in_errors(number, varied):
            cfg = _composed(composer, one, first + number, _folder_name(varied))
            run = compose.freeze(cfg, _directory(cfg), elsewhere=elsewhere, machine=machine, trusted=trusted)
        trial = find_id(run, varied, noted)
        if trial in found and fixed is None:
            raise ConfigError(
                f"trial {number + 1} of the sweep, {' '.join(one)}: is the same as another; leave one out."
            )
        if trial not in found:
            run = _with_folder(run, trial, root, kept, [c.run.directory for c in found.values()])
            found[trial] = Trial(trial, varied, run, cfg if config.hydra.callbacks else None)
        chosen.append(found[trial])
    return chosen


def find_id(run: Run, varied: Sequence[str], noted: Sequence[ledger.TrialState]) -> str:
    """Return a trial's id: that of the trial with the same settings which the sweep has already, on any machines.

    Where the sweep varies the machines, each of them makes another trial.
    """
    own = identity.trial_id(run)
    if own in (trial.id for trial in noted) or any(re.match(r"[+]*cluster\b", override) for override in varied):
        return own
    same = [trial.id for trial in noted if trial.asked == identity.portable_trial_id(run)]
    return same[0] if len(same) == 1 else own


def _composed(composer: Composer, overrides: Sequence[str], number: int, name: str) -> DictConfig:
    cfg = composer(overrides)
    with open_dict(cfg):
        cfg.hydra.job.id = cfg.hydra.job.num = number
        if cfg.hydra.sweep.subdir == AUTO:
            cfg.hydra.sweep.subdir = name
        folder = Path(cfg.hydra.sweep.dir)
        cfg.name = f"{folder.name}/{cfg.hydra.sweep.subdir}"
    check_optional(composer.known, cfg)
    return cfg


def _directory(cfg: DictConfig) -> str:
    return str(Path(cfg.hydra.sweep.dir) / cfg.hydra.sweep.subdir)


def _here(cluster: Cluster) -> Machine:
    return devices.detect_machine(cluster.device)


def _remembered(find: Machines) -> Machines:
    """Return `find` with a cache by description of the nodes: looking for GPUs takes seconds on some machines."""
    found: list[tuple[Cluster, Machine]] = []

    def machine(cluster: Cluster) -> Machine:
        if not any(cluster == known for known, _ in found):
            found.append((cluster, find(cluster)))
        return next(machine for known, machine in found if known == cluster)

    return machine


def _counted(overrides: Sequence[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Yield the trials, and count them in a line on stderr: at once on a terminal, in a log when it takes long."""
    pause = TERMINAL_SECONDS if sys.stderr.isatty() else LOG_SECONDS if len(overrides) >= MANY else math.inf
    last = time.monotonic()
    with progress_line() as show:
        for number, one in enumerate(overrides):
            if time.monotonic() - last > pause:
                last = time.monotonic()
                show(f"{number} of {len(overrides)} trials composed and checked")
            yield one


@contextmanager
def _name_trial_in_errors(number: int, varied: Sequence[str]) -> Iterator[None]:
    """Add to a ConfigError which trial it is about."""
    try:
        yield
    except ConfigError as error:
        which = ", ".join([f"trial {number + 1} of the sweep", *([" ".join(varied)] if varied else [])])
        raise ConfigError(f"{str(error).rstrip('.')} ({which}; nothing was started).") from None


def _folder_name(varied: Sequence[str]) -> str:
    """Return a folder's name made of what is varied: the last part of each setting's name, and its value."""
    keys = [o.partition("=")[0].lstrip("+~") for o in varied]
    last = Counter(key.rpartition(".")[2] for key in keys)
    words = []
    for key, override in zip(keys, varied, strict=True):
        short = key.rpartition(".")[2]
        value = re.sub(r"[^A-Za-z0-9_.+-]+", "-", override.partition("=")[2]).strip("-_.")
        words.append(f"{short if last[short] == 1 else key}-{value}".replace("/", "-"))
    return "_".join(words) or "run"


def _with_folder(run: Run, trial: str, root: Path, kept: dict[str, Path], taken: Sequence[str]) -> Run:
    """Return the run in the folder that its trial has had, else in one that no other trial has."""
    directory = Path(run.directory)
    if trial in kept:
        directory = kept[trial]
    elif len(directory.name) > LONGEST or directory in kept.values() or str(directory) in taken:
        directory = directory.with_name(f"{directory.name[:LONGEST]}-{trial[:6]}")
    return replace(run, directory=str(directory), name=f"{root.name}/{directory.relative_to(root)}")


def register_trials(root: Path, trials: Sequence[Trial], asked: ledger.SweepSpec) -> None:
    """Record the sweep: what it is for, and the trials that the ledger does not have yet."""
    root.mkdir(parents=True, exist_ok=True)
    before = ledger.read_spec(root)
    axes = {k: tuple(dict.fromkeys((*before.axes.get(k, ()), *v))) for k, v in _axes(trials).items()}
    ledger.write_spec(root, replace(asked, axes={**before.axes, **axes}))
    noted = {trial.id: (trial.steps, bool(trial.asked)) for trial in ledger.trials_by_ledger(root)}
    new = [p for p in trials if noted.get(p.id) != (p.run.training.steps, True)]
    ledger.add(root, *(_event(trial, root) for trial in new))


def _event(trial: Trial, root: Path) -> dict[str, Any]:
    return {
        "event": "point",
        "id": trial.id,
        "directory": str(Path(trial.run.directory).relative_to(root)),
        "overrides": trial.varied,
        "steps": trial.run.training.steps,
        "devices": trial.run.layout.devices,
        "asked": identity.portable_trial_id(trial.run),
    }


def _axes(trials: Sequence[Trial]) -> dict[str, tuple[str, ...]]:
    """Return the settings that vary, with their values in the order of the sweep."""
    found: dict[str, dict[str, None]] = {}
    for trial in trials:
        for override in trial.varied:
            key, _, value = override.partition("=")
            found.setdefault(key, {})[value] = None
    return {key: tuple(values) for key, values in found.items()}


def pickle_run(trial: Trial, folder: Path) -> Path:
    """Write a trial's run into a file, for its process or job to read."""
    file = folder / f"{trial.id}.pickle"
    frozen.write(trial.run, file)
    return file
