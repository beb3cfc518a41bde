"""Call a run's hooks at its moments: in the order of the settings, on all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from titan.config.settings import nearest
from titan.console.text import as_line
from titan.errors import ConfigError, RunError
from titan.hooks.context import Context, Parameters
from titan.hooks.schema import MOMENTS, PREFIX, Hook
from titan.parallelism.mesh import World
from titan.run.run import Run

log = logging.getLogger("titan")

Logged = dict[str, float | Tensor]


class Hooks:
    """The hooks of a run on one rank.

    Attributes:
        latest: the last value of each own metric.
    """

    def __init__(self, run: Run, world: World, parameters: Parameters) -> None:
        """Build all hooks; `parameters` yields this rank's.

        Raises:
            ConfigError: for a hook without methods, and as its `build` does.
            RunError: when a `build` fails.
        """
        self._contexts: dict[str, Context] = {}
        self._calls: dict[str, list[tuple[Context, Callable[[Context], object]]]] = {moment: [] for moment in MOMENTS}
        self._before: dict[int, Logged] = {}
        self.latest: dict[str, float] = {}
        for name, hook in (run.hooks or {}).items():
            context = self._contexts[name] = Context(name, run, world, parameters)
            built = _build(name, hook)
            for moment in _moments(name, built):
                self._calls[moment].append((context, getattr(built, moment)))

    def wants(self, moment: str) -> bool:
        """Return whether a hook has a method for a moment."""
        return bool(self._calls[moment])

    def before_optimizer(self, step: int) -> None:
        """Call the hooks while the gradients are complete and not clipped; what they log waits for the step's end."""
        if self._calls["before_optimizer"]:
            self._before[step] = self._call("before_optimizer", step, {}, waits=False)

    def end_step(self, step: int, figures: Callable[[], Mapping[str, Any]]) -> dict[str, float]:
        """Call the hooks with a step's figures; return all that they log of this step."""
        logged = self._before.pop(step, {})
        if self._calls["on_step_end"]:
            logged |= self._call("on_step_end", step, figures())
        return self._read(logged)

    def call(self, moment: str, step: int, figures: Mapping[str, Any]) -> dict[str, float]:
        """Call the hooks at any other moment; return what they log."""
        return self._read(self._call(moment, step, figures))

    @property
    def stop(self) -> tuple[str, str] | None:
        """Return the first hook on this rank that asks to end the run, and its reason; None without any."""
        asking = ((name, context._stop) for name, context in self._contexts.items())
        return next(((name, reason) for name, reason in asking if reason is not None), None)

    def _call(self, moment: str, step: int, figures: Mapping[str, Any], waits: bool = True) -> Logged:
        logged: Logged = {}
        for context, method in self._calls[moment]:
            context.step, context.figures, context._waits, context._logged = step, dict(figures), waits, {}
            with _Named(context._name, moment, step):
                method(context)
            logged |= {f"{PREFIX}{context._name}/{name}": value for name, value in context._logged.items()}
        return logged

    def _read(self, logged: Logged) -> dict[str, float]:
        """Return logged values as numbers; the device has reached the end of their step."""
        found = {name: float(value) for name, value in logged.items()}
        self.latest |= found
        return found


class _Named:
    """Turn an error of a hook into a RunError that names the hook and the moment. A context manager."""

    def __init__(self, name: str, moment: str, step: int | None = None) -> None:
        self.name, self.moment, self.step = name, moment, step

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or (self.step is None and isinstance(error, ConfigError)):
            return
        log.error("hooks.%s failed in %s", self.name, self.moment, exc_info=error)
        at = "" if self.step is None else f" at step {self.step}"
        cause = f"{type(error).__name__}: {as_line(error)}".rstrip(": ")
        raise RunError(
            f"hooks.{self.name}: failed in {self.moment}{at} ({cause}); correct the hook, or leave it out. "
            "The log of the rank has the traceback."
        ) from error


def _build(name: str, hook: Hook) -> Any:
    with _Named(name, "build"):
        return hook.build()


def _moments(name: str, built: Any) -> list[str]:
    """Return the moments that a hook has methods for.

    Raises:
        ConfigError: when it has none, or one whose name is no moment's.
    """
    found = [moment for moment in MOMENTS if callable(getattr(built, moment, None))]
    odd = [n for n in dir(built) if n.startswith(("on_", "before_", "after_")) and n not in MOMENTS]
    if odd or not found:
        what = f"has a method {odd[0]}{nearest(odd[0], MOMENTS)}" if odd else "has no method for a moment."
        raise ConfigError(f"hooks.{name}: {type(built).__name__} {what} The moments are {', '.join(MOMENTS)}.")
    return found
