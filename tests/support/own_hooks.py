"""Hooks of a user: they log, change gradients, ask to stop, and fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from titan.config.settings import setting
from titan.debug.activity import HOOK
from titan.hooks.context import Context
from titan.hooks.schema import MOMENTS, Hook


class _Norms:
    def before_optimizer(self, context: Context) -> None:
        for name, norm in context.norms(dict(context.named_gradients())).items():
            context.log(name, norm)


@dataclass(frozen=True, kw_only=True)
class Norms(Hook):
    """Logs the gradient norm of each parameter."""

    every: int = setting(1, "steps between measurements", at_least=1)

    def build(self) -> _Norms:
        return _Norms()


class _Listed:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int, list[str]]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in MOMENTS:
            raise AttributeError(name)
        return lambda context: self._record_call(name, context)

    def _record_call(self, moment: str, context: Context) -> None:
        self.calls.append((moment, context.step, sorted(context.figures)))
        context.log(moment, len(self.calls))
        if moment == "on_run_end":
            print("calls", context.rank, self.calls)


@dataclass(frozen=True, kw_only=True)
class Listed(Hook):
    """Lists its calls."""

    def build(self) -> _Listed:
        return _Listed()


class _Phases:
    def on_checkpoint(self, context: Context) -> None:
        context.log("on_checkpoint", context._world.activity.phase == HOOK)

    def before_optimizer(self, context: Context) -> None:
        context.log("before_optimizer", context._world.activity.phase == HOOK)


@dataclass(frozen=True, kw_only=True)
class Phases(Hook):
    """Logs whether its moments count as a hook's time."""

    def build(self) -> _Phases:
        return _Phases()


class _Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def before_optimizer(self, context: Context) -> None:
        for _, gradient in context.named_gradients():
            gradient.mul_(self.factor)


@dataclass(frozen=True, kw_only=True)
class Scale(Hook):
    """Multiplies all gradients, and so changes what is learned."""

    science: ClassVar[bool] = True
    factor: float = setting(1.0, "the factor")

    def build(self) -> _Scale:
        return _Scale(self.factor)


class _Stop:
    def __init__(self, hook: Stop) -> None:
        self.hook = hook

    def on_step_end(self, context: Context) -> None:
        if context.step >= self.hook.step and context.rank == self.hook.rank:
            context.stop("it is enough")


@dataclass(frozen=True, kw_only=True)
class Stop(Hook):
    """Asks on one rank to end the run."""

    step: int = setting(1, "from this step on")
    rank: int = setting(0, "the rank that asks")

    def build(self) -> _Stop:
        return _Stop(self)


class _Fail:
    def __init__(self, moment: str) -> None:
        setattr(self, moment, self._fail)

    def _fail(self, context: Context) -> None:
        raise KeyError("no such thing.")


@dataclass(frozen=True, kw_only=True)
class Fail(Hook):
    """Raises at a moment."""

    moment: str = setting("on_step_end", "where it raises")

    def build(self) -> _Fail:
        if self.moment == "build":
            raise OSError("no file")
        return _Fail(self.moment)


@dataclass(frozen=True, kw_only=True)
class Other:
    """A dataclass with `build` that is no hook."""

    def build(self) -> object:
        return object()
