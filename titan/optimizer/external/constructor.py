"""Import the class that `optimizer.cls` names, and build it with those of titan's settings that it accepts."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan.errors import ConfigError

RESERVED = ("params", "lr", "weight_decay")
"""Arguments that titan passes."""


class Constructor(NamedTuple):
    """A class of optimizers and what titan passes to it.

    Attributes:
        cls: the class.
        arguments: further arguments, by name.
        takes: which of `lr` and `weight_decay` it accepts.
    """

    cls: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    takes: frozenset[str]

    def build(self, tensors: Sequence[Tensor], lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """Return an optimizer of one group of plain tensors."""
        passed: dict[str, Any] = {k: v for k, v in (("lr", lr), ("weight_decay", weight_decay)) if k in self.takes}
        with contextlib.redirect_stdout(io.StringIO()):  # some print a line, and one is built for each step
            return self.cls([{"params": list(tensors)}], **passed, **self.arguments)

    def build_for_training(self, tensors: Sequence[Tensor], lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """Return the same, in the mode that trains where the class has two; it has no state yet that this changes."""
        optimizer: Any = self.build(tensors, lr, weight_decay)
        if self.has_modes:
            optimizer.train()
        return optimizer  # type: ignore[no-any-return]

    @property
    def has_modes(self) -> bool:
        """Whether the class evaluates other weights than it trains, between its methods `eval` and `train`."""
        return all(callable(getattr(self.cls, name, None)) for name in ("train", "eval"))


def load_constructor(path: str, arguments: Mapping[str, Any]) -> Constructor:
    """Return the constructor of the class with a dotted path.

    Raises:
        ConfigError: for what is no optimizer, and for arguments that it does not have.
    """
    cls = _import_class(path)
    parameters = inspect.signature(cls).parameters
    has_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    names = [name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    for name in arguments:
        if name in RESERVED:
            instead = "" if name == "params" else f", or give optimizer.{name}"
            raise ConfigError(f"optimizer.args: titan passes {name} itself; leave it out{instead}.")
        if name not in names and not has_any:
            raise ConfigError(f"optimizer.args: {path} has no argument {name}; it has {', '.join(names)}.")
    takes = frozenset(name for name in RESERVED if name in names or (has_any and name == "lr"))
    converted = {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
    constructor = Constructor(cls, converted, takes)
    return _find_passed_decay(constructor) if has_any and "weight_decay" not in takes else constructor


def _find_passed_decay(constructor: Constructor) -> Constructor:
    """Return a constructor that takes weight decay too, where a class hands unnamed arguments on to one that does."""
    wider, decay = constructor._replace(takes=constructor.takes | {"weight_decay"}), 0.5
    try:
        groups = wider.build([torch.nn.Parameter(torch.zeros(2, 2))], 1e-3, decay).param_groups
    except Exception:  # it has no such argument, or lacks another, which is reported later
        return constructor
    return wider if groups[0].get("weight_decay") == decay else constructor


def _import_class(path: str) -> type[torch.optim.Optimizer]:
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"optimizer.cls={path}: names no module; write PACKAGE.CLASS, such as torch.optim.AdamW.")
    try:
        cls = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        package = path.partition(".")[0]
        missing = f"the package {error.name} is not installed here" if error.name else str(error)
        advice = f"install {package}" if error.name == package else f"install what {package} needs, or correct the name"
        raise ConfigError(f"optimizer.cls={path}: {missing}; {advice}.") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {describe_error(error)}"
        raise ConfigError(f"optimizer.cls={path}: importing {module} failed ({reason}); correct it.") from error
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        what = f"{module} has no {name}" if cls is None else "it is no torch.optim.Optimizer"
        raise ConfigError(f"optimizer.cls={path}: {what}; name a class that derives from torch.optim.Optimizer.")
    return cls


def describe_error(error: BaseException) -> str:
    """Return the first line of an error's message, without a full stop; its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__


@contextlib.contextmanager
def run_uncompiled() -> Iterator[None]:
    """Call functions that a package compiles as they are, so that layouts differ in no kernel."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
