"""Whether attention of one's own does what its class states (`titan.model.core`), on one row of random numbers.

Techniques rely on it: they give a core some of a row's queries, some of its heads, or its chunks one after another. A
core that indexes where it must compare positions would be another function there, without an error. A core that can't
compute the whole row on a CPU in float32 is not judged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan.model.core import AttentionCore, KeyValueCore, RecurrentCore, attend_rows
from titan.model.masks import CoreInputs, DocumentTokens

FIRST_TOKENS, SECOND_TOKENS = 5, 7
"""Tokens of the two documents of a row."""
ROW_TOKENS = FIRST_TOKENS + SECOND_TOKENS
"""Tokens of a row."""
QUERY_INDICES = (1, 3, 4, 6, 9, 11)
"""Some tokens of a row, not consecutive, as ranks have them."""
CHUNK_STARTS = ((2, 4, 8), (5,), (7, 9, 10))
"""Where chunks of a row begin that follow the first."""
CACHED_LENGTHS = (4, 10)
"""Tokens of two rows of a cache."""
TOLERANCE = 1e-3
"""Of the largest value, between two ways to compute the same in float32."""
WHOLE_ROWS_REMEDY = "derive it from titan.model.core.AttentionCore, which gets whole rows"
"""What works with any attention."""


class Row:
    """A core with random parameters, and the queries, keys and values of a row of two documents."""

    def __init__(self, core: AttentionCore, heads: int, kv_heads: int, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.core: Any = copy.deepcopy(core)
        for module in self.core.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                values = torch.randn(parameter.shape, generator=generator) * 0.1
                setattr(module, name, torch.nn.Parameter(values))
        self.q, self.k, self.v = (
            torch.randn(1, count, ROW_TOKENS, width, generator=generator) for count in (heads, kv_heads, kv_heads)
        )
        self.tokens = DocumentTokens(
            torch.tensor([[0] * FIRST_TOKENS + [1] * SECOND_TOKENS]),
            torch.tensor([[*range(FIRST_TOKENS), *range(SECOND_TOKENS)]]),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, queries: DocumentTokens, keys: DocumentTokens) -> Any:
        """Return what the core computes, from the state of no tokens where it has one."""
        return attend_rows(self.core, q, k, v, CoreInputs(None, queries, keys))

    def attend_all(self, k: Tensor | None = None, v: Tensor | None = None) -> Any:
        """Return what all queries get, of other keys and values where they are given."""
        return self.attend(self.q, self.k if k is None else k, self.v if v is None else v, self.tokens, self.tokens)

    def attend_without(self, token: int) -> Any:
        """Return what all queries get where one token has another key and another value."""
        changed = (torch.arange(ROW_TOKENS) == token).float()[:, None]
        return self.attend_all(self.k + changed, self.v - changed)


class Case(NamedTuple):
    """What a core gets, the way out where results then differ, both results, and what is wrong in that case."""

    situation: str
    way_out: str
    compute: Callable[[], tuple[Tensor, Any]]
    difference: str = ""


def find_core_error(core: AttentionCore, heads: int, kv_heads: int, width: int, tensor: int) -> str | None:
    """Return how a core differs from what its class states, and the way out; None where it doesn't, or can't be judged.

    The core is on meta, but for its buffers; `tensor` is the degree of tensor parallelism.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        try:
            row = Row(core, heads, kv_heads, width)
            out = row.attend_all()
        except Exception:  # such as a kernel that only a GPU has; what fails later depends on what the core gets
            return None
        if not isinstance(out, Tensor) or out.shape != row.q.shape:
            returned = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            return f"returns {returned} for queries of {list(row.q.shape)}; return a tensor of their shape"
        for case in _list_cases(row, out, tensor):
            if problem := _find_problem(case):
                return f"{problem}; {case.way_out}"
    return None


def _find_problem(case: Case) -> str | None:
    """Return what differs in a case, or which error the core raises there."""
    try:
        left, right = case.compute()
        limit = TOLERANCE * float(left.nan_to_num(0, 0, 0).abs().max())
        is_same = left.shape == right.shape and torch.allclose(left.float(), right.float(), 0, limit, equal_nan=True)
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        return f"raises {type(error).__name__} {case.situation}{f' ({message})' if message else ''}"
    return None if is_same else case.difference or f"computes other results {case.situation}"


def _list_cases(row: Row, out: Tensor, tensor: int) -> Iterator[Case]:
    """Yield what a class states; `out` is what all queries of the row get."""
    last, visible_only = ROW_TOKENS - 1, "attend to tokens.find_visible() only"
    yield Case(
        "for the same tokens again",
        "leave out what is random: titan seeds no randomness of a step",
        lambda: (out, row.attend_all()),
        "gives other results for the same tokens",
    )
    yield Case(
        "for another key and value of the last token",
        visible_only,
        lambda: (out[:, :, :last], row.attend_without(last)[:, :, :last]),
        "lets a token see later ones",
    )
    yield Case(
        "for another key and value of a token",
        visible_only,
        lambda: (out[:, :, FIRST_TOKENS:], row.attend_without(FIRST_TOKENS - 1)[:, :, FIRST_TOKENS:]),
        "lets a token see another document",
    )
    if isinstance(row.core, KeyValueCore):
        queries = DocumentTokens(*(x[:, QUERY_INDICES] for x in row.tokens))
        yield Case(
            "for some queries of a row",
            f"compare positions and not indices, or {WHOLE_ROWS_REMEDY}",
            lambda: (
                out[:, :, QUERY_INDICES], row.attend(row.q[:, :, QUERY_INDICES], row.k, row.v, queries, row.tokens)
            ),
        )  # fmt: skip
        yield Case(
            "for rows of different lengths",
            f"use the positions of each row, or {WHOLE_ROWS_REMEDY}",
            lambda: _attend_to_cache(row),
        )
    for cuts in CHUNK_STARTS if isinstance(row.core, RecurrentCore) else ():
        yield Case(
            "for a row in chunks",
            f"return the state of all earlier tokens, or {WHOLE_ROWS_REMEDY}",
            partial(_attend_in_chunks, row, out, cuts),
        )
    if tensor > 1 and row.q.shape[1] % tensor == row.k.shape[1] % tensor == 0:  # others are rejected with the layout
        q, k, v = (x[:, : x.shape[1] // tensor] for x in (row.q, row.k, row.v))
        yield Case(
            "for some of the heads by themselves",
            "give parallelism.tensor=1",
            lambda: (out[:, : out.shape[1] // tensor], row.attend(q, k, v, row.tokens, row.tokens)),
        )


def _attend_to_cache(row: Row) -> tuple[Tensor, Tensor]:
    """Return what the last queries of two rows get from all of the row, and from a cache with both rows."""
    columns = torch.arange(ROW_TOKENS)[None]
    keys = DocumentTokens(torch.zeros_like(columns), columns)
    last_positions = torch.tensor(CACHED_LENGTHS)[:, None] - 1
    queries = torch.cat([row.q[:, :, length - 1 : length] for length in CACHED_LENGTHS])
    k, v = (x.repeat(len(CACHED_LENGTHS), 1, 1, 1) for x in (row.k, row.v))
    cached = row.attend(queries, k, v, DocumentTokens(torch.zeros_like(last_positions), last_positions), keys)
    whole = row.attend(row.q, row.k, row.v, keys, keys)
    return torch.cat([whole[:, :, length - 1 : length] for length in CACHED_LENGTHS]), cached


def _attend_in_chunks(row: Row, out: Tensor, cuts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return `out`, and the row in chunks, as ranks compute them: the state is zero where a document begins."""
    parts, state = [], row.core.init_state(row.q, row.k, row.v)
    for start, end in pairwise((0, *cuts, ROW_TOKENS)):
        state = tuple(torch.zeros_like(x) for x in state) if start == FIRST_TOKENS else state
        tokens = DocumentTokens(*(x[:, start:end] for x in row.tokens))
        heads = (x[:, :, start:end] for x in (row.q, row.k, row.v))
        part, state = row.core.attend(*heads, CoreInputs(None, tokens, tokens), state)
        parts.append(part)
    return out, torch.cat(parts, 2)
