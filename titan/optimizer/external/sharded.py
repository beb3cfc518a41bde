"""Runs any optimizer on sharded parameters.

The optimizer sees plain tensors only. Where it tolerates it, these are a rank's shards, and no rank sends anything.
Else as many parameters at a time as a mesh has ranks are gathered with their gradients and state, each by the rank that
owns it; the owners compute in parallel, and broadcast weights and state, of which each rank keeps its shard (as Muon
does, `titan.optimizer.matrix_gather`). So between steps all tensors of the state are sharded, those that have another
shape than the parameter along their first dimension, and a checkpoint holds them whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Parameter

from titan.errors import RunError
from titan.optimizer import matrix_gather
from titan.optimizer.external.state import (
    State,
    Template,
    Traits,
    Updater,
    describe_state,
    flatten_state,
    is_fake,
    nest_state,
    probe_templates,
)
from titan.parallelism.norms import local_tensor

REST = Updater(torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-8}, frozenset(("lr", "weight_decay")))
"""Runs AdamW, with titan's defaults, for parameters that a class does not update."""
UPDATES = "updates"
"""The key of a scalar beside the leaves of a state: the number of updates, of which the first creates the state."""
GRADIENT, WEIGHT, SCALARS = "gradient", "", "scalars"
"""Names of what is computed or sent beside the leaves, all of which have a slash in them."""
NUMBERS = ("scalar", "number")
"""The kinds of leaves that each rank has whole."""


@dataclass
class Member:
    """A parameter and how it is updated on this rank.

    Attributes:
        name: in the whole model.
        parameter: a plain tensor or a DTensor.
        updater: runs the optimizer.
        is_stack: whether each matrix of three dimensions is updated by itself.
        is_local: whether this rank updates its shard by itself.
        templates: after each update, the last one for all later ones, of the state of what is updated: the shard, the
            whole tensor, or one matrix of a stack.
        first: the number of the first matrix that this rank has of a stack, where it updates its own.
        storage: the state between steps: the leaves by name, those that the last template has not with a number.
        boxes: the slices of this rank's shard of what is gathered, by the shape of the whole.
    """

    name: str
    parameter: Any
    updater: Updater
    is_stack: bool
    is_local: bool
    templates: list[Template]
    first: int = 0
    storage: dict[str, Tensor] = field(default_factory=dict)
    boxes: dict[torch.Size, matrix_gather.Box] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Create the state between steps, zeros and no update, and the boxes of what is gathered."""
        self.storage[UPDATES] = torch.zeros((), dtype=torch.float64)
        for index, template in enumerate(self.templates):
            for name, leaf in template.leaves.items():
                if leaf.kind == "constant" or (key := self._name_key(index, name)) in self.storage:
                    continue
                if leaf.kind == "tensor":
                    self.storage[key] = self._create_tensor(leaf.shape, leaf.dtype)
                else:
                    device = "cpu" if leaf.on_host else local_tensor(self.parameter).device
                    self.storage[key] = torch.zeros((), dtype=leaf.dtype, device=device)
        if self.is_stack and self.is_local and isinstance(self.parameter, DTensor):
            self.first = matrix_gather.compute_local_slices(self.parameter)[0].start
        if not self.is_local:
            gathered: list[Any] = [self.parameter, *(t for t in self.storage.values() if t.dim())]
            self.boxes = {tensor.shape: matrix_gather.compute_local_slices(tensor) for tensor in gathered}

    def _create_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros for a leaf of a state, sharded like the parameter where it has the parameter's shape."""
        parameter = self.parameter
        whole = (len(parameter), *shape) if self.is_stack else shape
        if not isinstance(parameter, DTensor):
            return torch.zeros(whole, dtype=dtype, device=parameter.device)
        placements: Sequence[Any] = parameter.placements
        if self.is_local and not self.is_stack and matrix_gather.list_sharded_dimensions(parameter):
            whole = tuple(parameter.shape)
        elif whole != tuple(parameter.shape) and not (self.is_local and self.is_stack):
            sharded = next((i for i, p in enumerate(placements) if not p.is_replicate()), None)
            placements = [Shard(0) if i == sharded else Replicate() for i in range(len(placements))]
        sizes, _ = compute_local_shape_and_global_offset(whole, parameter.device_mesh, placements)
        shard = torch.zeros(tuple(sizes), dtype=dtype, device=local_tensor(parameter).device)
        return wrap_shard(shard, parameter, whole, placements)

    @property
    def updates(self) -> int:
        """The number of updates so far; of a fake one, which has no value, 0."""
        updates = self.storage[UPDATES]
        with unset_fake_temporarily():  # a trace runs under fake tensors, and this one has a value
            return 0 if is_fake(updates) else int(updates)

    def get_template(self, updates: int) -> Template:
        """Return the template of the state after a number of updates, at least one."""
        return self.templates[min(updates, len(self.templates)) - 1]

    def _name_key(self, index: int, name: str) -> str:
        leaf, settled = self.templates[index].leaves[name], self.templates[-1].leaves.get(name)
        return name if leaf == settled else f"{name}@{index}"

    def select(self, updates: int, *kinds: str) -> dict[str, Tensor]:
        """Return what is stored of the leaves of some kinds after a number of updates, by name."""
        leaves = self.get_template(updates).leaves if updates else {}
        index = min(updates, len(self.templates)) - 1
        return {n: self.storage[self._name_key(index, n)] for n, leaf in leaves.items() if leaf.kind in kinds}

    def unbind(self, tensor: Tensor) -> list[Tensor]:
        """Return what is updated by itself of a tensor: the matrices of a stack, or all of it."""
        return list(tensor.unbind(0)) if self.is_stack else [tensor]

    def build_states(self, tensors: Mapping[str, Tensor], count: int) -> list[State | None]:
        """Return the states of `count` matrices, given the leaves with dimensions; None before the first step."""
        if not (updates := self.updates):
            return [None] * count
        template, scalars = self.get_template(updates), dict[str, Any]()
        for name, stored in self.select(updates, *NUMBERS).items():
            leaf = template.leaves[name]
            scalars[name] = stored.clone() if leaf.kind == "scalar" else leaf.value(stored.item())
        return [
            nest_state(template, scalars | {n: t[i] if self.is_stack else t for n, t in tensors.items()})
            for i in range(count)
        ]

    def store_scalars(self, values: Mapping[str, Any]) -> None:
        """Keep the scalars and numbers of a state, and count the update."""
        for name, stored in self.select(self.updates + 1, *NUMBERS).items():
            stored.copy_(value) if isinstance(value := values[name], Tensor) else stored.fill_(value)
        self.storage[UPDATES].add_(1)

    def collect_leaves(self, state: State) -> dict[str, Any]:
        """Return the leaves of a state after a step; raise RunError where they are not those of the template."""
        expected = self.get_template(self.updates + 1).leaves
        if (found := describe_state(state).leaves) != expected:
            name = min(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
            raise RunError(
                f"optimizer.cls: {self.updater.cls.__name__} changes the structure of its state: "
                f"{name} of {self.name} was {expected.get(name)} and is {found.get(name)}."
            )
        return flatten_state(state)[0]


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates each parameter by an optimizer of another package; see the module."""

    def __init__(
        self, settings: Any, updater: Updater, groups: list[dict[str, Any]], names: Mapping[Tensor, str]
    ) -> None:
        """Create the state of all parameters.

        Args:
            settings: a `titan.optimizer.external.schema.External`, with what was measured.
            updater: runs the class, of which nothing is known yet.
            groups: torch's, with the key `orthogonal`: whether the class updates them, else AdamW.
            names: of the parameters in the whole model.
        """
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        rates = {"lr": settings.peak_lr, "weight_decay": settings.weight_decay}
        traits, split = Traits.from_document((settings.measured or {})["traits"]), settings.chosen_split
        updaters = {True: updater._replace(traits=traits, **rates), False: REST._replace(**rates)}
        self.templates: dict[Any, list[Template]] = {}
        self.members: dict[Tensor, Member] = {}
        for group in self.param_groups:
            is_main = group["orthogonal"]
            for parameter in group["params"]:
                is_stack = is_main and "matrices" in (settings.parameters, split) and parameter.dim() == 3
                is_local = not is_main or split == "elements"
                member = self._create_member(names[parameter], parameter, updaters[is_main], is_stack, is_local)
                self.members[parameter], self.state[parameter] = member, member.storage

    def _create_member(self, name: str, parameter: Any, updater: Updater, is_stack: bool, is_local: bool) -> Member:
        sharded = matrix_gather.list_sharded_dimensions(parameter)
        is_local = is_local or not sharded or (is_stack and sharded == {0})
        shape = tuple(local_tensor(parameter).shape if is_local else parameter.shape)
        shape = shape[1:] if is_stack else tuple(max(1, size) for size in shape)
        device = torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device
        key = (id(updater), shape, device)
        if key not in self.templates:
            self.templates[key] = probe_templates(updater, shape, device)
        return Member(name, parameter, updater, is_stack, is_local, self.templates[key])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; a collective over the ranks of the meshes of gathered ones."""
        gathered = []
        for group in self.param_groups:
            members = [self.members[p] for p in group["params"] if p.grad is not None]
            if local := [member for member in members if member.is_local]:
                _update_shards(local, group)
            gathered += [matrix_gather.Item(member.parameter, group) for member in members if not member.is_local]
        matrix_gather.run_on_owners(gathered, self._gather, self._update_whole, self._spread)

    def _gather(self, item: matrix_gather.Item) -> dict[str, Tensor]:
        """Return a parameter, its gradient and the tensors of its state, whole, as copies."""
        parameter, whole = item.parameter, dict[str, Tensor]()
        for name, tensor in _list_tensors(self.members[parameter]).items():
            like: Any = parameter if name == GRADIENT else tensor
            shard = local_tensor(tensor).to(parameter.device_mesh.device_type)
            whole[name] = matrix_gather.gather_matrix(shard, like, parameter.device_mesh).clone()
        return whole

    def _update_whole(self, item: matrix_gather.Item, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole parameter and state after a step, and the scalars as one float64 vector."""
        member = self.members[item.parameter]
        (leaves,) = _step_optimizer([member], [whole], item.group)
        tensors = {
            name: torch.stack([values[name] for values in leaves]) if member.is_stack else leaves[0][name].contiguous()
            for name in member.select(member.updates + 1, "tensor")
        }
        scalars = [float(leaves[0][name]) for name in member.select(member.updates + 1, *NUMBERS)]
        weight = whole[WEIGHT]
        return {WEIGHT: weight, SCALARS: torch.tensor(scalars, dtype=torch.float64, device=weight.device), **tensors}

    def _spread(
        self, item: matrix_gather.Item, whole: dict[str, Tensor] | None, broadcast: matrix_gather.Broadcast
    ) -> None:
        """Send what the owner has computed to all ranks, each of which keeps its shard."""
        member, device = self.members[item.parameter], torch.device(item.parameter.device_mesh.device_type)
        updates = member.updates + 1
        for name, like in {WEIGHT: item.parameter, **member.select(updates, "tensor")}.items():
            tensor = whole[name] if whole else torch.empty(like.shape, dtype=like.dtype, device=device)
            broadcast(tensor)
            local_tensor(like.detach()).copy_(tensor[member.boxes[like.shape]])
        names = list(member.select(updates, *NUMBERS))
        scalars = whole[SCALARS] if whole else torch.empty(len(names), dtype=torch.float64, device=device)
        if names:
            broadcast(scalars)
        values = [0.0] * len(names) if is_fake(scalars) else scalars.tolist()
        member.store_scalars(dict(zip(names, values, strict=True)))


class ShardedOptimizerWithModes(ShardedOptimizer):
    """The same of a class that evaluates other weights than it trains (`titan.optimizer.evaluation_weights`)."""

    def evaluation_weights(self, parameter: Parameter) -> Tensor:
        """Return what is evaluated in place of a parameter that its updater computes shard by shard."""
        member = self.members[parameter]
        (state,) = member.build_states(_read_shards(member), 1)
        if state is None or not member.updater.has_modes:
            return parameter.detach().clone()
        evaluated = member.updater.evaluate(local_tensor(parameter), state)
        return wrap_shard(evaluated, parameter, tuple(parameter.shape))


def _step_optimizer(
    members: Sequence[Member], inputs: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any]
) -> list[list[dict[str, Any]]]:
    """Update weights of members of a group in place, in one step; return the leaves of each matrix' state.

    The inputs are weight, gradient, and the leaves with dimensions.
    """
    weights, gradients, states, seeds, counts = list[Tensor](), list[Tensor](), list[State | None](), list[str](), []
    for member, values in zip(members, inputs, strict=True):
        matrices = member.unbind(values[WEIGHT])
        counts.append(len(matrices))
        weights += matrices
        gradients += member.unbind(values[GRADIENT])
        states += member.build_states(values, len(matrices))
        seeds += [f"{member.name}/{member.first + index}/{member.updates}" for index in range(len(matrices))]
    results = iter(members[0].updater.update(weights, gradients, states, group, seeds))
    return [
        [member.collect_leaves(next(results)) for _ in range(count)]
        for member, count in zip(members, counts, strict=True)
    ]


def _update_shards(members: Sequence[Member], group: Mapping[str, Any]) -> None:
    results = _step_optimizer(members, [_read_shards(member) for member in members], group)
    for member, matrices in zip(members, results, strict=True):
        member.store_scalars(matrices[0])
        tensors = member.select(member.updates, "tensor") if local_tensor(member.parameter).numel() else {}
        for name, stored in tensors.items():
            for target, values in zip(member.unbind(local_tensor(stored)), matrices, strict=True):
                if is_fake(target) or values[name].data_ptr() != target.data_ptr():
                    target.copy_(values[name])


def _read_shards(member: Member) -> dict[str, Tensor]:
    """Return this rank's shards of the weight, its gradient if it has one, and the state by leaf.

    A rank without a part has zeros of an element, or of a matrix: its numbers, such as a count of steps, advance too.
    """
    shards = {name: local_tensor(tensor) for name, tensor in _list_tensors(member).items()}
    if shards[WEIGHT].numel():
        return shards
    leaves = member.get_template(member.updates).leaves
    extra = (1,) if member.is_stack else ()
    own = (1, *shards[WEIGHT].shape[1:]) if member.is_stack else tuple(max(1, n) for n in shards[WEIGHT].shape)
    return {n: t.new_zeros(own if n in (WEIGHT, GRADIENT) else extra + leaves[n].shape) for n, t in shards.items()}


def _list_tensors(member: Member) -> dict[str, Tensor]:
    """Return a parameter, its gradient if it has one, and the tensors of its state."""
    gradient = {} if member.parameter.grad is None else {GRADIENT: member.parameter.grad}
    return {WEIGHT: member.parameter.detach(), **gradient, **member.select(member.updates, "tensor")}


def wrap_shard(shard: Tensor, like: Any, shape: tuple[int, ...], placements: Sequence[Any] | None = None) -> Tensor:
    """Return this rank's shard of a tensor of that shape as a DTensor, where `like` is one."""
    if not isinstance(like, DTensor):
        return shard
    stride = torch.empty(shape, device="meta").stride()
    chosen = like.placements if placements is None else placements
    return DTensor.from_local(shard, like.device_mesh, chosen, run_check=False, shape=torch.Size(shape), stride=stride)
