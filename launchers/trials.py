"""The points of a grid: composed, checked and named before anything is started. Free of torch."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
"""The value of `hydra.sweep.subdir` by which a point's folder is named after what it varies."""
LONGEST = 100
"""Characters of a folder's name."""
LOOK_SECONDS, SAY_SECONDS = 0.1, 5.0
"""Between two lines that say how many points are composed: on a terminal, and in a log."""
MANY = 20
"""Points of a grid of which a log tells how far it is, too."""
Machines = Callable[[Cluster], Machine]


@dataclass(frozen=True)
class Trial:
    """A point of the grid.

    Attributes:
        id: see `known`.
        varied: what the command line says of it, but for what all points share.
        run: the frozen run.
        config: what Hydra composed, for callbacks.
    """

    id: str
    varied: tuple[str, ...]
    run: Run
    config: DictConfig | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """What people know it by."""
        return safe(" ".join(self.varied) or self.run.name)


def expand_trials(
    loader: Any,
    config: DictConfig,
    overrides: Sequence[Sequence[str]],
    first: int,
    elsewhere: bool,
    trusted: tuple[str, ...] = (),
) -> list[Trial]:
    """Compose and check every point, and give each its folder: the one that it has had, or a new one.

    Args:
        loader, config: Hydra's, of the sweep.
        overrides: of each point.
        first: Hydra's number of the first one.
        elsewhere, trusted: see `titan.run.compose.freeze`.

    Raises:
        ConfigError: for a point that can't work, with its number and overrides, and for two that are the same.
    """
    root = Path(os.path.abspath(config.hydra.sweep.dir))
    composer, machine = Composer(loader, config), _remembered(devices.elsewhere if elsewhere else _here)
    shared = [o for o, count in Counter(o for point in overrides for o in point).items() if count == len(overrides)]
    if (root / "run.yaml").exists():
        raise ConfigError(f"hydra.sweep.dir={root}: holds a single run; choose another name for a grid.")
    noted = ledger.noted(root)
    kept = {point.id: Path(point.directory) for point in noted}
    found: dict[str, Trial] = {}
    for number, one in enumerate(_counted(overrides)):
        varied = tuple(redact(o) for o in one if o not in shared)
        with _pointing(number, varied):
            cfg = _composed(composer, one, first + number, _named(varied))
            run = compose.freeze(cfg, _directory(cfg), elsewhere=elsewhere, machine=machine, trusted=trusted)
        point = known(run, varied, noted)
        if point in found:
            raise ConfigError(
                f"point {number + 1} of the sweep, {' '.join(one)}: is the same as another; leave one out."
            )
        run = _placed(run, point, root, kept, [c.run.directory for c in found.values()])
        found[point] = Trial(point, varied, run, cfg if config.hydra.callbacks else None)
    return list(found.values())


def known(run: Run, varied: Sequence[str], noted: Sequence[ledger.TrialState]) -> str:
    """A point's id: that of the point of the same settings which the grid has already, on whatever machines it was.

    Where the grid varies the machines, each of them is a point of its own.
    """
    own = identity.point(run)
    if own in (point.id for point in noted) or any(re.match(r"[+]*cluster\b", override) for override in varied):
        return own
    same = [point.id for point in noted if point.asked == identity.asked(run)]
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
    return devices.detect(cluster.device)


def _remembered(find: Machines) -> Machines:
    """`find`, which is asked once for each description of nodes: looking for GPUs takes seconds on some machines."""
    found: list[tuple[Cluster, Machine]] = []

    def machine(cluster: Cluster) -> Machine:
        if not any(cluster == known for known, _ in found):
            found.append((cluster, find(cluster)))
        return next(machine for known, machine in found if known == cluster)

    return machine


def _counted(overrides: Sequence[Sequence[str]]) -> Iterator[Sequence[str]]:
    """The points, with a line on stderr that counts them: at once on a terminal, in a log when it takes long."""
    pause = LOOK_SECONDS if sys.stderr.isatty() else SAY_SECONDS if len(overrides) >= MANY else math.inf
    last = time.monotonic()
    with progress_line() as show:
        for number, one in enumerate(overrides):
            if time.monotonic() - last > pause:
                last = time.monotonic()
                show(f"{number} of {len(overrides)} points are composed and checked")
            yield one


@contextmanager
def _pointing(number: int, varied: Sequence[str]) -> Iterator[None]:
    """Let a refusal say which point it is about."""
    try:
        yield
    except ConfigError as refusal:
        which = ", ".join([f"point {number + 1} of the sweep", *([" ".join(varied)] if varied else [])])
        raise ConfigError(f"{str(refusal).rstrip('.')} ({which}; nothing was started).") from None


def _named(varied: Sequence[str]) -> str:
    """A folder's name that says what is varied: the last part of each setting's name, and its value."""
    keys = [o.partition("=")[0].lstrip("+~") for o in varied]
    last = Counter(key.rpartition(".")[2] for key in keys)
    words = []
    for key, override in zip(keys, varied, strict=True):
        short = key.rpartition(".")[2]
        value = re.sub(r"[^A-Za-z0-9_.+-]+", "-", override.partition("=")[2]).strip("-_.")
        words.append(f"{short if last[short] == 1 else key}-{value}".replace("/", "-"))
    return "_".join(words) or "run"


def _placed(run: Run, point: str, root: Path, kept: dict[str, Path], taken: Sequence[str]) -> Run:
    """The run in the folder that its point has had, else in one of its own that no other has."""
    directory = Path(run.directory)
    if point in kept:
        directory = kept[point]
    elif len(directory.name) > LONGEST or directory in kept.values() or str(directory) in taken:
        directory = directory.with_name(f"{directory.name[:LONGEST]}-{point[:6]}")
    return replace(run, directory=str(directory), name=f"{root.name}/{directory.relative_to(root)}")


def register_trials(root: Path, points: Sequence[Trial], asked: ledger.SweepSpec) -> None:
    """Write the grid down: what it asks, and the points that the ledger does not have yet."""
    root.mkdir(parents=True, exist_ok=True)
    before = ledger.asked(root)
    axes = {k: tuple(dict.fromkeys((*before.axes.get(k, ()), *v))) for k, v in _axes(points).items()}
    ledger.write_asked(root, replace(asked, axes={**before.axes, **axes}))
    noted = {point.id: (point.steps, bool(point.asked)) for point in ledger.noted(root)}
    new = [p for p in points if noted.get(p.id) != (p.run.training.steps, True)]
    ledger.add(root, *(_event(point, root) for point in new))


def _event(point: Trial, root: Path) -> dict[str, Any]:
    return {
        "event": "point",
        "id": point.id,
        "directory": str(Path(point.run.directory).relative_to(root)),
        "overrides": point.varied,
        "steps": point.run.training.steps,
        "devices": point.run.layout.devices,
        "asked": identity.asked(point.run),
    }


def _axes(points: Sequence[Trial]) -> dict[str, tuple[str, ...]]:
    """The settings that vary, with their values in the order of the grid."""
    found: dict[str, dict[str, None]] = {}
    for point in points:
        for override in point.varied:
            key, _, value = override.partition("=")
            found.setdefault(key, {})[value] = None
    return {key: tuple(values) for key, values in found.items()}


def pickle_run(point: Trial, folder: Path) -> Path:
    """Write a point's run down, for its job to read."""
    file = folder / f"{point.id}.pickle"
    frozen.write(point.run, file)
    return file
