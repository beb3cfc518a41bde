"""The example of docs/running.md works as it stands, and docs/architecture.md is up to date."""

from __future__ import annotations

import re
from graphlib import CycleError
from pathlib import Path

import pytest

from tests.support import import_graph
from tests.support.runs import TINY

DOCS = Path(__file__).resolve().parents[1] / "docs"
SMALL = [o for o in TINY if not o.startswith(("dataset", "model.vocab", "optimizer", "schedule", "hydra.run.dir"))]


@pytest.mark.full
def test_the_api_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("titan.api")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "running.md").read_text(), flags=re.DOTALL)
    code = re.sub(r'"model=debug"', ", ".join(map(repr, SMALL)), "\n".join(blocks))
    names: dict[str, object] = {}
    exec(compile(code, "docs/running.md", "exec"), names)
    assert len(names["findings"].variants) == 2  # type: ignore[attr-defined]
    assert len(names["saved"].metrics["loss"]) == 10  # type: ignore[attr-defined]


@pytest.mark.full
def test_the_diagram_of_packages_is_up_to_date() -> None:
    text = import_graph.PAGE.read_text()
    assert import_graph.update_page(text) == text, "run python -m tests.support.import_graph"


def test_the_diagram_leaves_out_what_follows() -> None:
    edges = {"a": frozenset({"b", "c"}), "b": frozenset({"c"}), "c": frozenset()}
    lines = import_graph.format_diagram(edges).splitlines()
    assert lines == ["```mermaid", "flowchart TD", "  a --> b", "  b --> c", "```"]
    assert import_graph.sort_layers(edges | {"d": frozenset({"c"})}) == [["a"], ["b", "d"], ["c"]]


def test_packages_that_import_each_other_are_rejected() -> None:
    edges = {"a": frozenset({"b"}), "b": frozenset({"a"})}
    with pytest.raises(CycleError):
        import_graph.format_diagram(edges)
