"""Typed settings: what the schema of every axis is made of.

A schema is a frozen dataclass whose fields come from `setting(default, help, ...)`. `build` turns what Hydra
composed (plain dicts, lists and scalars) into instances of it, strictly: an unknown key, a wrong type or a value out
of range raises a `ConfigError`, a sentence that names the setting, its value and the way out.

Nothing here imports torch or Hydra, so that schemas stay cheap to load.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NoReturn

from titan.config.kinds import PATHS, describe_library
from titan.config.units import advise, find_unit, read_number
from titan.console.numbers import format_exact, shorten_exponent
from titan.console.text import escape, is_redacted
from titan.errors import ConfigError, UnknownSettingError, find_own_code_error

MISSING = "???"
"""OmegaConf's mark for a value that the user has to give."""

TESTS: dict[str, Callable[[float, float], bool]] = {
    "at_least": operator.ge,
    "at_most": operator.le,
    "above": operator.gt,
    "below": operator.lt,
}
"""The limits that a setting may declare, and what each requires of a number."""
LARGEST_NUMBERS: Mapping[type, float] = {int: 2**63 - 1, float: 1e30}
"""The largest absolute values that a setting without a `cap` accepts: those of 64-bit integers and of fp32."""
LARGE_FLOAT = 1e6
"""From here on people write a number with an exponent."""
MAX_TEXT_LENGTH = 4096
"""Most characters of a text: those of a path."""


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    science: bool | None = None,
    cap: float | None = None,
    words: tuple[str, ...] = (),
    unit: str = "",
    in_ids: bool = True,
    any_text: bool = False,
    later: bool = False,
    hashed: bool = True,
    **limits: float,
) -> Any:
    """Declare a field of a schema.

    Args:
        science: True when the field decides what is learned, False when only where and how fast; None: as its axis.
        cap: the largest plausible number; unlike `at_most` it follows from no property of the setting.
        words: texts that a field of type `int | str` or `float | str` accepts beside numbers, such as "auto".
        unit: what it counts, if its name and limits don't say it: "seconds", "powers" (32k may be 32,000 or 32,768).
        in_ids: False when no id depends on it: requests to a scheduler, and names of a run.
        any_text: whether a text may be empty, long and have several lines.
        later: whether files and digests leave it out while it has its default, as those from before it was added do.
        hashed: False where its values have no hash, as mappings, and instances of the schema need one.
        limits: of a number, by the names of `TESTS` (of each number, in a tuple).
    """
    limits = {name: limits[name] for name in sorted(limits, key=tuple(TESTS).index)}
    metadata = {
        "help": help, "science": science, "words": words, "unit": unit, "in_ids": in_ids, "limits": limits, "cap": cap,
        "any_text": any_text, "later": later,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata, hash=None if hashed else False)


def suggest_nearest(word: str, candidates: Iterable[str]) -> str:
    """Return the end of a sentence: "; did you mean 'x'?" with the known word nearest to `word`, or a full stop."""
    candidates, (group, _, name) = sorted(candidates), word.rpartition(".")
    # first a right name at the wrong place, `seed` for `training.seed`; then a name like it at the right place
    matches = [k for k in candidates if k.rpartition(".")[2] == name]
    siblings = {k.rpartition(".")[2]: k for k in candidates if k.rpartition(".")[0] == group}
    matches = matches or [siblings[k] for k in difflib.get_close_matches(name, siblings, n=1)]
    matches = matches or difflib.get_close_matches(word, candidates, n=1, cutoff=0.8)
    return f"; did you mean {matches[0]!r}?" if matches else "."


def suggest_pattern(pattern: str, names: Iterable[str]) -> str:
    """Return the end of a sentence as `suggest_nearest` does, for a pattern; after a `*`, the ends of names count."""
    names, tail = list(names), pattern.lstrip("*").lstrip(".")
    if not tail or not pattern.startswith("*"):
        return suggest_nearest(pattern, names)
    parts = tail.count(".") + 1
    tails = sorted({".".join(name.split(".")[-parts:]) for name in names})
    matches = difflib.get_close_matches(tail, tails, n=1)
    return f"; did you mean {pattern.removesuffix(tail) + matches[0]!r}?" if matches else "."


def build(cls: type, data: Any, path: str = "", allowed: tuple[str, ...] = ()) -> Any:
    """Return an instance of the schema `cls` for the composed mapping `data`.

    Args:
        cls: a dataclass; a `_target_` in `data` may name another one with a method `build` instead.
        allowed: packages whose classes `_target_` may name, beside titan and experiments.

    Raises:
        ConfigError: on an unknown key, a wrong type, a value out of range or a missing value.
    """
    if not isinstance(data, Mapping):
        expected = f"a group of settings; choose one of {path}'s choices instead"
        if "." in path:
            expected = f"names and values, such as {path}={{{_name_first_fields(cls, 1)}}}"
        raise ConfigError(f"{path}={format_value(data)}: expected {expected}.")
    data = dict(data)
    has_target = "_target_" in data
    if has_target and hasattr(cls, "build"):
        base = [ancestor for ancestor in cls.__mro__ if dataclasses.is_dataclass(ancestor)][-1]
        name = format_value(data.pop("_target_"))
        if not issubclass(cls := _import_target(name, path, allowed), base):
            base_path = f"{base.__module__}.{base.__qualname__}"
            raise ConfigError(f"{path}._target_={name}: is no {base_path}; derive it from that class.")
    values = build_fields(cls, data, path, allowed)
    if not has_target and _suggest_target(cls):
        raise ConfigError(f"{path}._target_ is missing: it names the class, such as mine.module.Class.")
    for name, (field, kind) in _list_fields(cls).items():
        if values.get(name, field.default) in (MISSING, dataclasses.MISSING):
            field_path, help_text = _join_path(path, name), field.metadata.get("help") or "a value is needed"
            is_plain = get_value_schema(kind) is None
            way_out = f"{field_path}=VALUE" if is_plain else f"+{path}@{field_path}.NAME=CHOICE"
            raise ConfigError(f"{field_path} is missing: {help_text}; give it as {way_out}.")
    return cls(**values)


def build_fields(cls: type, data: Mapping[str, Any], path: str = "", allowed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the values of those fields of the schema `cls` that `data` has; see `build`."""
    fields = _list_fields(cls)
    names = [_join_path(path, name) for name in fields]
    for key in data:
        if key not in fields:
            raise _build_unknown_error(cls, _join_path(path, str(key)), data[key], names)
    values: dict[str, Any] = {}
    # third-party code is imported after everything else is checked
    for name, value in sorted(data.items(), key=lambda item: is_foreign(item[1])):
        field_path, (field, kind) = _join_path(path, name.rstrip("_")), fields[name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and value != MISSING:
            values[name] = build(kind, value, field_path, allowed)
        elif (nested := get_value_schema(kind)) is not None and isinstance(value, Mapping):
            for key in value:  # names that the user chooses, whose order stays
                check_text(str(key), f"{field_path}.{key}")
            parts = sorted(value.items(), key=lambda item: is_foreign(item[1]))
            built = {key: build(nested, part, _join_path(field_path, str(key)), allowed) for key, part in parts}
            values[name] = {str(key): built[key] for key in value}
        else:
            values[name] = _check_value(value, kind, field, field_path, names)
    return values


def _build_unknown_error(cls: type, path: str, value: Any, names: Iterable[str]) -> UnknownSettingError:
    """Return the error for a setting that a schema has not; of a single setting in a group, with its whole name."""
    hint = f"{suggest_nearest(path, names)}{_suggest_target(cls)}"
    while isinstance(value, Mapping) and len(value) == 1 and "_target_" not in value:
        ((name, value),) = value.items()
        path = _join_path(path, str(name))
    typed = f"{path}={format_value(value)}"
    return UnknownSettingError(f"{typed}: there is no such setting{hint}", typed, path, hint)


def _name_first_fields(cls: type, count: int = 2) -> str:
    if _suggest_target(cls):
        return "_target_:MODULE.CLASS"
    return ",".join(f"{name}:VALUE" for name in list(_list_fields(cls))[:count])


def _suggest_target(cls: type) -> str:
    """Return a sentence for settings of a class that was not named."""
    abstract = getattr(getattr(cls, "build", None), "__isabstractmethod__", False)
    return " A class of your own is named by _target_." if abstract else ""


@functools.cache
def _list_fields(cls: type) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Return a schema's fields with their types, read once: each composition asks for those of all schemas."""
    kinds = typing.get_type_hints(cls)
    return {field.name: (field, kinds[field.name]) for field in dataclasses.fields(cls) if field.init}


def check_targets(data: Any, allowed: tuple[str, ...], path: str = "") -> None:
    """Raise ConfigError for a forbidden `_target_` in composed `data`, before any of them is imported."""
    if isinstance(data, Mapping):
        if isinstance(name := data.get("_target_"), str):
            _check_target(name, path, allowed)
        for key, value in data.items():
            check_targets(value, allowed, _join_path(path, str(key)))


def is_foreign(data: Any) -> bool:
    """Return whether composed `data` names a class of another package than titan, which building it imports."""
    if not isinstance(data, Mapping):
        return False
    name = data.get("_target_")
    return (isinstance(name, str) and not name.startswith("titan.")) or any(map(is_foreign, data.values()))


def get_value_schema(kind: Any) -> Any:
    """Return the schema of the values of a mapping (or null); None where `kind` is not a mapping of schemas."""
    arguments = [argument for argument in typing.get_args(kind) if argument is not type(None)]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return get_value_schema(arguments[0]) if len(arguments) == 1 else None
    is_mapping = typing.get_origin(kind) is collections.abc.Mapping and dataclasses.is_dataclass(arguments[1])
    return arguments[1] if is_mapping else None


def collect_defaults(cls: type) -> dict[str, Any]:
    """Return the schema's default values as plain containers, nested schemas included."""
    out: dict[str, Any] = {}
    for name, (field, kind) in _list_fields(cls).items():
        out[name] = list(field.default) if isinstance(field.default, tuple) else field.default
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            out[name] = collect_defaults(kind)
    return out


def to_plain(value: Any) -> Any:
    """Return a schema's instance as plain containers, for JSON and YAML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: to_plain(v) for f, v in pairs if not (f.metadata.get("later") and v == f.default)}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: to_plain(v) for k, v in value.items()}
    return value


def format_value(value: Any) -> str:
    """Return a value as a user types it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(format_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{format_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float) and ("e" in str(value) or abs(value) >= LARGE_FLOAT):
        return format_exact(value) or shorten_exponent(str(value))
    return str(value)


def format_setting(key: str, value: object) -> str:
    """Return KEY=VALUE for a message; the value alone for a command's first word, whose `key` is empty."""
    return f"{key}={value}" if key else str(value)


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _check_target(name: str, path: str, allowed: tuple[str, ...]) -> None:
    roots = ("titan", "experiments", *allowed)
    module, typed = name.rpartition(".")[0], f"{path}._target_={name}"
    if library := describe_library(name.partition(".")[0]):
        raise ConfigError(f"{typed}: {library}; name a dataclass of yours with a method build (docs/extending.md).")
    if not module:
        raise ConfigError(f"{typed}: names no module; write MODULE.CLASS, such as mine.module.Class.")
    if not any(module == root or module.startswith(root + ".") for root in roots):
        raise ConfigError(
            f"{typed}: only classes under {', '.join(roots)} may be named; "
            f"if you trust this one, add modules=[{module.partition('.')[0]}]."
        )


def _import_target(name: str, path: str, allowed: tuple[str, ...]) -> type:
    _check_target(name, path, allowed)
    module, _, attribute = PATHS.get(name, name).rpartition(".")
    typed = f"{path}._target_={name}"
    try:
        imported = importlib.import_module(module)
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{typed}: no such class ({error}); correct the name.") from error
        reason = find_own_code_error(error) or f"{type(error).__name__}: {error}"
        raise ConfigError(f"{typed}: importing {module} failed: {reason}; correct it.") from error
    cls = getattr(imported, attribute, None)
    if cls is None:
        raise ConfigError(
            f"{typed}: no such class (module {module!r} has no attribute {attribute!r}); correct the name."
        )
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and hasattr(cls, "build")):
        raise ConfigError(f"{typed}: must be a dataclass with a method build; name another class.")
    if inspect.get_annotations(cls) and "__dataclass_fields__" not in vars(cls):
        raise ConfigError(f"{typed}: is no dataclass; decorate it with @dataclass(frozen=True, kw_only=True).")
    is_own = not cls.__module__.startswith("titan.")  # titan's datasets of several sources are built elsewhere
    if is_own and getattr(cls.build, "__isabstractmethod__", False):
        raise ConfigError(f"{typed}: has no method build; define it.")
    return cls


def _check_value(value: Any, kind: Any, field: dataclasses.Field[Any], path: str, siblings: Iterable[str] = ()) -> Any:
    if value == MISSING:
        return MISSING
    words, limits = field.metadata.get("words", ()), field.metadata.get("limits", {})
    unit = find_unit(field.name, field.metadata.get("unit", ""), limits)
    try:
        converted = _convert_value(value, kind, path, words, unit)
    except ConfigError as error:
        if ": expected " not in str(error):
            raise
        texts = (text for text in _iterate_scalars(value) if isinstance(text, str))
        advice = next(filter(None, (advise(text, unit, siblings) for text in texts)), "")
        meaning = f" ({field.metadata['help']})" if field.metadata.get("help") else ""  # which has its unit
        raise ConfigError(f"{str(error).rstrip('.')}{advice}{meaning}.") from None
    for problem in _iterate_problems(converted, field.metadata, limits, words):
        raise ConfigError(f"{path}={format_value(value)}: {problem}")
    return converted


def _iterate_problems(
    value: Any, metadata: Mapping[str, Any], limits: Mapping[str, float], words: tuple[str, ...]
) -> Iterator[str]:
    """Yield what is wrong with a setting's value: numbers out of range, and texts that can't be one."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            is_within = all(TESTS[name](number, limit) for name, limit in limits.items())
            if not (is_within and math.isfinite(number)):
                yield f"must be {_describe_limits(number, limits, words)}."
    for scalar in _iterate_scalars(value):
        if isinstance(scalar, str):
            yield from filter(None, [find_text_problem(scalar, any_text=metadata.get("any_text", False))])
        elif isinstance(scalar, (int, float)) and not isinstance(scalar, bool):
            cap = metadata.get("cap") or LARGEST_NUMBERS[type(scalar)]
            if not math.isfinite(scalar):
                yield "must be a finite number."
            if abs(scalar) > cap:
                yield f"must be at {'most ' if scalar > 0 else 'least -'}{_format_number(cap)}."


def _iterate_scalars(value: Any) -> Iterator[Any]:
    """Yield the numbers and texts in a setting's value, at any depth."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, (list, tuple)):
        yield value
        return
    for element in value:
        yield from _iterate_scalars(element)


def check_text(text: str, typed: str) -> None:
    """Raise ConfigError for a text that can't be a name, a path or a word of a script, and for a redacted URL."""
    if problem := find_text_problem(text):
        raise ConfigError(f"{typed}: {problem}")


def find_text_problem(text: str, *, any_text: bool = False) -> str:
    """Return why a text can't be a name, a path or a word of a script, or is a redacted URL; empty where it can.

    Args:
        any_text: whether it may be empty, long and have several lines.
    """
    if "\0" in text:
        return "holds a zero byte; leave it out."
    if any_text:
        return ""
    if not text.strip():
        return "is empty; give a value, or leave it out."
    if escape(text) != text or not text.isprintable():
        return "has a control character or a line break in it; take it out."
    if is_redacted(text):
        return "*** stands for a secret that titan did not record; give the whole URL."
    too_long = f"has {len(text):,} characters; give {MAX_TEXT_LENGTH:,} at most."
    return too_long if len(text) > MAX_TEXT_LENGTH else ""


def _convert_value(value: Any, kind: Any, path: str, words: tuple[str, ...], unit: str) -> Any:
    """Return `value` as the type `kind`, or raise ConfigError; only lossless conversions."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments, path, words, unit)
    if origin is Literal:
        typed = {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # as YAML reads a bare one
        if typed in arguments:
            return typed
        choices = ", ".join(map(str, arguments))
        word = "cuda" if value == "gpu" else str(value).lower()
        raise ConfigError(
            f"{path}={format_value(value)}: choose one of {choices}{suggest_nearest(word, map(str, arguments))}"
        )
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            _reject_type(value, f"a list, such as {path}=[a,b]", path)
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(value) != len(kinds):
            _reject_type(value, f"a list of {len(kinds)} values", path)
        return tuple(_convert_value(v, k, path, (), unit) for v, k in zip(value, kinds, strict=True))
    if origin is collections.abc.Mapping:
        return _convert_mapping(value, arguments, path, unit)
    if kind is Any or (kind is bool and isinstance(value, bool)):
        return value
    if kind in (int, float) and isinstance(value, str) and isinstance(number := read_number(value, unit), (int, kind)):
        return kind(number)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and (kind in (float, str) or (kind is int and (isinstance(value, int) or value.is_integer()))):
        return kind(value)
    if kind is str and isinstance(value, str):
        return str(value)
    _reject_type(value, {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind], path)


def _convert_union(value: Any, kinds: tuple[Any, ...], path: str, words: tuple[str, ...], unit: str) -> Any:
    optional = type(None) in kinds
    if value is None and optional:
        return None
    if isinstance(value, str) and words:
        if value in words:
            return value
        if read_number(value, unit) is None or bool in kinds:
            _reject_type(value, f"{'true, false' if bool in kinds else 'a number'} or {' or '.join(words)}", path)
    *kinds_before, last = (k for k in kinds if k is not type(None) and not (k is str and words))
    for kind in kinds_before:
        with contextlib.suppress(ConfigError):
            return _convert_value(value, kind, path, (), unit)
    try:
        return _convert_value(value, last, path, (), unit)
    except ConfigError as error:
        raise ConfigError(f"{str(error).rstrip('.')} or null." if optional else str(error)) from None


def _convert_mapping(value: Any, kinds: tuple[Any, ...], path: str, unit: str) -> dict[Any, Any]:
    key_kind, value_kind = kinds
    if not isinstance(value, Mapping):
        example = f"names and values, such as {path}={{a:1,b:2}}"
        if isinstance(value_kind, type) and dataclasses.is_dataclass(value_kind):
            example = f"names and their settings, such as +{path}.NAME={{{_name_first_fields(value_kind)}}}"
        _reject_type(value, example, path)
    return {
        _convert_value(k, key_kind, path, (), unit): _convert_value(v, value_kind, _join_path(path, str(k)), (), unit)
        for k, v in value.items()
    }


def _reject_type(value: Any, expected: str, path: str) -> NoReturn:
    advice = ""
    if isinstance(value, (list, tuple)) and "such as" not in expected and "list" not in expected:
        advice = "; the values of a sweep (-m) have no brackets"
    raise ConfigError(f"{path}={format_value(value)}: expected {expected}{advice}.")


def _describe_limits(value: float, limits: Mapping[str, float], words: tuple[str, ...]) -> str:
    """Return what a number that is out of range must be."""
    expected = " and ".join(f"{name.replace('_', ' ')} {_format_number(limit)}" for name, limit in limits.items())
    expected += " and finite" if limits and not math.isfinite(value) else ""
    expected, word_text = expected or "a finite number", " or ".join(words)
    if word_text:
        expected = f"{word_text}, or {expected}" if len(limits) > 1 else f"{expected} or {word_text}"
    return expected


def _format_number(value: float) -> str:
    is_whole = isinstance(value, int) or (value == int(value) and value < 1e15)
    return str(int(value)) if is_whole else shorten_exponent(f"{value:g}")
