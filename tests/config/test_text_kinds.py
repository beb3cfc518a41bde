"""Every setting that holds text declares what it is, and what declares nothing counts as code."""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

import titan
from titan.config.settings import setting
from titan.config.text_kinds import Code, Label, TextKind, list_classes, list_kinds
from titan.run.schema import Recipe
from titan.run.trust import find_kind
from titan.sweep.schema import LAUNCHERS, OptunaSearch, Sweep


def list_schemas() -> set[type]:
    """Return all schemas: those in modules of that name, and what a recipe, a sweep and a launcher are made of.

    All modules are imported, since what a class that only some import declares must not change what others do.
    """
    names = [m.name for m in pkgutil.walk_packages(titan.__path__, "titan.") if not m.name.endswith("__main__")]
    modules = {name: importlib.import_module(name) for name in names}
    in_schemas = {name: module for name, module in modules.items() if ".schema" in name}
    found = [c for name, module in in_schemas.items() for c in vars(module).values() if is_schema(c, name)]
    schemas = [c for c in found if any("help" in field.metadata for field in dataclasses.fields(c))]
    schemas += [Recipe, Sweep, OptunaSearch, *(settings for _, settings in LAUNCHERS.values())]
    for cls in schemas:
        parts = [
            part
            for kind in typing.get_type_hints(cls, include_extras=True).values()
            for part in (kind, *list_parts(kind))
        ]
        schemas += [c for part in parts if is_schema(part) for c in list_classes(part) if c not in schemas]
    return set(schemas)


def is_schema(value: Any, module: str = "") -> bool:
    return isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__.startswith(module)


def list_parts(kind: Any) -> Iterator[Any]:
    """Yield the types of which a type is made, without the names in a mapping, and what they declare."""
    if typing.get_origin(kind) in (typing.Annotated, typing.Literal):
        return
    arguments = typing.get_args(kind)
    for part in arguments[1:] if typing.get_origin(kind) is collections.abc.Mapping else arguments:
        yield part
        yield from list_parts(part)


def list_undeclared(cls: type) -> list[str]:
    fields = [f for f in dataclasses.fields(cls) if f.init and not f.metadata.get("words")]
    kinds = {f.name: typing.get_type_hints(cls, include_extras=True)[f.name] for f in fields}
    return [name for name, kind in kinds.items() if {str, Any} & {kind, *list_parts(kind)}]


def test_every_setting_that_holds_text_declares_what_it_is() -> None:
    schemas = list_schemas()
    undeclared = [f"{c.__module__}.{c.__name__}.{name}" for c in schemas for name in list_undeclared(c)]
    assert undeclared == [], "declare them with a type of titan.config.text_kinds"
    assert len(schemas) > 55


@dataclass(frozen=True)
class Forgetful:
    command: str = setting("x")
    commands: Mapping[str, tuple[str, ...]] | None = setting(None)
    options: Mapping[str, Any] | None = setting(None)
    mixed: tuple[Label | Code, ...] = setting(())
    title: Label | None = setting(None)
    size: int | str = setting("auto", words=("auto",))


def test_what_declares_nothing_is_named_and_counts_as_code() -> None:
    assert list_undeclared(Forgetful) == ["command", "commands", "options"]
    names = [field.name for field in dataclasses.fields(Forgetful)]
    kinds = {name: max(list_kinds(Forgetful, [name])) for name in names}
    code = dict.fromkeys(["command", "commands", "options", "mixed"], TextKind.CODE)
    assert kinds == code | {"title": TextKind.LABEL, "size": TextKind.PLAIN}


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("model.dim", TextKind.PLAIN),
        ("optimizer.groups.a.lr", TextKind.PLAIN),
        ("schedule._target_", TextKind.PLAIN),
        ("modules", TextKind.PLAIN),
        ("dataset.weights.a", TextKind.PLAIN),
        ("sweep.baseline.parallelism", TextKind.LABEL),
        ("parallelism.groups.a.match", TextKind.LABEL),
        ("dataset.sources.a.path", TextKind.READ),
        ("dataset.sources.a.sources.b.cache", TextKind.WRITTEN),
        ("hydra.sweeper.storage", TextKind.WRITTEN),
        ("hydra.run.dir", TextKind.RUN_FOLDER),
        ("metrics.trackers.a.tracking_uri", TextKind.ADDRESS),
        ("metrics.trackers.a.space", TextKind.ACCOUNT),
        ("optimizer.cls", TextKind.CLASS),
        ("optimizer.args.a", TextKind.OPEN),
        ("hooks.a.anything", TextKind.OPEN),
        ("dataset.unknown", TextKind.OPEN),
        ("hydra.sweeper.unknown", TextKind.OPEN),
        ("cluster.environment.A", TextKind.CODE),
        ("cluster.setup", TextKind.CODE),
        ("hydra.job.env_set.A", TextKind.CODE),
        ("hydra.launcher._target_", TextKind.CODE),
        ("hydra/launcher", TextKind.CODE),
        ("hydra.running", TextKind.CODE),
        ("hooks", TextKind.GROUP),
        ("recipe", TextKind.GROUP),
        ("metrics.trackers.a", TextKind.GROUP),
    ],
)
def test_the_kind_of_a_setting(key: str, kind: TextKind) -> None:
    assert find_kind(key) == kind
