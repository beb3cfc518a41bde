"""What the text of a setting is, which decides where it may come from (`titan.run.trust`). Free of torch.

A field declares it by its type, `path: Input | None`; what declares nothing counts as code. Numbers, `Literal` and
texts that `setting(words=...)` lists need nothing.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import typing
from collections.abc import Iterator, Sequence
from enum import IntEnum, auto
from typing import Annotated, Any, Literal


class TextKind(IntEnum):
    """What the text of a setting is; where classes differ, the larger one counts."""

    PLAIN = auto()  # a number, a choice, or a text that is checked elsewhere
    LABEL = auto()  # a text that nothing opens, such as a name, a key or a pattern
    READ = auto()  # a file, a folder or a name on the hub that is read
    GROUP = auto()  # several settings, whose choice has a name
    RUN_FOLDER = auto()  # a folder that is written, of a run or a sweep: one below the current folder needs no trust
    WRITTEN = auto()  # a file or a folder that is written
    ADDRESS = auto()  # where data are sent
    ACCOUNT = auto()  # whose account is used or gets data
    OPEN = auto()  # a value for code of others: a number, or a text that may be anything
    CLASS = auto()  # a class, by the path from which it is imported
    CODE = auto()  # a command, an environment, options of programs, or a path to code


Package = Annotated[str, TextKind.PLAIN]  # checked by titan.config.modules
Label = Annotated[str, TextKind.LABEL]
Input = Annotated[str, TextKind.READ]
RunFolder = Annotated[str, TextKind.RUN_FOLDER]
Output = Annotated[str, TextKind.WRITTEN]
Address = Annotated[str, TextKind.ADDRESS]
Account = Annotated[str, TextKind.ACCOUNT]
OpenValue = Annotated[Any, TextKind.OPEN]
ImportPath = Annotated[str, TextKind.CLASS]
Code = Annotated[str, TextKind.CODE]


def list_kinds(kind: Any, names: Sequence[str] = ()) -> Iterator[TextKind]:
    """Yield what a setting may be: one value for each of titan's classes that has it, and for each part of its type.

    Args:
        kind: a schema, or the type of a setting with what it declares.
        names: those of the setting below that.
    """
    arguments = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not names:
            yield TextKind.GROUP
        for cls in list_classes(kind) if names else ():
            field = next((field for field in dataclasses.fields(cls) if field.name == names[0]), None)
            if names[0] == "_target_" or (field is not None and field.metadata.get("words")):
                yield TextKind.PLAIN  # classes are checked elsewhere: `titan.config.settings.check_targets`
            elif field is not None:
                yield from list_kinds(typing.get_type_hints(cls, include_extras=True)[names[0]], names[1:])
    elif typing.get_origin(kind) is Annotated:
        yield kind.__metadata__[0]
    elif typing.get_origin(kind) is collections.abc.Mapping:
        yield from list_kinds(arguments[1], names[1:])
    elif typing.get_origin(kind) is not Literal and arguments:
        for argument in arguments:
            yield from list_kinds(argument, names)
    elif not names:
        yield TextKind.CODE if kind in (str, Any) else TextKind.PLAIN


def list_classes(schema: Any) -> list[Any]:
    """Return titan's classes that `_target_` may name where a schema is expected, as far as they are imported."""
    classes: list[Any] = [[cls for cls in schema.__mro__ if dataclasses.is_dataclass(cls)][-1]]
    for cls in classes:
        classes += [child for child in cls.__subclasses__() if child.__module__.startswith("titan.")]
    return list(dict.fromkeys(classes))
