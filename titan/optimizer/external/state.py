"""The state of one parameter as a flat mapping of tensors, whatever an optimizer keeps.

An optimizer's state may be nested in mappings and lists, and have numbers beside tensors. Its leaves get names such as
`state/exp_avg` or `state/0/Q/1`. Numbers of the parameter group that steps change, such as a count, are leaves too
(`group/k`), and of what `state_dict` has beside state and groups (`extra/NAME/k`): an optimizer of one parameter has
these for it alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from titan.optimizer.external.constructor import Constructor, run_uncompiled

HYPERPARAMETERS = ("lr", "weight_decay")
"""Keys of a group that titan sets at every step."""
CONSTANTS = (str, type(None), torch.dtype, torch.device)
"""Types of leaves that are no values: they may not change."""


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
    """What a parameter's state consists of.

    Attributes:
        spec: how the leaves are nested.
        leaves: by name, in the order of the nesting.
    """

    spec: pytree.TreeSpec
    leaves: Mapping[str, Leaf]

    def iterate_values(self) -> Iterator[tuple[str, Leaf]]:
        """Yield the leaves that are no constants."""
        return ((name, leaf) for name, leaf in self.leaves.items() if leaf.kind != "constant")

    def count_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves.values() if leaf.shape)


State = dict[str, Any]
"""A parameter's state as the optimizer keeps it, and numbers beside it: {"state": ..., "group": ..., "extra": ...}."""


def flatten_state(state: State) -> tuple[dict[str, Any], pytree.TreeSpec]:
    """Return a state's leaves by name, and how they are nested."""
    pairs, spec = pytree.tree_flatten_with_path(state)
    return {"/".join(str(_read_key(key)) for key in path): value for path, value in pairs}, spec


def _read_key(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))


def describe_state(state: State) -> Template:
    """Return the template of a state.

    Raises:
        UnsupportedStateError: for a leaf that a checkpoint can't hold.
    """
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
    if isinstance(value, CONSTANTS) or _is_plain_set(value):
        return Leaf("constant", value=copy.copy(value))
    raise UnsupportedStateError(f"its state {name} is a {type(value).__name__}, which no checkpoint holds")


def _is_plain_set(value: Any) -> bool:
    return isinstance(value, (set, frozenset)) and all(isinstance(v, (str, int, *CONSTANTS)) for v in value)


def is_fake(value: Tensor) -> bool:
    """Return whether a tensor is a fake one, without values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def nest_state(template: Template, values: Mapping[str, Any]) -> State:
    """Return a state from the values of its leaves."""
    leaves = [
        copy.copy(leaf.value) if leaf.kind == "constant" else values[name] for name, leaf in template.leaves.items()
    ]
    nested: State = pytree.tree_unflatten(leaves, template.spec)
    return nested


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
        constructor: of the optimizer.
        traits: of the optimizer.
        lr: the peak learning rate, with which it is built.
        weight_decay: with which it is built.
    """

    constructor: Constructor
    traits: Traits
    lr: float
    weight_decay: float

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
            rates: the learning rate and the weight decay of the step, under the keys of a group.
            seeds: what the random numbers of each tensor are a function of.
        """
        if self.traits.is_single and len(tensors) > 1:
            single = zip(tensors, gradients, states, seeds, strict=True)
            return [self.update([t], [g], [s], rates, [seed])[0] for t, g, s, seed in single]
        parameters = [torch.nn.Parameter(tensor.detach()) for tensor in tensors]
        optimizer = self.build(parameters, rates)
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            parameter.grad = gradient
            if state is not None:
                self._load_numbers(optimizer, state)
                optimizer.state[parameter] = state["state"]
        self.step(optimizer, seeds[0])
        for tensor, parameter in zip(tensors, parameters, strict=True):
            if not is_fake(tensor) and parameter.data_ptr() != tensor.data_ptr():  # the data have been replaced
                tensor.copy_(parameter.detach())
        return [self.read_state(optimizer, parameter) for parameter in parameters]

    def build(self, parameters: Sequence[Tensor], rates: Mapping[str, float]) -> torch.optim.Optimizer:
        """Return an optimizer of plain parameters, with the rates of a step."""
        optimizer = self.constructor.build_for_training(parameters, self.lr, self.weight_decay)
        self.set_rates(optimizer, rates)
        return optimizer

    def set_rates(self, optimizer: torch.optim.Optimizer, rates: Mapping[str, float]) -> None:
        """Set the learning rate and the weight decay of a step."""
        optimizer.param_groups[0].update({k: v for k, v in rates.items() if k in self.constructor.takes})

    def step(self, optimizer: torch.optim.Optimizer, seed: str) -> None:
        """Do a step, with random numbers that follow from `seed`."""
        with run_uncompiled(), seed_randomness(seed) if self.traits.is_random else contextlib.nullcontext():
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
        group = optimizer.param_groups[0]
        counts = {key: group[key] for key in self.traits.counters if key in group}
        extras = read_extras(optimizer) if self.traits.extras else {}
        extra = {key: extras[key] for key in self.traits.extras if key in extras}
        return {"state": dict(optimizer.state.get(parameter, {})), "group": counts, "extra": extra}

    def evaluate(self, tensor: Tensor, state: State) -> Tensor:
        """Return what an optimizer with a method `eval` evaluates in place of a plain tensor, a new tensor."""
        parameter = torch.nn.Parameter(tensor.detach().clone())
        optimizer: Any = self.build([parameter], {})
        self._load_numbers(optimizer, state)
        optimizer.state[parameter] = state["state"]
        with run_uncompiled():
            optimizer.eval()
        return parameter.detach()


@contextlib.contextmanager
def seed_randomness(seed: str) -> Iterator[None]:
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


def read_extras(optimizer: torch.optim.Optimizer) -> dict[str, float | int | bool]:
    """Return the numbers that an optimizer's `state_dict` has beside `state` and `param_groups`, by path."""
    document = {k: v for k, v in optimizer.state_dict().items() if k not in ("state", "param_groups")}
    pairs, _ = pytree.tree_flatten_with_path(document)
    named = {"/".join(str(_read_key(key)) for key in path): value for path, value in pairs}
    return {name: value for name, value in named.items() if isinstance(value, (bool, int, float))}


def read_counters(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the numbers of an optimizer's only group but those that titan sets."""
    return {
        key: float(value)
        for key, value in optimizer.param_groups[0].items()
        if key not in HYPERPARAMETERS and (isinstance(value, (int, float)) or is_scalar(value))
    }


def is_scalar(value: Any) -> bool:
    """Return whether a value is a tensor without dimensions."""
    return isinstance(value, Tensor) and value.dim() == 0


def probe_templates(
    updater: Updater, shape: tuple[int, ...], device: torch.device, is_fake_only: bool = False
) -> list[Template]:
    """Return the templates of a parameter's state after each update until it is settled.

    They are computed without memory for the tensors, where the optimizer allows that.

    Args:
        is_fake_only: raise whatever a step without memory raises.

    Raises:
        UnsupportedStateError: see `describe_state`.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            return _probe_steps(updater, shape, device)
    except UnsupportedStateError:
        raise
    except Exception:  # a step that reads values, such as item(), has no fake one
        if is_fake_only:
            raise
        return _probe_steps(updater, shape, device)


def _probe_steps(updater: Updater, shape: tuple[int, ...], device: torch.device) -> list[Template]:
    weight, state = torch.ones(shape, device=device), None
    rates, templates = {"lr": updater.lr, "weight_decay": updater.weight_decay}, []
    for step in range(updater.traits.settled):
        gradient = torch.full(shape, 1e-3 * (step + 1), device=device)
        (state,) = updater.update([weight], [gradient], [state], rates, ["probe"])
        templates.append(describe_state(state))
    return templates
