"""Names in pages exist: dotted paths, links, and identifiers in backticks; test_docstrings.py has docstrings."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "experiments").rglob("*.md"))]
PRODUCT = ("titan", "launchers")
DOTTED = re.compile(r"(?<![\w./-])(?:titan|launchers|experiments|tests)(?:\.[A-Za-z_]\w*)+")
TICKED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\([^`]*\))?`(?!`)")
WORD = re.compile(r"[A-Za-z_]\w*")
COMPOUND = re.compile(r"\w_\w|[a-z][A-Z]|^_")
"""Identifiers that are no English words: snake_case, CamelCase, private names."""
MLFLOW_TAGS = {"titan.run_id", "titan.attempt", "titan.group", "titan.attempt_2.training.steps"}
NO_MODULES = {"titan.plugins", "titan.COMMAND", *MLFLOW_TAGS}
"""Dotted names that are no modules: the group of entry points, a placeholder, and tags."""
FOREIGN_NAMES = {
    "FileSystemBase", "TORCH_FR_BUFFER_SIZE", "donated_buffer", "record_stream", "AutoTokenizer", "from_pretrained",
    "apply_scaling", "FullModelHFCheckpointer", "max_filename", "to_yaml", "load_sweep_config",
    "preempt_send_user_signal", "ExcNodeList", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD",
    *MLFLOW_TAGS,
}  # fmt: skip
"""Names that no code of titan has: of torch, transformers, Meta's release, torchtune, Hydra, Slurm and MLflow."""
FOREIGN_PAGES = {"from_torchtitan", "extending"}
"""Pages with names of another program, and with their own code."""
DOCSTRING, COMMENT = re.compile(r'r?"""(.*?)"""', re.DOTALL), re.compile(r"  # .*")
DATA = ("conf/**/*.yaml", "titan/**/*.json", "titan/**/*.jinja", "titan/**/*.csv", "Makefile", "pyproject.toml")
OWN_CODE = re.compile(r"^## Your own .*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def list_files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


@cache
def collect_code_names() -> frozenset[str]:
    """Return the words of the code without docstrings and comments, also of benchmarks, of files, and of `conf/`."""
    modules = list_files(*PRODUCT, "experiments", "tests/measure")
    texts = [COMMENT.sub("", DOCSTRING.sub("", file.read_text(encoding="utf-8"))) for file in modules]
    data = [file for pattern in DATA for file in ROOT.glob(pattern)]
    texts += [file.read_text(encoding="utf-8") for file in data]
    paths = [file.relative_to(ROOT).with_suffix("") for file in (*modules, *list_files("tests"), *data)]
    return frozenset(FOREIGN_NAMES.union(*map(WORD.findall, texts), *(path.parts for path in paths)))


def list_members(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Return what a module or class binds at its top, by name; attributes that methods set on `self` too."""
    members: dict[str, ast.AST] = {}
    for node in body:
        for child in ast.walk(node) if not isinstance(node, ast.ClassDef) else [node]:
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                members[child.name] = child
            elif isinstance(child, ast.alias):
                members[(child.asname or child.name).split(".")[0]] = child
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                members[child.id] = child
            elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
                members[child.attr] = child
    return members


def is_path(dotted: str) -> bool:
    """Return whether a dotted path names a module, or something in one."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:end])
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if file.is_file():
            return has_member(parse(file), parts[end:])
        if folder.is_dir():
            return end == len(parts)
    return False


def has_member(owner: ast.AST, names: list[str]) -> bool:
    """Return whether a module or class has a member of a member ...; of names that are imported, all members."""
    if not names or not isinstance(owner, (ast.Module, ast.ClassDef)):
        return True
    member = list_members(owner.body).get(names[0])
    inherits = isinstance(owner, ast.ClassDef) and bool(owner.bases)
    return inherits if member is None else has_member(member, names[1:])


def find_wrong_paths(text: str) -> list[str]:
    return [path for path in DOTTED.findall(text) if path not in NO_MODULES and not is_path(path)]


def find_unknown_names(text: str, known: frozenset[str]) -> list[str]:
    """Return the identifiers in backticks of which no code has a part."""
    names = [name for name in TICKED.findall(text) if COMPOUND.search(name)]
    parts = {name: [part for part in name.split(".") if COMPOUND.search(part)] for name in names}
    return [name for name in names if name not in known and not known.issuperset(parts[name])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert find_wrong_paths(text) == []
    if page.stem not in FOREIGN_PAGES:
        assert find_unknown_names(OWN_CODE.sub("", FENCE.sub("", text)), collect_code_names()) == []


def list_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in list_anchors(target))):
            broken.append(link)
    assert not broken


def test_what_no_code_has_is_found() -> None:
    assert find_wrong_paths("see titan.run.attempts.no_such_thing and titan.no_such_module, titan.train") == [
        "titan.run.attempts.no_such_thing",
        "titan.no_such_module",
    ]
    known = frozenset({"read_manifest", "ConfigError"})
    assert find_unknown_names("`read_manifest()`, `ConfigError`, `word`, `_listed`, `CorruptThing`", known) == [
        "_listed",
        "CorruptThing",
    ]
