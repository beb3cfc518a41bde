"""Replicas: which ranks must have the same bits of a tensor, and whether they do.

A DTensor has replicas along the dimensions of its mesh where its placement is Replicate, and along the dimensions of
the layout that its mesh does not cover; a plain tensor along all of them. Stages of a pipeline have different tensors,
but for those that are given as shared.

1. every rank: the fingerprint of each tensor (`titan.numerics.fingerprints`), and of those with replicas along a
   dimension one sum F;
2. the ranks of each dimension: the maximum of [F, ~F], 16 bytes: both are of one F if and only if all have the same;
3. all ranks: whether any differ, one number.

Only if some do, the ranks send the fingerprints of the tensors concerned, and each finds the same answer. A dimension
after the other is enough: equal along each of them is equal over their product.
"""

from __future__ import annotations

import math
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from titan.errors import DifferingRanksError, RunError
from titan.numerics.fingerprints import fingerprint
from titan.parallelism.mesh import World
from titan.parallelism.norms import local_tensor

STAGES = ("all", "tied")
"""Which stages of a pipeline have a tensor that several have: all, or those at both ends."""
MAX_NAMES = 16
"""Differing tensors of which a rank sends fingerprints."""
_LEAST = torch.iinfo(torch.int64).min


class Replicas(NamedTuple):
    """The ranks that must have the same bits as this one.

    Attributes:
        groups: by the name of the dimension along which they are.
        part: which part of the tensor these ranks have: this rank's coordinates along the other dimensions.
    """

    groups: dict[str, dist.ProcessGroup]
    part: tuple[tuple[str, int], ...]


class RankName(NamedTuple):
    """A rank, the name of its machine, and that of its node under Slurm."""

    rank: int
    host: str
    node: str


@dataclass(frozen=True)
class ReplicaDifference:
    """Replicas that differ.

    Attributes:
        name: the first tensor of which they do.
        count: how many tensors they differ in, at most `MAX_NAMES` counted on a rank.
        odd: the ranks that do not have what most have; all of them where there is no majority.
        others: the ranks that do.
    """

    name: str
    count: int
    odd: tuple[RankName, ...]
    others: tuple[RankName, ...]

    def describe(self) -> str:
        """Return what differs, in one sentence without a full stop."""
        more = f", and {self.count - 1} more" if self.count > 1 else ""
        if not self.others:
            return f"{list_rank_names(self.odd)} have different bits of {self.name}{more}, and no majority decides"
        verb = "has" if len(self.odd) == 1 else "have"
        return f"{list_rank_names(self.odd)} {verb} other bits of {self.name}{more} than {list_rank_names(self.others)}"

    def advise(self) -> str:
        """Return how to repeat a command without the odd ranks' machines."""
        nodes = join_nodes(self.odd)
        return f"with cluster.exclude={nodes}" if nodes else "on another machine"

    def build_error(self, message: str) -> DifferingRanksError:
        """Return the error of a message, which names the odd ranks' nodes for a restart without them."""
        return DifferingRanksError(message, self.odd[0].rank, join_nodes(self.odd))


def list_rank_names(names: Sequence[RankName]) -> str:
    """Return ranks with their machines, such as "rank 3 (on n2)", the first eight of them."""
    hosts = ", ".join(dict.fromkeys(name.host for name in names))
    ranks = ", ".join(str(name.rank) for name in names[:8]) + (", ..." if len(names) > 8 else "")
    return f"rank{'s' if len(names) > 1 else ''} {ranks} (on {hosts})"


def join_nodes(names: Iterable[RankName]) -> str:
    """Return the nodes of ranks under Slurm as it takes them, such as "n1,n2"; empty where there are none."""
    return ",".join(dict.fromkeys(name.node for name in names if name.node))


def get_rank_name(rank: int) -> RankName:
    """Return the name of this rank."""
    return RankName(rank, socket.gethostname(), os.environ.get("SLURMD_NODENAME", ""))


def find_replicas(name: str, tensor: Tensor, world: World) -> Replicas:
    """Return the ranks of this one's pipeline stage that must have the same bits of a tensor.

    Args:
        name: of the tensor, for errors.
        tensor: plain or a DTensor.

    Raises:
        RunError: for a placement, or a mesh, of which this is not known.
    """
    groups: dict[str, dist.ProcessGroup] = {}
    part: list[tuple[str, int]] = []
    names: tuple[str, ...] = ()
    covered = 1
    if isinstance(tensor, DTensor):
        mesh: Any = tensor.device_mesh
        names, covered = mesh.mesh_dim_names or (), mesh.size()
        for index, (dimension, placement) in enumerate(zip(names, tensor.placements, strict=True)):
            if placement.is_replicate():
                groups[dimension] = mesh.get_group(index)
            elif placement.is_shard() or isinstance(placement, _StridedShard):
                part.append((dimension, mesh.get_coordinate()[index]))
            else:
                kind = type(placement).__name__
                raise RunError(f"{name} has the placement {kind}, of which it is not known which ranks are equal.")
    groups |= _list_other_groups(name, names, covered, world)
    return Replicas({dimension: group for dimension, group in groups.items() if group.size() > 1}, tuple(part))


def _list_other_groups(name: str, names: Sequence[str], covered: int, world: World) -> dict[str, Any]:
    """Return the groups along the layout's dimensions that a mesh of `covered` ranks with dimensions `names` lacks."""
    missing = world.rank_info.world_size // world.layout.pipeline // covered
    degrees = {} if world.mesh is None else world.layout.mesh_degrees()
    absent = [dimension for dimension in degrees if dimension not in (*names, "pipeline")]
    for dimensions in ([], absent, ["tensor"]):
        if math.prod(degrees.get(dimension, 1) for dimension in dimensions) == missing:
            return {dimension: world.get_group(dimension) for dimension in dimensions}
    mesh_text = " x ".join(names)
    raise RunError(f"{name} is distributed over {mesh_text}, and it is not known which other ranks have it too.")


class Prints:
    """The fingerprints of this rank's tensors, and of which ranks each must be equal."""

    def __init__(self, tensors: Mapping[str, Tensor], world: World, stages: Mapping[str, str]) -> None:
        """Take the tensors; see `find_difference`."""
        self.world, self.names, self.stages = world, list(tensors), stages
        self.replicas = [find_replicas(name, tensor, world) for name, tensor in tensors.items()]
        self.is_compared = [bool(r.groups) or n in stages for n, r in zip(self.names, self.replicas, strict=True)]
        locals_ = [local_tensor(tensor) for tensor in tensors.values()]
        # a number of each tensor's name, dtype and local shape
        kinds = (f"{name} {t.dtype} {tuple(t.shape)}" for name, t in zip(self.names, locals_, strict=True))
        self.factors = list(map(_hash_text, kinds))
        zero = torch.zeros((), dtype=torch.int64, device=world.device)
        values = [
            fingerprint(tensor).to(world.device) if compared else zero
            for tensor, compared in zip(locals_, self.is_compared, strict=True)
        ]
        added = torch.tensor(self.factors, dtype=torch.int64).to(world.device)
        self.values = torch.stack([*values, zero])[:-1] + added  # a tensor of zeros must not be equal to an empty one
        self.bytes = sum(t.nbytes for t, compared in zip(locals_, self.is_compared, strict=True) if compared)

    def sum_group(self, indices: Sequence[int]) -> Tensor:
        """Return the sum of some fingerprints, each times an odd factor of its name: int64 []."""
        factors = torch.tensor([self.factors[i] | 1 for i in indices], dtype=torch.int64).to(self.values.device)
        return (self.values[list(indices)] * factors).sum()

    def list_groups(self) -> list[tuple[dist.ProcessGroup, list[int]]]:
        """Return the groups within the stage with the indices of what they compare, in the same order on its ranks."""
        members: dict[str, list[int]] = defaultdict(list)
        groups: dict[str, dist.ProcessGroup] = {}
        for index, replicas in enumerate(self.replicas):
            for group in replicas.groups.values():
                groups[group.group_name] = group
                members[group.group_name].append(index)
        return [(groups[name], indices) for name, indices in members.items()]


def _hash_text(text: str) -> int:
    """Return a number that is the same in all processes: 62 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def find_difference(
    tensors: Mapping[str, Tensor],
    world: World,
    stages: Mapping[str, str] | None = None,
    copies: Mapping[str, Tensor] | None = None,
) -> ReplicaDifference | None:
    """Return the first difference between replicas, the same on all ranks; None where all are equal.

    All ranks call it together, with the tensors of their pipeline stages in the same order within a stage.

    Args:
        stages: names that several stages of a pipeline have, and which do: one of `STAGES`.
        copies: second copies on this rank of tensors of some of these names: where it has both ends of a pipeline.

    Raises:
        RunError: for a tensor of which it is not known which ranks are equal.
    """
    if world.rank_info.world_size == 1:
        return None
    stages = stages or {}
    prints, second = Prints(tensors, world, stages), Prints(copies or {}, world, stages)
    groups = prints.list_groups()
    flags = [_differ(prints.sum_group(indices), group) for group, indices in groups]
    first = [prints.names.index(name) for name in second.names]
    stage_differs = _compare_stages(prints) | (prints.values[first] != second.values).any()
    all_flags = torch.stack([*flags, stage_differs])
    anywhere = all_flags.any().long()
    dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    if not anywhere.item():
        return None
    # the ranks of a group have the same flag, so that they go on with the same groups
    differing = [group for group, differs in zip(groups, all_flags[:-1].tolist(), strict=True) if differs]
    return _find_odd_ranks(prints, second, _list_differing(prints, differing, bool(stage_differs)))


def _differ(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return whether each of some values, int64, differs between the ranks of a group."""
    both = torch.stack([values, ~values])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return both[0] != ~both[1]


def _compare_stages(prints: Prints) -> Tensor:
    """Return whether what stages share differs along the pipeline, bool []; ranks without it give the least number."""
    world, group = prints.world, prints.world.get_group("pipeline")
    both = torch.full((len(STAGES), 2), _LEAST, dtype=torch.int64, device=world.device)
    has_any = torch.zeros(len(STAGES), dtype=torch.bool, device=world.device)
    for row, word in enumerate(STAGES):
        indices = [i for i, name in enumerate(prints.names) if prints.stages.get(name) == word]
        if indices:
            total = prints.sum_group(indices)
            both[row], has_any[row] = torch.stack([total, ~total]), True
    if group is not None:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return (has_any & (both[:, 0] != ~both[:, 1])).any()


def _list_differing(
    prints: Prints, groups: Sequence[tuple[dist.ProcessGroup, list[int]]], stage_differs: bool
) -> list[str] | None:
    """Return the first `MAX_NAMES` tensors that differ within groups of which it is known that some do.

    What stages share is listed as a whole where it differs. None where ranks of a group have other tensors.
    """
    found = {i for i, name in enumerate(prints.names) if stage_differs and name in prints.stages}
    has_equal_names = True
    for group, members in groups:
        # names, types and shapes, in order
        digest = _hash_text(" ".join(str(prints.factors[index]) for index in members))
        if _differ(torch.tensor(digest, device=prints.values.device), group).item():
            has_equal_names = False
            continue
        differing = _differ(prints.values[members], group).tolist()
        found |= {i for i, differs in zip(members, differing, strict=True) if differs}
    return [prints.names[index] for index in sorted(found)[:MAX_NAMES]] if has_equal_names else None


def _find_odd_ranks(prints: Prints, second: Prints, suspects: Sequence[str] | None) -> ReplicaDifference:
    """Find which ranks differ in which tensors, now that some do; all ranks call it together.

    Args:
        second: of this rank's second copies.
        suspects: names among which this rank's groups have a difference; None where they have other tensors.
    """
    world, own_name = prints.world, get_rank_name(prints.world.rank_info.rank)
    lists = world.all_gather_object((own_name, suspects if suspects is None else list(suspects)))
    if unlike := [RankName(*name) for name, rank_suspects in lists if rank_suspects is None]:
        return ReplicaDifference("the state, of which they save other tensors", 1, tuple(unlike), ())
    names = list(dict.fromkeys(name for _, rank_suspects in lists for name in rank_suspects))
    entries = [entry for p in (prints, second) for entry in _list_entries(p, names)]
    holders: dict[str, dict[Any, list[tuple[RankName, int]]]] = {name: defaultdict(list) for name in names}
    for rank_name, rank_entries in world.all_gather_object((own_name, entries)):
        for name, part, value in rank_entries:
            holders[name][part].append((RankName(*rank_name), value))
    verdicts = {name: [_split_majority(part) for part in parts.values()] for name, parts in holders.items()}
    concerned = {name: found for name, parts in verdicts.items() if (found := [v for v in parts if v[0]])}
    first = next(iter(concerned))
    odd = sorted({rank for found in concerned.values() for v in found for rank in v[0]})
    others = sorted({rank for v in concerned[first] for rank in v[1]}.difference(odd))
    return ReplicaDifference(first, len(concerned), tuple(odd), tuple(others))


def _list_entries(prints: Prints, names: Collection[str]) -> list[tuple[str, Any, int]]:
    """Return name, part and fingerprint of this rank's tensors of some names."""
    chosen = [index for index, name in enumerate(prints.names) if name in names]
    values = prints.values[chosen].tolist()
    return [(prints.names[i], prints.replicas[i].part, value) for i, value in zip(chosen, values, strict=True)]


def _split_majority(holders: Sequence[tuple[RankName, int]]) -> tuple[set[RankName], set[RankName]]:
    """Return the ranks that do not have what more than half have, and those that do; all are odd without a majority."""
    counts = Counter(value for _, value in holders)
    value, count = counts.most_common(1)[0]
    everyone = {name for name, _ in holders}
    if len(counts) > 1 and 2 * count <= len(holders):
        return everyone, set()
    odd = {name for name, v in holders if v != value}
    return odd, everyone - odd
