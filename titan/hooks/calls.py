"""Call a run's hooks at its moments: in the order of the settings, on all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from titan.config.settings import suggest_nearest
from titan.console.text import format_error
from titan.errors import ConfigError, RunError, find_own_code_error
from titan.hooks.context import Context, Parameters
from titan.hooks.schema import MOMENTS
from titan.metrics.reader import METRIC_PREFIX
from titan.parallelism.mesh import RunContext
from titan.run import identity
from titan.run.run import Run

log = logging.getLogger("titan")

Logged = dict[str, float | Tensor]


class Hooks:
    """The hooks of a run on one rank.

    Attributes:
        latest_metrics: the last value of each own metric.
    """

    def __init__(self, run: Run, world: RunContext, parameters: Parameters) -> None:
        """Build all hooks; `parameters` yields this rank's.

        Raises:
            ConfigError: for a hook without methods, and as its `build` does.
            RunError: when a `build` fails.
        """
        self._packages = identity.find_packages(run)
        self._run_hook, self._contexts = world.activity.run_hook, dict[str, Context]()
        self._calls: dict[str, list[tuple[Context, Callable[[Context], object]]]] = {moment: [] for moment in MOMENTS}
        self._optimizer_logs: dict[int, Logged] = {}
        self.latest_metrics: dict[str, float] = {}
        for name, hook in (run.hooks or {}).items():
            context = self._contexts[name] = Context(name, run, world, parameters)
            with _name_errors(name, self._packages, "build"):
                hook_object = hook.build()
            for moment in _list_moments(name, hook_object):
                self._calls[moment].append((context, getattr(hook_object, moment)))

    def has_method(self, moment: str) -> bool:
        """Return whether a hook has a method for a moment."""
        return bool(self._calls[moment])

    def before_optimizer(self, step: int) -> None:
        """Call the hooks while the gradients are complete and not clipped; what they log waits for the step's end."""
        if self._calls["before_optimizer"]:
            self._optimizer_logs[step] = self._call_methods("before_optimizer", step, {})

    def end_step(self, step: int, figures: Callable[[], Mapping[str, Any]]) -> dict[str, float]:
        """Call the hooks with a step's figures; return all that they log of this step."""
        logged = self._optimizer_logs.pop(step, {})
        if self._calls["on_step_end"]:
            logged |= self._call_methods("on_step_end", step, figures())
        return self._read_logged(logged)

    def call_moment(self, moment: str, step: int, figures: Mapping[str, Any]) -> dict[str, float]:
        """Call the hooks at any other moment; return what they log."""
        return self._read_logged(self._call_methods(moment, step, figures))

    @property
    def stop_request(self) -> tuple[str, str] | None:
        """Return the first hook on this rank that asks to end the run, and its reason; None without any."""
        requests = ((name, context._stop_reason) for name, context in self._contexts.items())
        return next(((name, reason) for name, reason in requests if reason is not None), None)

    def _call_methods(self, moment: str, step: int, figures: Mapping[str, Any]) -> Logged:
        logged: Logged = {}
        is_in_step = moment == "before_optimizer"  # whose time counts as the step's, and which may not wait for it
        for context, method in self._calls[moment]:
            context.step, context.figures = step, dict(figures)
            context._waits_for_device, context._logged = not is_in_step, {}
            with (
                _name_errors(context._name, self._packages, moment, step),
                nullcontext() if is_in_step else self._run_hook(),
            ):
                method(context)
            logged |= {f"{METRIC_PREFIX}{context._name}/{name}": value for name, value in context._logged.items()}
        return logged

    def _read_logged(self, logged: Logged) -> dict[str, float]:
        """Return logged values as numbers; the device has reached the end of their step."""
        values = {name: float(value) for name, value in logged.items()}
        self.latest_metrics |= values
        return values


@contextmanager
def _name_errors(name: str, packages: Sequence[str], moment: str, step: int | None = None) -> Iterator[None]:
    """Turn an error of a hook into a RunError that names the hook and the moment."""
    try:
        yield
    except Exception as error:
        if step is None and isinstance(error, ConfigError):
            raise
        log.error("hooks.%s failed in %s", name, moment, exc_info=error)
        step_text = "" if step is None else f" at step {step}"
        location = find_own_code_error(error, packages)
        cause = location or f"{type(error).__name__}: {format_error(error)}".rstrip(": ")
        raise RunError(
            f"hooks.{name}: failed in {moment}{step_text} ({cause}); correct the hook, or leave it out. "
            "The log of the rank has the traceback."
        ) from error


def _list_moments(name: str, hook_object: Any) -> list[str]:
    """Return the moments that a hook has methods for."""
    moments = [moment for moment in MOMENTS if callable(getattr(hook_object, moment, None))]
    unknown_methods = [
        method
        for method in dir(hook_object)
        if method.startswith(("on_", "before_", "after_")) and method not in MOMENTS
    ]
    if unknown_methods or not moments:
        problem = (
            f"has a method {unknown_methods[0]}{suggest_nearest(unknown_methods[0], MOMENTS)}"
            if unknown_methods
            else "has no method for a moment."
        )
        raise ConfigError(f"hooks.{name}: {type(hook_object).__name__} {problem} The moments are {', '.join(MOMENTS)}.")
    return moments
