"""A module in the place of trackio that has what titan uses of it, with trackio's signatures, in memory.

`tests/metrics/test_trackio.py` compares the signatures with trackio's where it is installed.
"""

from __future__ import annotations

import os
import sys
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = ("trackio", "trackio.run", "trackio.utils")


class Run:
    """A run: what was logged, by its id. trackio writes it to `TRACKIO_DIR/PROJECT.db`."""

    def __init__(self, name: str, id: str, group: str | None, config: dict[str, Any]) -> None:
        self.name, self.id, self.group, self.config = name, id, group, config
        self.logs: list[tuple[int | None, dict[str, Any]]] = []
        self.finished = False

    def log(self, metrics: dict, step: int | None = None):  # type: ignore[no-untyped-def, type-arg]
        self.logs.append((step, metrics))

    def finish(self):  # type: ignore[no-untyped-def]
        sys.modules["trackio.run"].__dict__.get("print", print)("* Run finished. Uploading logs to Trackio")
        self.finished = True


class StandIn(types.ModuleType):
    """The module; its runs by project and name."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.TRACKIO_DIR = Path(os.environ["TRACKIO_DIR"])
        self.runs: dict[tuple[str, str], Run] = {}
        self.options: list[dict[str, Any]] = []

    def init(
        self,
        project: str,
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
        dataset_id: str | None = None,
        bucket_id: str | None = None,
        config: dict | None = None,  # type: ignore[type-arg]
        resume: str = "never",
        settings: Any = None,
        private: bool | None = None,
        embed: bool = True,
        auto_log_gpu: bool | None = None,
        gpu_log_interval: float = 10.0,
        auto_log_cpu: bool | None = None,
        cpu_log_interval: float = 10.0,
        webhook_url: str | None = None,
        webhook_min_level: Any = None,
    ) -> Run:
        self.__dict__.get("print", print)(f"* Trackio project initialized: {project}")
        self.options.append({"space_id": space_id, "private": private, "embed": embed, "hardware": auto_log_gpu})
        if any(key.startswith("_") for key in config or {}):
            raise ValueError("keys starting with '_' are reserved for internal use")
        previous = self.runs.get((project, str(name))) if resume == "allow" else None
        run = Run(str(name), previous.id if previous else uuid.uuid4().hex, group, dict(config or {}))
        run.logs = list(previous.logs) if previous else []
        self.runs[project, str(name)] = run
        return run


class Finder:
    """Finds the modules, once per session as Python does: trackio reads its folder when it is imported."""

    def __init__(self, set_item: Callable[[dict[str, Any], str, Any], None]) -> None:
        self.set_item = set_item

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, origin="stand-in") if name == "trackio" else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> StandIn:
        return StandIn()

    def exec_module(self, module: types.ModuleType) -> None:
        for name in MODULES[1:]:
            self.set_item(sys.modules, name, types.ModuleType(name))  # type: ignore[arg-type]
