"""Which parts of a model ran as compiled graphs, by calls of the graphs while a part runs.

torch shares graphs between equal parts, blocks, stages and builds of a process, so the calls of graphs are counted for
the whole process too; `GraphWatch` compares the counts before and after a step. The calls are counted by the part that
runs, and not by the part that a graph was compiled for: a backend for each part would keep torch from sharing them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import count
from typing import Any, NamedTuple

_NUMBERS = count()
_CALLS: Counter[tuple[GraphLabel, int]] = Counter()


class GraphLabel(NamedTuple):
    """What a graph is of.

    Attributes:
        kind: of block, as the model names it, or another part of the model; empty: all blocks are of one kind.
        part: of a block that is compiled in parts; empty: all of it.
    """

    kind: str = ""
    part: str = ""

    @property
    def name(self) -> str:
        """The kind in a word: of blocks of one's own, whose kind lists their modules, the class."""
        return self.kind[1:].partition(",")[0].partition(" ")[0] if self.kind.startswith(":") else self.kind or "blocks"

    def __str__(self) -> str:
        return f"{self.name} ({self.part})" if self.part else self.name


WHOLE = GraphLabel()
_RUNNING: ContextVar[GraphLabel] = ContextVar("running", default=WHOLE)
"""What runs in this thread."""


def label_calls(label: GraphLabel, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function whose graphs are counted by what it is."""

    def call_labelled(*args: Any, **kwargs: Any) -> Any:
        token = _RUNNING.set(label)
        try:
            return compiled(*args, **kwargs)
        finally:
            _RUNNING.reset(token)

    return call_labelled


def count_calls(graph: Callable[..., Any]) -> Callable[..., Any]:
    """Return a new graph's function that counts its calls by what runs."""
    number = next(_NUMBERS)

    def call_graph(*args: Any) -> Any:
        _CALLS[_RUNNING.get(), number] += 1
        return graph(*args)

    return call_graph


class GraphWatch:
    """Counts the graphs of each part that ran since it was made."""

    def __init__(self, labels: Sequence[GraphLabel]) -> None:
        """Take the parts that are compiled."""
        self.labels = list(dict.fromkeys(labels))
        self.earlier_calls = Counter(_CALLS)

    def count_graphs(self) -> dict[GraphLabel, int]:
        """Return how many different graphs of each part ran."""
        graphs = Counter(key[0] for key, calls in _CALLS.items() if calls > self.earlier_calls[key])
        return {label: graphs[label] for label in self.labels}

    def describe(self) -> str:
        """Return the graphs of each kind of block; empty where nothing is compiled."""
        kinds: dict[str, list[str]] = {}
        for label, graphs in self.count_graphs().items():
            part = f"{label.part} {graphs}" if label.part else str(graphs)
            kinds.setdefault(label.kind, []).append(part)
        return "; ".join(f"{GraphLabel(kind).name}: {', '.join(parts)}" for kind, parts in kinds.items())

    def list_missing(self) -> list[GraphLabel]:
        """Return the parts of which no graph ran, though they are compiled."""
        return [label for label, graphs in self.count_graphs().items() if graphs == 0]
