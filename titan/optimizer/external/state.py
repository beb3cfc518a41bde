"""A class of optimizers by its name, and its steps on plain tensors; the state of one parameter as a flat mapping.

The class that `optimizer.cls` names is built with those of titan's settings that it accepts. An optimizer's state may
be nested in mappings and lists, and have numbers beside tensors. Its leaves get names such as `state/exp_avg` or
`state/0/Q/1`. Numbers of the parameter group that steps change, such as a count, are leaves too (`group/k`), and of
what `state_dict` has beside state and groups (`extra/NAME/k`): an optimizer of one parameter has these for it alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import io
import math
import random
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from titan.errors import ConfigError

RESERVED = ("params", "lr", "weight_decay")
"""Arguments that titan passes."""
HYPERPARAMETERS = ("lr", "weight_decay")
"""Keys of a group that titan sets at every step."""
CONSTANTS = (str, type(None), torch.dtype, torch.device)
"""Types of leaves that are no values: they may not change."""


def load_updater(path: str, arguments: Mapping[str, Any]) -> Updater:
    """Return what runs a class; raise ConfigError for what is none, and for arguments that it lacks."""
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
    updater = Updater(cls, {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}, takes)
    if not has_any or "weight_decay" in takes:
        return updater
    wider = updater._replace(takes=takes | {"weight_decay"}, weight_decay=0.5)
    try:  # does it hand unnamed arguments on to a class that takes weight decay?
        groups = wider.build([torch.nn.Parameter(torch.zeros(2, 2))]).param_groups
    except Exception:  # it has no such argument, or lacks another, which is reported later
        return updater
    return wider if groups[0].get("weight_decay") == wider.weight_decay else updater


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


# --- the state of a parameter


class UnsupportedStateError(Exception):
    """A state that no checkpoint can hold; the message says why, without the optimizer's name."""


class Leaf(NamedTuple):
    """One value of a parameter's state.

    Attributes:
        kind: tensor (of one dimension at least), scalar (a tensor without dimensions), number, or constant.
        shape: of a tensor; empty otherwise.
        dtype: of a tensor or scalar.
        value: the Python type of a number; the value of a constant.
        on_host: whether a scalar is on the CPU whatever the parameter's device is.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    value: Any = float
    on_host: bool = True


class Template(NamedTuple):
    """What a parameter's state consists of: how its leaves are nested, and the leaves by name in that order."""

    spec: pytree.TreeSpec
    leaves: Mapping[str, Leaf]

    def count_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves.values() if leaf.shape)


State = dict[str, Any]
"""A parameter's state as the optimizer keeps it, and numbers beside it: {"state": ..., "group": ..., "extra": ...}."""


def flatten_state(state: State) -> tuple[dict[str, Any], pytree.TreeSpec]:
    """Return a state's leaves by name, and how they are nested."""

    def read_key(key: Any) -> str:
        return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))

    pairs, spec = pytree.tree_flatten_with_path(state)
    return {"/".join(map(read_key, path)): value for path, value in pairs}, spec


def describe_state(state: State) -> Template:
    """Return the template of a state; raise UnsupportedStateError for a leaf that a checkpoint can't hold."""
    values, spec = flatten_state(state)
    return Template(spec, {name: _describe_leaf(name, value) for name, value in values.items()})


def _describe_leaf(name: str, value: Any) -> Leaf:
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) and not is_fake(value):
            raise UnsupportedStateError(f"its state {name} is a {type(value).__name__}, which titan can't divide")
        if value.dim():
            return Leaf("tensor", tuple(value.shape), value.dtype)
        return Leaf("scalar", (), value.dtype, on_host=value.device.type == "cpu")
    if isinstance(value, (bool, int, float)):
        return Leaf("number", value=type(value))
    is_plain_set = isinstance(value, (set, frozenset)) and all(isinstance(v, (str, int, *CONSTANTS)) for v in value)
    if isinstance(value, CONSTANTS) or is_plain_set:
        return Leaf("constant", value=copy.copy(value))
    raise UnsupportedStateError(f"its state {name} is a {type(value).__name__}, which no checkpoint holds")


def is_fake(value: Tensor) -> bool:
    """Return whether a tensor is a fake one, without values."""
    return isinstance(value, FakeTensor)


def nest_state(template: Template, values: Mapping[str, Any]) -> State:
    """Return a state from the values of its leaves."""
    leaves = [
        copy.copy(leaf.value) if leaf.kind == "constant" else values[name] for name, leaf in template.leaves.items()
    ]
    return pytree.tree_unflatten(leaves, template.spec)  # type: ignore[no-any-return]


class Traits(NamedTuple):
    """What an optimizer keeps beside its state of a parameter, and how it begins.

    Attributes:
        counters: keys of its parameter group whose numbers steps change, and which later steps need.
        extras: the same of what its `state_dict` has beside `state` and `param_groups`, as paths.
        is_random: whether it draws random numbers; they are then a function of the parameter's name and the update.
        settled: the number of updates from which on the state has the same leaves.
        is_alone: whether the leaves of a parameter depend on what other parameters the optimizer has.
    """

    counters: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    is_random: bool = False
    settled: int = 1
    is_alone: bool = False

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Traits:
        """Return traits that were plain containers."""
        lists = {key: tuple(value) for key, value in document.items() if isinstance(value, list)}
        return cls(**{**document, **lists})

    @property
    def is_single(self) -> bool:
        """Whether an optimizer may have one parameter only, for each to have these by itself."""
        return bool(self.counters or self.extras or self.is_random or self.is_alone)


class Updater(NamedTuple):
    """Runs steps of an optimizer that is built anew for each, so that nothing but `State` outlives one.

    Attributes:
        cls: the class of optimizers.
        arguments: further ones of its constructor.
        takes: which of `lr` and `weight_decay` it takes.
        traits: what is known of it.
        lr: the peak learning rate, with which it is built.
        weight_decay: with which it is built.
    """

    cls: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    takes: frozenset[str]
    traits: Traits = Traits()
    lr: float = 1e-3
    weight_decay: float = 0.0

    def update(
        self,
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State | None],
        rates: Mapping[str, float],
        seeds: Sequence[str],
    ) -> list[State]:
        """Update plain tensors in place and return their states.

        Args:
            tensors: the weights, or parts of them.
            states: before the step; None: there was none.
            rates: the learning rate and the weight decay of the step, as a group has them.
            seeds: what the random numbers of each tensor are a function of.
        """
        if self.traits.is_single and len(tensors) > 1:
            single = zip(tensors, gradients, states, seeds, strict=True)
            return [self.update([t], [g], [s], rates, [seed])[0] for t, g, s, seed in single]
        parameters = [torch.nn.Parameter(tensor.detach()) for tensor in tensors]
        optimizer = self.build(parameters)
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            parameter.grad = gradient
            if state is not None:
                self._load_numbers(optimizer, state)
                optimizer.state[parameter] = state["state"]
        self.step(optimizer, rates, seeds[0])
        for tensor, parameter in zip(tensors, parameters, strict=True):
            if not is_fake(tensor) and parameter.data_ptr() != tensor.data_ptr():  # the data have been replaced
                tensor.copy_(parameter.detach())
        return [self.read_state(optimizer, parameter) for parameter in parameters]

    @property
    def has_modes(self) -> bool:
        """Whether the class evaluates other weights than it trains, between its methods `eval` and `train`."""
        return all(callable(getattr(self.cls, name, None)) for name in ("train", "eval"))

    def build(self, tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer of one group of plain tensors, in the mode that trains where the class has two."""
        passed: dict[str, Any] = {name: getattr(self, name) for name in HYPERPARAMETERS if name in self.takes}
        with contextlib.redirect_stdout(io.StringIO()):  # some print a line, and one is built for each step
            optimizer: Any = self.cls([{"params": list(tensors)}], **passed, **self.arguments)
        if self.has_modes:
            optimizer.train()  # it has no state yet that this changes
        return optimizer  # type: ignore[no-any-return]

    def step(self, optimizer: torch.optim.Optimizer, rates: Mapping[str, float], seed: str) -> None:
        """Do a step with a learning rate and a weight decay, and with random numbers that follow from `seed`."""
        optimizer.param_groups[0].update({name: rates[name] for name in HYPERPARAMETERS if name in self.takes})
        with run_uncompiled(), _seed_randomness(seed) if self.traits.is_random else contextlib.nullcontext():
            optimizer.step()

    def _load_numbers(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        optimizer.param_groups[0].update(state["group"])
        if not state["extra"]:
            return
        document = optimizer.state_dict()
        for path, value in state["extra"].items():
            *parents, name = path.split("/")
            functools.reduce(lambda node, key: node.setdefault(key, {}), parents, document)[name] = value
        optimizer.load_state_dict(document)

    def read_state(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> State:
        """Return the state of a parameter of an optimizer with one group."""
        keys = {"group": self.traits.counters, "extra": self.traits.extras}
        numbers = read_numbers(optimizer) if any(keys.values()) else {}
        chosen = {kind: {n: numbers[kind, n] for n in names if (kind, n) in numbers} for kind, names in keys.items()}
        return {"state": dict(optimizer.state.get(parameter, {})), **chosen}

    def evaluate(self, tensor: Tensor, state: State) -> Tensor:
        """Return what an optimizer with a method `eval` evaluates in place of a plain tensor, a new tensor."""
        parameter = torch.nn.Parameter(tensor.detach().clone())
        optimizer: Any = self.build([parameter])
        self._load_numbers(optimizer, state)
        optimizer.state[parameter] = state["state"]
        with run_uncompiled():
            optimizer.eval()
        return parameter.detach()


@contextlib.contextmanager
def _seed_randomness(seed: str) -> Iterator[None]:
    """Seed the random numbers of torch and Python by a text, and restore them."""
    number, state = zlib.crc32(seed.encode()), random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(number)
        random.seed(number)
        try:
            yield
        finally:
            random.setstate(state)


def read_numbers(optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], Any]:
    """Return the numbers beside the state, by kind and name.

    Those of the optimizer's only group but what titan sets ("group"), and what its `state_dict` has beside state and
    groups ("extra"), by path.
    """
    document = {k: v for k, v in optimizer.state_dict().items() if k not in ("state", "param_groups")}
    group = {k: v for k, v in optimizer.param_groups[0].items() if k not in HYPERPARAMETERS}
    values = {("group", k): v for k, v in group.items() if isinstance(v, (int, float, Tensor))}
    values |= {("extra", k): v for k, v in flatten_state(document)[0].items() if isinstance(v, (int, float))}
    return {key: v for key, v in values.items() if not isinstance(v, Tensor) or not v.dim()}


def probe_templates(
    updater: Updater, shape: tuple[int, ...], device: torch.device, is_fake_only: bool = False
) -> list[Template]:
    """Return the templates of a parameter's state after each update until it is settled.

    They are computed without memory for the tensors, where the optimizer allows that; with `is_fake_only` whatever a
    step without memory raises is raised.
    """

    def probe() -> list[Template]:
        weight, state = torch.ones(shape, device=device), None
        rates, templates = {"lr": updater.lr, "weight_decay": updater.weight_decay}, []
        for step in range(updater.traits.settled):
            gradient = torch.full(shape, 1e-3 * (step + 1), device=device)
            (state,) = updater.update([weight], [gradient], [state], rates, ["probe"])
            templates.append(describe_state(state))
        return templates

    try:
        with FakeTensorMode():
            return probe()
    except UnsupportedStateError:
        raise
    except Exception:  # a step that reads values, such as item(), has no fake one
        if is_fake_only:
            raise
        return probe()
