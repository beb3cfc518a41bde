"""The graph of imports between packages, as a diagram and in layers: `python -m tests.support.import_graph`.

It rewrites both in docs/architecture.md between the markers. An arrow leads from a package to one that it
imports. Arrows that follow from others are left out (the transitive reduction), and so are imports for type checking
and imports of schemas, which any package may import.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"(<!-- import graph -->\n).*?(<!-- end of import graph -->)", re.DOTALL)
COMMANDS = "commands"

Graph = Mapping[str, frozenset[str]]


def list_modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the files of titan and launchers by module name."""
    module_files = {}
    for file in sorted(file for top in ("titan", "launchers") for file in (root / top).rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        module_files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return module_files


def list_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a module imports, also inside functions, but not for type checking only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from list_imports(node)


def find_package(name: str, packages: frozenset[str]) -> str:
    """Return the package of a dotted name of titan or launchers; modules at the top of titan are commands."""
    top, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    return top if top != "titan" else first if first in packages else COMMANDS


def build_graph(root: Path = ROOT) -> Graph:
    """Return for each package the others that it imports."""
    files = list_modules(root)
    packages = frozenset({name.split(".")[1] for name in files if name.count(".") > 1} | {"errors"})
    imports: dict[str, set[str]] = {}
    for module, file in files.items():
        names = [n for n in list_imports(ast.parse(file.read_text())) if n.split(".")[0] in ("titan", "launchers")]
        targets = {
            find_package(name, packages) for name in names if "schema" not in name.split(".")[2:] and "." in name
        }
        own_package = find_package(module, packages) if module != "titan" else "errors"
        imports.setdefault(own_package, set()).update(t for t in targets - {own_package} if t != COMMANDS)
    return {name: frozenset(targets) for name, targets in sorted(imports.items())}


def find_reachable(edges: Graph, start: str) -> frozenset[str]:
    """Return the packages that `start` imports, directly or through others."""
    reached: set[str] = set()
    todo = list(edges.get(start, ()))
    while todo:
        if (name := todo.pop()) not in reached:
            reached.add(name)
            todo += edges.get(name, ())
    return frozenset(reached)


def reduce_graph(edges: Graph) -> Graph:
    """Return the transitive reduction of a graph.

    Raises:
        graphlib.CycleError: when packages import each other in a circle.
    """
    TopologicalSorter(edges).prepare()
    return {
        name: frozenset(t for t in targets if not any(t in find_reachable(edges, sibling) for sibling in targets - {t}))
        for name, targets in edges.items()
    }


def format_diagram(edges: Graph) -> str:
    """Return the diagram in Mermaid's language, from commands down."""
    reduced = reduce_graph(edges)
    order = [*TopologicalSorter(edges).static_order()][::-1]
    lines = [f"  {name} --> {target}" for name in order for target in sorted(reduced.get(name, ()), key=order.index)]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```", ""])


def sort_layers(edges: Graph) -> list[list[str]]:
    """Return the packages by layer, the highest first; a package imports only from layers below its own."""
    sorter = TopologicalSorter(edges)
    sorter.prepare()
    groups: list[list[str]] = []
    while sorter.is_active():
        groups.insert(0, sorted(sorter.get_ready()))
        sorter.done(*groups[0])
    return groups


def update_page(text: str) -> str:
    """Return a page's text with the diagram and the layers made anew."""
    edges = build_graph()
    rows = "".join(f"| {i} | {', '.join(names)} |\n" for i, names in enumerate(sort_layers(edges), 1))
    new = f"{format_diagram(edges)}\n| layer | packages |\n| --- | --- |\n{rows}"
    return BLOCK.sub(lambda match: match[1] + new + match[2], text)


def main() -> int:
    """Rewrite the diagram in docs/architecture.md."""
    PAGE.write_text(update_page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
