"""The points of a grid: composed, checked and named before anything is started. Free of torch."""

from __future__ import annotations

import os
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from titan import identity, ledger
from titan.run import Run
from titan.settings import Refusal

AUTO = "auto"
"""The value of `hydra.sweep.subdir` by which a point's folder is named after what it varies."""
LONGEST = 100
"""Characters of a folder's name."""


@dataclass(frozen=True)
class Chosen:
    """A point of the grid.

    Attributes:
        id: see `titan.identity.point`.
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
        return " ".join(self.varied) or self.run.name


def choose(
    loader: Any, config: DictConfig, overrides: Sequence[Sequence[str]], first: int, elsewhere: bool
) -> list[Chosen]:
    """Compose and check every point, and give each its folder: the one that it has had, or a new one.

    Args:
        loader, config: Hydra's, of the sweep.
        overrides: of each point.
        first: Hydra's number of the first one.
        elsewhere: see `titan.compose.freeze`.

    Raises:
        Refusal: for a point that can't work, with its number and overrides, and for two that are the same.
    """
    root = Path(os.path.abspath(config.hydra.sweep.dir))
    shared = [o for o, count in Counter(o for point in overrides for o in point).items() if count == len(overrides)]
    if (root / "run.yaml").exists():
        raise Refusal(f"hydra.sweep.dir={root}: holds a single run; choose another name for a grid.")
    kept = {point.id: Path(point.directory) for point in sweep.points} if (sweep := ledger.read(root)) else {}
    found: dict[str, Chosen] = {}
    for number, one in enumerate(overrides):
        varied = tuple(o for o in one if o not in shared)
        with _pointing(number, varied):
            run, composed = _composed(loader, config, list(one), first + number, _named(varied), elsewhere)
        point = identity.point(run)
        if point in found:
            raise Refusal(f"point {number + 1} of the sweep, {' '.join(one)}: is the same as another; leave one out.")
        run = _placed(run, point, root, kept, [c.run.directory for c in found.values()])
        found[point] = Chosen(point, varied, run, composed if config.hydra.callbacks else None)
    return list(found.values())


def _composed(
    loader: Any, config: DictConfig, overrides: list[str], number: int, name: str, elsewhere: bool
) -> tuple[Run, DictConfig]:
    from titan import compose

    cfg = loader.load_sweep_config(config, overrides)
    with open_dict(cfg):
        cfg.hydra.job.id = cfg.hydra.job.num = number
        if cfg.hydra.sweep.subdir == AUTO:
            cfg.hydra.sweep.subdir = name
        folder = Path(cfg.hydra.sweep.dir)
        cfg.name = f"{folder.name}/{cfg.hydra.sweep.subdir}"
    compose.check_optional(loader, cfg)
    return compose.freeze(cfg, str(folder / cfg.hydra.sweep.subdir), elsewhere=elsewhere), cfg


@contextmanager
def _pointing(number: int, varied: Sequence[str]) -> Iterator[None]:
    """Let a refusal say which point it is about."""
    try:
        yield
    except Refusal as refusal:
        which = ", ".join([f"point {number + 1} of the sweep", *([" ".join(varied)] if varied else [])])
        raise Refusal(f"{str(refusal).rstrip('.')} ({which}; nothing was started).") from None


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


def enter(root: Path, points: Sequence[Chosen], asked: ledger.Asked) -> None:
    """Write the grid down: what it asks, and the points that the ledger does not have yet."""
    root.mkdir(parents=True, exist_ok=True)
    before = ledger.asked(root)
    axes = {k: tuple(dict.fromkeys((*before.axes.get(k, ()), *v))) for k, v in _axes(points).items()}
    ledger.write_asked(root, replace(asked, axes={**before.axes, **axes}))
    known = {event["id"]: event["steps"] for event in ledger.events(root) if event.get("event") == "point"}
    new = [p for p in points if known.get(p.id) != p.run.training.steps]
    ledger.add(root, *(_event(point, root) for point in new))


def _event(point: Chosen, root: Path) -> dict[str, Any]:
    return {
        "event": "point",
        "id": point.id,
        "directory": str(Path(point.run.directory).relative_to(root)),
        "overrides": point.varied,
        "steps": point.run.training.steps,
        "devices": point.run.layout.devices,
    }


def _axes(points: Sequence[Chosen]) -> dict[str, tuple[str, ...]]:
    """The settings that vary, with their values in the order of the grid."""
    found: dict[str, dict[str, None]] = {}
    for point in points:
        for override in point.varied:
            key, _, value = override.partition("=")
            found.setdefault(key, {})[value] = None
    return {key: tuple(values) for key, values in found.items()}


def freeze(point: Chosen, folder: Path) -> Path:
    """Write a point's run down, for its job to read; only this user may, since it is code to whoever reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{point.id}.pickle"
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(pickle.dumps(point.run))
    temporary.chmod(0o600)
    temporary.rename(file)
    return file
