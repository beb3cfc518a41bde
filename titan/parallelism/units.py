"""FSDP units: the modules that are gathered together, and the ranks and the dimension that shard each parameter.

The blocks, the embedding and the head are units. What a group shards over other ranks or along another dimension
inside of a block is gathered with the block all the same: a unit may have a mesh for each parameter, so that one hook
per block gathers all that the next block needs while the present one computes.

A group inside of a block is a unit by itself where its strategy or the block's defines how it is wrapped; where it
shards nothing in another way than the block; where gathered weights are resharded over a number of ranks, which need
not divide those of the group; and before torch 2.13, which has one mesh per unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from titan.errors import RunError
from titan.parallelism.norms import local_tensor
from titan.parallelism.schema import DEFAULT, Sharding, Strategy
from titan.parallelism.strategy import BLOCKS, assign_groups, list_module_names

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    HAS_MESH_PER_PARAMETER = True
except ImportError:  # torch before 2.13
    HAS_MESH_PER_PARAMETER = False


class Unit(NamedTuple):
    """Modules that are gathered together.

    Attributes:
        names: of the modules: one, or those of the embedding and the head where their weight is tied.
        sharding: of their parameters.
        reshard: whether gathered weights are freed after the forward pass; a number: reshard over so many ranks.
        inner: modules inside of them that are sharded in another way, by name.
    """

    names: list[str]
    sharding: Sharding
    reshard: bool | int
    inner: dict[str, Sharding]


def list_units(model: Any, mesh: DeviceMesh | None, groups: Mapping[str, Sharding], reshard: bool | int) -> list[Unit]:
    """Return the units of a model or of a stage's part of it, the innermost first.

    Args:
        model: a `titan.model.decoder.DecoderModel`.
        mesh: the ranks of modules that no group matches; None: these are in no unit.
        groups: by their names; see `titan.parallelism.strategy.assign_groups`.
        reshard: of blocks, and of what is inside of them.
    """
    assigned = assign_groups(
        list_module_names(name for name, _ in model.named_parameters()),
        {name: sharding.strategy for name, sharding in groups.items()},
    )
    shardings = {name: groups[group] for name, group in assigned.items()}
    default = Sharding(DEFAULT, mesh)
    outer = [Unit(names, shardings.get(names[0], default), r, {}) for names, r in _list_outer_modules(model, reshard)]
    inner: list[Unit] = []
    for name in sorted(
        shardings.keys() - {n for unit in outer for n in unit.names}, key=lambda name: (name.count("."), name)
    ):
        around = _find_enclosing_unit([*outer, *inner], name)
        if around is not None and _joins(shardings[name], around):
            around.inner[name] = shardings[name]
        else:
            inner.append(Unit([name], shardings[name], reshard, {}))
    return [unit for unit in (*inner[::-1], *outer) if unit.sharding.mesh is not None]


def list_units_inside_blocks(units: list[Unit]) -> list[str]:
    """Return the names of the parts of blocks that are units by themselves."""
    names = [name for unit in units for name in unit.names]
    return [name for name in names if name.startswith(f"{BLOCKS}.") and name.count(".") > 1]


def _list_outer_modules(model: Any, reshard: bool | int) -> Iterator[tuple[list[str], bool | int]]:
    """Yield the blocks, the embedding and the head, and whether they are freed after the forward pass."""
    for number in model.layers:
        yield [f"{BLOCKS}.{number}"], reshard
    end_names = [name for name in ("head", "tok_embeddings") if getattr(model, name) is not None]
    if len(end_names) == 2 and model.config.tied:
        yield end_names[::-1], False
        return
    for name in end_names:
        yield [name], False if name == "head" else reshard


def _find_enclosing_unit(units: list[Unit], name: str) -> Unit | None:
    """Return the innermost unit around a module."""
    around = [unit for unit in units if any(name.startswith(f"{outer}.") for outer in unit.names)]
    return max(around, key=lambda unit: len(unit.names[0]), default=None)


def _joins(sharding: Sharding, unit: Unit) -> bool:
    """Return whether a module of a group is gathered with the unit around it."""
    (strategy, mesh), (unit_strategy, unit_mesh) = sharding, unit.sharding
    wraps_as_usual = all(type(each).wrap is Strategy.wrap for each in (strategy, unit_strategy))
    if mesh is None or unit_mesh is None or not wraps_as_usual:
        return False
    if mesh == unit_mesh:
        return type(strategy).dimension is not Strategy.dimension
    return HAS_MESH_PER_PARAMETER and isinstance(unit.reshard, bool)


def build_placement_options(unit: Unit, model: Any) -> dict[str, Any]:
    """Return the argument of `fully_shard` with the ranks and dimension of each parameter, where they differ.

    Args:
        model: whose parameters' names in the whole model a strategy gets.

    Returns:
        The argument; its function raises RunError where ranks don't divide the dimension that a strategy chooses.
    """
    if not unit.inner and type(unit.sharding.strategy).dimension is Strategy.dimension:
        return {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    choose_ranks = _build_rank_choice(unit)

    def choose_placement(parameter: nn.Parameter) -> Any:
        name = names[id(parameter)]
        sharding = _find_sharding(unit, name)
        shape = tuple(local_tensor(parameter).shape)
        dimension = sharding.strategy.dimension(model.aliases.get(name, name), shape)
        _check_ranks_divide(sharding, name, shape, dimension)
        return choose_ranks(sharding, Shard(dimension))

    return {"shard_placement_fn": choose_placement}


def _check_ranks_divide(sharding: Sharding, name: str, shape: tuple[int, ...], dimension: int) -> None:
    """Raise RunError for a dimension, other than the first, that FSDP can't divide over the ranks."""
    ranks = 1 if sharding.mesh is None else sharding.mesh.size(-1)
    if dimension and shape[dimension] % ranks:
        raise RunError(
            f"{sharding.strategy._target_} can't shard {name.rpartition('.')[0]}: {ranks} ranks don't divide dimension "
            f"{dimension} of {name} {shape}."
        )


def _find_sharding(unit: Unit, parameter: str) -> Sharding:
    """Return the sharding of the innermost module around a parameter."""
    around = [name for name in unit.inner if parameter.startswith(f"{name}.")]
    return unit.inner[max(around, key=len)] if around else unit.sharding


def _build_rank_choice(unit: Unit) -> Callable[[Sharding, Shard], Any]:
    """Return what adds the ranks to a placement; torch wants one object for each process group."""
    usual_key, infos = _list_groups(unit.sharding), dict[Any, Any]()

    def choose_ranks(sharding: Sharding, placement: Shard) -> Any:
        key = _list_groups(sharding)
        if key == usual_key:
            return placement
        if key not in infos:  # FSDP's description of a mesh of one dimension, or of two, replicate and shard
            mesh: Any = sharding.mesh
            hybrid: Any = {"shard_mesh_dim": 1, "replicate_mesh_dim": 0}
            infos[key] = FSDPMeshInfo(mesh, shard_mesh_dim=0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, **hybrid)
        return ShardPlacementResult(placement, infos[key])

    return choose_ranks


def _list_groups(sharding: Sharding) -> tuple[Any, ...]:
    return () if sharding.mesh is None else tuple(sharding.mesh.get_all_groups())
