"""Docstrings name what the code has: what neither pydoclint nor ruff can tell."""

import ast
import builtins
import gc
import keyword
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_doc_names import find_wrong_paths

ROOT = Path(__file__).resolve().parents[1]
PATHS = [path.relative_to(ROOT) for top in ("titan", "launchers") for path in sorted((ROOT / top).rglob("*.py"))]
FILES = {str(path): (ROOT / path).read_text() for path in PATHS}
BUILTINS = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
OUTSIDE = {
    "FileSystemBase", "apply_scaling", "donated_buffer", "filelock", "load_sweep_config", "theirs", "to_yaml", "x1b",
    "titan.plugins",
}  # fmt: skip
"""Names of other libraries that titan does not import, of examples, and a group of entry points."""

Documented = tuple[str, ast.FunctionDef | ast.ClassDef, list[str]]


@cache
def list_nodes() -> dict[type[ast.AST], list[tuple[str, ast.AST]]]:
    """Return the nodes of all files by their type, each with its file."""
    nodes: dict[type[ast.AST], list[tuple[str, ast.AST]]] = {}
    gc.disable()  # two thirds of the time: a million objects, none of them garbage
    for path, text in FILES.items():
        for node in ast.walk(ast.parse(text)):
            nodes.setdefault(type(node), []).append((path, node))
    gc.enable()
    return nodes


@cache
def list_bases() -> dict[str, set[str]]:
    """Return the names of a class's bases, by the class's name; classes with the same name count as one."""
    bases: dict[str, set[str]] = {}
    for _, node in list_nodes()[ast.ClassDef]:
        bases.setdefault(node.name, set()).update(ast.unparse(base).split(".")[-1] for base in node.bases)
    return bases


def list_ancestors(name: str) -> set[str]:
    builtin = {base.__name__ for base in BUILTINS[name].__mro__} if name in BUILTINS else set()
    return {name} | builtin | {a for base in list_bases().get(name, ()) if base != name for a in list_ancestors(base)}


@cache
def list_members() -> dict[str, set[str]]:
    """Return the names that a class defines or assigns, by the class's name."""
    members: dict[str, set[str]] = {}
    for _, node in list_nodes()[ast.ClassDef]:
        for part in ast.walk(node):
            if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
                members.setdefault(node.name, set()).add(part.id if isinstance(part, ast.Name) else part.attr)
            elif isinstance(part, ast.FunctionDef):
                members.setdefault(node.name, set()).add(part.name)
    return members


def has_member(owner: str, name: str) -> bool:
    return any(name in list_members().get(ancestor, ()) for ancestor in list_ancestors(owner))


@cache
def list_imported_exceptions() -> set[str]:
    names = {alias.name for _, node in list_nodes()[ast.ImportFrom] for alias in node.names}
    return {name for name in names if name.endswith(("Error", "Exception"))}


def is_exception(name: str) -> bool:
    return "BaseException" in list_ancestors(name) or name in list_imported_exceptions()


def list_documented(section: str) -> Iterator[Documented]:
    """Yield the position, the function or class, and the names of each section of docstrings."""
    for path, node in list_nodes()[ast.FunctionDef] + list_nodes()[ast.ClassDef]:
        body = re.search(rf"^{section}:\n((?:    .*\n?|\n)*)", ast.get_docstring(node) or "", re.M)
        if body:
            yield f"{path}:{node.lineno} {node.name}", node, re.findall(r"^    (\S[^:\n]*):", body[1], re.M)


def list_raised(node: ast.AST) -> set[str]:
    """Return the exceptions that a statement raises, without those within a `try` that may catch them."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return {name for name in [ast.unparse(node.exc.func).split(".")[-1]] if is_exception(name)}
    caught = node.body if isinstance(node, ast.Try) and node.handlers else []
    inner = [part for part in ast.iter_child_nodes(node) if part not in caught]
    return {
        name for part in inner if not isinstance(part, ast.FunctionDef | ast.ClassDef) for name in list_raised(part)
    }


def list_docs() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of modules, classes, functions and attributes, each with its position."""
    for path, node in list_nodes()[ast.Expr]:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield f"{path}:{node.lineno}", node.value.value


@cache
def list_words() -> set[str]:
    """Return the words of code, of the names of its files, and of configuration."""
    docstrings = {text for _, text in list_docs()}
    texts = {node.value for _, node in list_nodes()[ast.Constant] if isinstance(node.value, str)} - docstrings
    texts |= {str(path.with_suffix("")) for path in [*PATHS, *(ROOT / "conf").rglob("*.yaml")]}
    texts |= {path.read_text() for path in (ROOT / "conf").rglob("*.yaml")}
    texts |= {value for nodes in list_nodes().values() for _, node in nodes for value in list_names(node)}
    return {*dir(builtins), *keyword.kwlist, *OUTSIDE, *re.findall(r"\w+", " ".join(texts))}


def list_names(node: ast.AST) -> list[str]:
    return [value for key in ("id", "attr", "arg", "name") if isinstance(value := getattr(node, key, None), str)]


def find_unknown(text: str) -> str | None:
    """Return the first name in a text in backticks that the code does not have; names in capitals stand for others."""
    if paths := find_wrong_paths(text):
        return paths[0]
    member = re.fullmatch(r"(_?[A-Z]\w+)\.(\w+)(?:\(.*\))?", text)
    if member and member[1] in list_bases() and not has_member(member[1], member[2]):
        return member[0]
    names = (name for name in re.findall(r"[A-Za-z_]\w*", text) if not name.isupper())
    return next((name for name in names if name not in list_words()), None)


def test_documented_exceptions_are_exceptions() -> None:
    assert not [(at, name) for at, _, names in list_documented("Raises") for name in names if not is_exception(name)]


def test_a_function_documents_the_exceptions_that_it_raises() -> None:
    """Where it has a section about exceptions."""
    missing = [
        (at, name)
        for at, node, names in list_documented("Raises")
        if isinstance(node, ast.FunctionDef)
        for part in node.body
        for name in list_raised(part)
        if not list_ancestors(name) & set(names)
    ]
    assert not missing


def test_documented_attributes_exist() -> None:
    """pydoclint checks that all attributes of a dataclass are documented."""
    unknown = [
        (at, name)
        for at, node, names in list_documented("Attributes")
        for name in names
        if not has_member(node.name, name)
    ]
    assert not unknown


def test_names_in_docstrings_exist() -> None:
    texts = [(at, text) for at, docstring in list_docs() for text in re.findall(r"`([^`\n]+)`", docstring)]
    assert not [(at, name) for at, text in texts if (name := find_unknown(text)) is not None]
    assert not [(at, path) for at, docstring in list_docs() for path in find_wrong_paths(docstring)]


@pytest.mark.parametrize(
    "text, unknown",
    [
        ("titan.errors.ConfigError", None),
        ("titan.errors.NoSuchError", "titan.errors.NoSuchError"),
        ("titan.no_such_module", "titan.no_such_module"),
        ("RankInfo.no_such_field", "RankInfo.no_such_field"),
        ("no_such_name()", "no_such_name"),
        ("checkpoint.resume=DIRECTORY", None),
    ],
)
def test_a_name_that_no_code_has_is_reported(text: str, unknown: str | None) -> None:
    assert find_unknown(text) == unknown
