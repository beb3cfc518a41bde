"""The lines of titan that only a CUDA device executes, and the names of torch that they use; found in the sources.

A line counts where a test on the device guards it (`device.type == "cuda"`, `on_gpu`, `is_cuda`), or where it uses
torch.cuda. `python -m tests.rehearsal.surface` prints all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.rehearsal import watch

ON_DEVICE = {"on_gpu", "is_cuda"}
NEED_KERNELS = {
    "titan/model/attention.py": {"_choose_flex"},
    "titan/precision/low_precision.py": {"_has_kernel", "_multiply_experts"},
}
"""Functions whose lines need a kernel of a GPU: FlexAttention, and matmuls of float8 experts."""


@dataclass
class Surface:
    """What one file has for CUDA.

    Attributes:
        lines: the numbers of lines that only CUDA executes.
        kernels: those of them that need a GPU's kernel.
        names: uses of torch.cuda and torch._C, with their lines.
    """

    lines: set[int] = field(default_factory=set)
    kernels: set[int] = field(default_factory=set)
    names: set[tuple[str, int]] = field(default_factory=set)


def format_dotted(node: ast.AST) -> str:
    """Return an expression such as torch.cuda.Event as text; empty for others."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def asks_for_cuda(test: ast.AST) -> bool | None:
    """Return whether a test holds on CUDA only (True), holds elsewhere only (False), or asks for neither (None)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = asks_for_cuda(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        results = set(map(asks_for_cuda, test.values))
        sure = isinstance(test.op, ast.And)  # one that holds on CUDA only is enough for `and`
        return sure if sure in results else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compares_device(test)
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return True if name in ON_DEVICE else None


def _compares_device(test: ast.Compare) -> bool | None:
    sides = [test.left, *test.comparators]
    constants = {side.value for side in sides if isinstance(side, ast.Constant)}
    equal = isinstance(test.ops[0], ast.Eq)
    if "cuda" in constants:
        return equal
    on_device = any("device" in format_dotted(side) for side in sides)
    return not equal if "cpu" in constants and on_device else None


class _Finder(ast.NodeVisitor):
    """Collects a file's surface."""

    def __init__(self, file: str) -> None:
        self.surface, self.functions = Surface(), list[str]()
        self.kernels = NEED_KERNELS.get(file, set())

    def add_lines(self, lines: set[int]) -> None:
        self.surface.lines |= lines
        if self.kernels & set(self.functions):
            self.surface.kernels |= lines

    def visit(self, node: ast.AST) -> None:
        """Visit a node, with what encloses it known."""
        scope = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.functions.append(node.name)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                self._visit_block(block)
        super().visit(node)
        if scope:
            self.functions.pop()

    def _visit_block(self, block: list[ast.stmt]) -> None:
        for index, statement in enumerate(block):
            if not isinstance(statement, ast.If):
                continue
            on_cuda = asks_for_cuda(statement.test)
            if on_cuda is True:
                self.add_lines(_collect_lines(statement.body))
            elif on_cuda is False:
                leaves = isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue)
                self.add_lines(_collect_lines([*statement.orelse, *(block[index + 1 :] if leaves else [])]))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Add the line of an expression that asks for the device."""
        if asks_for_cuda(node.test) is not None:
            self.add_lines({node.lineno})
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Add the use of a name of torch, whatever torch._C is called."""
        name = format_dotted(node)
        private = node.attr.startswith("_cuda")
        if name.startswith(("torch.cuda.", "torch._C.")) or private:
            self.surface.names.add((f"torch._C.{node.attr}" if private else name, node.lineno))
        if name.startswith("torch.cuda.") or private:
            self.add_lines({node.lineno})
        self.generic_visit(node)


def _collect_lines(statements: Sequence[ast.stmt]) -> set[int]:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.lineno for node in nodes if isinstance(node, ast.stmt | ast.ExceptHandler)}


@cache
def find_surfaces(root: Path) -> dict[str, Surface]:
    """Return the surface of each file below titan/ that has one, by its name from the repository's root."""
    surface_by_file = {}
    for path in sorted((root / "titan").rglob("*.py")):
        file = str(path.relative_to(root))
        finder = _Finder(file)
        finder.visit(ast.parse(path.read_text()))
        if finder.surface.lines or finder.surface.names:
            surface_by_file[file] = finder.surface
    return surface_by_file


def list_cuda_lines(root: Path) -> dict[str, list[int]]:
    """Return the lines to follow, by file."""
    return {file: sorted(surface.lines) for file, surface in find_surfaces(root).items() if surface.lines}


def list_used_names(root: Path) -> dict[str, list[str]]:
    """Return the names of torch.cuda and torch._C that titan uses, with the places that do."""
    uses: dict[str, list[str]] = {}
    for file, surface in find_surfaces(root).items():
        for name, line in sorted(surface.names):
            uses.setdefault(name, []).append(f"{file}:{line}")
    return uses


def format_report(root: Path, executed: Sequence[dict[str, set[int]]], full: bool = True) -> str:
    """Return how many of the lines ran, and the others by file.

    Args:
        root: the repository.
        executed: lines by file, of each command.
        full: whether all commands ran, so that the others are worth a list.
    """
    ran = {(file, line) for lines in executed for file, numbers in lines.items() for line in numbers}
    everything = {(file, line) for file, lines in list_cuda_lines(root).items() for line in lines}
    kernels = {(file, line) for file, surface in find_surfaces(root).items() for line in surface.kernels}
    text = [f"lines that only CUDA executes: {len(everything)}, of which {len(everything & ran)} ran"]
    if full:
        text += [f"  needs a GPU's kernel: {location}" for location in _format_locations(kernels - ran)]
        text += [f"  did not run: {location}" for location in _format_locations(everything - ran - kernels)]
    return "\n".join(text)


def _format_locations(lines: set[tuple[str, int]]) -> Iterator[str]:
    for file in sorted({file for file, _ in lines}):
        yield f"{file}:{','.join(str(line) for name, line in sorted(lines) if name == file)}"


if __name__ == "__main__":
    print(format_report(watch.ROOT, []))
    for name, locations in list_used_names(watch.ROOT).items():
        print(name, *locations)
