"""Hydra's launcher for `-m`: the points of a sweep on this machine, one after the other.

All points are composed and checked before the first one starts: one that can't work stops the sweep with nothing
started. Each point runs in processes of its own; one that fails does not stop the others.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from titan.run import Run
from titan.settings import Refusal

NAMESPACE = "hydra_plugins.titan"
"""Hydra takes a launcher only from a module under `hydra_plugins`."""


class LocalLauncher(Launcher):
    """Runs the points of a sweep one after the other."""

    # Hydra's sweeper makes the instance and returns none of it
    codes: ClassVar[list[int]] = []
    new: ClassVar[list[Path]] = []
    """Folders that this sweep brings, innermost first."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what `launch` needs."""
        self.context, self.config = hydra_context, config
        folder = Path(config.hydra.sweep.dir)
        LocalLauncher.new = [f for f in (folder, *folder.parents) if not f.exists()]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Check every point, then run each; returns one result a point."""
        from launchers import start

        points = self._points(job_overrides, initial_job_idx)
        results = []
        for number, (overrides, run) in enumerate(zip(job_overrides, points, strict=True), start=1):
            print(f"\n[{number}/{len(points)}] {' '.join(overrides)}", flush=True)
            code = start.here(run, apart=True)
            LocalLauncher.codes.append(code)
            results.append(JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=code))
            if code == 130:
                raise KeyboardInterrupt
        return results

    def _points(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[Run]:
        return [self._point(list(o), first + i) for i, o in enumerate(job_overrides)]

    def _point(self, overrides: list[str], number: int) -> Run:
        from titan import compose

        loader = self.context.config_loader
        cfg = loader.load_sweep_config(self.config, overrides)
        with open_dict(cfg):
            cfg.hydra.job.id = cfg.hydra.job.num = number
            folder = Path(cfg.hydra.sweep.dir)
            cfg.name = f"{folder.name}/{cfg.hydra.sweep.subdir}"
        try:
            compose.check_optional(loader, cfg)
            return compose.freeze(cfg, str(folder / cfg.hydra.sweep.subdir))
        except Refusal as refusal:
            point = f"point {number + 1} of the sweep, {' '.join(overrides)}; nothing was started"
            raise Refusal(f"{str(refusal).rstrip('.')} ({point}).") from None


def register() -> None:
    """Make `hydra/launcher=local` known to Hydra."""
    LocalLauncher.codes, LocalLauncher.new = [], []
    LocalLauncher.__module__ = NAMESPACE
    sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    module: Any = sys.modules.setdefault(NAMESPACE, types.ModuleType(NAMESPACE))
    module.LocalLauncher = LocalLauncher
    sys.modules["hydra_plugins"].titan = module  # type: ignore[attr-defined]
    Plugins.instance().register(LocalLauncher)
    node = {"_target_": f"{NAMESPACE}.LocalLauncher"}
    ConfigStore.instance().store(group="hydra/launcher", name="local", node=node, provider="titan")


def tidy() -> None:
    """After a sweep of which nothing was started: leave none of the folders and files that the sweeper wrote."""
    if LocalLauncher.codes or not LocalLauncher.new:
        return
    (LocalLauncher.new[0] / "multirun.yaml").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        for folder in LocalLauncher.new:
            folder.rmdir()


def exit_code() -> int:
    """The exit code of the last sweep: 0 when every point ended well.

    Raises:
        Refusal: when it had no points.
    """
    if not LocalLauncher.codes:
        raise Refusal("-m: the sweep has no points; give values, such as optimizer.lr=1e-3,3e-3.")
    return next((code for code in LocalLauncher.codes if code), 0)
