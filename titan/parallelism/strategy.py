"""Groups of modules that FSDP shards by another strategy than the rest: which modules are in which. Free of torch.

FSDP gathers the parameters of one module at a time. By default these modules are the blocks, the embedding, the head
and the rest, all sharded by one strategy: over all data-parallel ranks, along the first dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from titan.config.settings import format_value, suggest_pattern
from titan.errors import ConfigError
from titan.parallelism.schema import Layout
from titan.parallelism.schema import ModelSharding as ModelSharding
from titan.parallelism.schema import Strategy as Strategy

BLOCKS = "layers"
"""The name of the collection of blocks, which is no module that computes."""


def assign_groups(names: Iterable[str], groups: Mapping[str, Strategy]) -> dict[str, str]:
    """Return the group of each module that is wrapped by itself, by the module's name.

    Args:
        groups: by their names; of several that match a module the first has it.
    """
    assigned: dict[str, str] = {}
    for name in names:
        group_name = next((group for group, strategy in groups.items() if _matches_outermost(strategy, name)), None)
        if group_name is not None:
            assigned[name] = group_name
    return assigned


def is_in_group(name: str, groups: Mapping[str, Strategy]) -> bool:
    """Return whether a module, or one around it, is in a group."""
    return any(_matches(strategy, part) for strategy in groups.values() for part in (name, *_list_outer_modules(name)))


def count_shards(names: Iterable[str], groups: Mapping[str, Strategy], layout: Layout) -> dict[str, int]:
    """Return the number of ranks that each module's parameters are sharded over, by the names of the innermost ones."""
    names = list(names)
    assigned = assign_groups(list_module_names(f"{name}.weight" for name in names), groups)

    def count_module_shards(name: str) -> int:
        group_name = next(
            (assigned[part] for part in (name, *_list_outer_modules(name)[::-1]) if part in assigned), None
        )
        return groups[group_name].shards(layout) if group_name is not None else layout.sharded

    return {name: count_module_shards(name) for name in names}


def blocks_are_alike(parameters: Iterable[str], groups: Mapping[str, Strategy]) -> bool:
    """Return whether groups have the same parts of every block."""
    names = list_module_names(parameters)
    parts: dict[str, dict[str, str]] = {name.split(".")[1]: {} for name in names if name.startswith(f"{BLOCKS}.")}
    for name, group in assign_groups(names, groups).items():
        if name.startswith(f"{BLOCKS}."):
            _, number, *rest = name.split(".")
            parts[number][".".join(rest)] = group
    return all(part == next(iter(parts.values())) for part in parts.values())


def _matches_outermost(strategy: Strategy, name: str) -> bool:
    """Return whether a strategy matches a module and none around it."""
    return _matches(strategy, name) and not any(_matches(strategy, outer) for outer in _list_outer_modules(name))


def _list_outer_modules(name: str) -> list[str]:
    """Return the names of the modules around one."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _matches(strategy: Strategy, name: str) -> bool:
    return name != BLOCKS and any(fnmatchcase(name, pattern) for pattern in strategy.match)


def list_module_names(parameters: Iterable[str]) -> list[str]:
    """Return the names of the modules that parameters are in."""
    module_names: dict[str, None] = {}
    for parameter in parameters:
        module_names |= dict.fromkeys(_list_outer_modules(parameter))
    return list(module_names)


def check_groups(groups: Mapping[str, Strategy], parameters: Sequence[str], layout: Layout, tied: bool) -> None:
    """Raise ConfigError for groups that match nothing, or that can't be sharded as they say.

    Args:
        parameters: names of the model's parameters.
        tied: whether embedding and head share a weight.

    Raises:
        ConfigError: with the setting to change.
    """
    names = list_module_names(parameters)
    assigned = assign_groups([*names, "head"] if tied else names, groups)
    for name, group in groups.items():
        _check_match(name, group, names)
        _check_shards(name, group, layout)
        if isinstance(group, ModelSharding) and (group.match != ("*",) or len(groups) > 1):
            raise ConfigError(
                f"parallelism.groups.{name}.match={format_value(group.match)}: {group._target_} shards the whole "
                f"model; give ['*'], and no group but parallelism.groups.{name}."
            )
    if tied and assigned.get("tok_embeddings") != assigned.get("head"):
        name = assigned.get("head") or assigned["tok_embeddings"]
        raise ConfigError(
            f"parallelism.groups.{name}.match={format_value(groups[name].match)}: embedding and head share a weight "
            "(model.tied=true); match both, tok_embeddings and head, or neither."
        )


def _check_match(name: str, group: Strategy, names: Sequence[str]) -> None:
    if not group.match:
        raise ConfigError(f"parallelism.groups.{name}.match=[]: matches no module; give patterns such as ['layers.*'].")
    for pattern in group.match:
        if not any(fnmatchcase(module, pattern) for module in (*names, "head") if module != BLOCKS):
            raise ConfigError(
                f"parallelism.groups.{name}.match={format_value(group.match)}: no module of the model matches "
                f"{pattern}; names are such as {names[0]}, {max(names, key=lambda module: module.count('.'))} and "
                f"{names[-1]}{suggest_pattern(pattern, names)}"
            )


def _check_shards(name: str, group: Strategy, layout: Layout) -> None:
    """Reject a number of shards that ranks can't be divided into."""
    ranks, shards = layout.replicate * layout.sharded, group.shards(layout)
    if shards < 1 or ranks % shards:
        setting_text = (
            f"parallelism.groups.{name}.shard={shards}" if group.shard else f"parallelism.groups.{name}: {shards}"
        )
        raise ConfigError(
            f"{setting_text}: does not divide the {ranks} ranks of replicate, shard and context; give one that does, "
            f"such as {layout.sharded}."
        )
