"""Whether attention of one's own does what its class states (`titan.model.core`), on one row of random numbers.

Techniques rely on it: they give a core some of a row's queries, some of its heads, or its chunks one after another. A
core that indexes where it must compare positions would be another function there, without an error. A core that can't
compute the whole row on a CPU in float32 is not judged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from titan.model.core import AttentionCore, KeyValueCore, RecurrentCore
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


def find_core_error(core: AttentionCore, heads: int, kv_heads: int, width: int, tensor: int) -> str | None:
    """Return how a core differs from what its class states, and the way out; None where it doesn't, or can't be judged.

    Args:
        core: on meta, but for its buffers.
        heads: H, of the whole model.
        width: d.
        tensor: the degree of tensor parallelism.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        try:
            row = Row(core, heads, kv_heads, width)
            out = row.attend_all()
        except Exception:  # such as a kernel that only a GPU has; what fails later depends on what the core gets
            return None
        return next(_find_errors(row, out, tensor), None)


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
        inputs = CoreInputs(None, queries, keys)
        if isinstance(self.core, RecurrentCore):
            return self.core.attend(q, k, v, inputs, self.core.init_state(q, k, v))[0]
        return self.core.attend(q, k, v, inputs)

    def attend_all(self, k: Tensor | None = None, v: Tensor | None = None) -> Any:
        """Return what all queries get, of other keys and values where they are given."""
        return self.attend(self.q, self.k if k is None else k, self.v if v is None else v, self.tokens, self.tokens)

    def attend_without(self, token: int) -> Tensor:
        """Return what all queries get where one token has another key and another value."""
        changed = torch.zeros(ROW_TOKENS, 1)
        changed[token] = 1
        out: Tensor = self.attend_all(self.k + changed, self.v - changed)
        return out


def _find_errors(row: Row, out: Any, tensor: int) -> Iterator[str]:
    """Yield how a core differs from what its class states; `out` is what all queries of the row get."""
    if not isinstance(out, Tensor) or out.shape != row.q.shape:
        returned = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        yield f"returns {returned} for queries of {list(row.q.shape)}; return a tensor of their shape"
        return
    yield from _find_row_errors(row, out)
    if isinstance(row.core, KeyValueCore):
        yield from _find_part_errors(row, out)
    if isinstance(row.core, RecurrentCore):
        yield from _find_state_errors(row, out)
    if tensor > 1 and row.q.shape[1] % tensor == row.k.shape[1] % tensor == 0:  # others are rejected with the layout
        yield from _find_error(
            lambda: _differs(out[:, : out.shape[1] // tensor], _attend_with_first_heads(row, tensor)),
            "for some of the heads by themselves",
            "give parallelism.tensor=1",
        )


def _find_error(differs: Callable[[], bool], case: str, way_out: str, difference: str = "") -> Iterator[str]:
    """Yield what differs in a case, or which error the core raises there.

    Args:
        differs: calls the core, and returns whether the results are others than those of the row.
        case: what the core gets.
        difference: what is wrong where they differ; empty: the results.
    """
    try:
        error_text = (difference or f"computes other results {case}") if differs() else ""
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        error_text = f"raises {type(error).__name__} {case}{f' ({message})' if message else ''}"
    if error_text:
        yield f"{error_text}; {way_out}"


def _find_row_errors(row: Row, out: Tensor) -> Iterator[str]:
    """Yield what differs where a core gets the whole row again, and with another key and value."""
    yield from _find_error(
        lambda: _differs(out, row.attend_all()),
        "for the same tokens again",
        "leave out what is random: titan seeds no randomness of a step",
        "gives other results for the same tokens",
    )
    last_token = ROW_TOKENS - 1
    yield from _find_error(
        lambda: _differs(out[:, :, :last_token], row.attend_without(last_token)[:, :, :last_token]),
        "for another key and value of the last token",
        "attend to tokens.find_visible() only",
        "lets a token see later ones",
    )
    yield from _find_error(
        lambda: _differs(out[:, :, FIRST_TOKENS:], row.attend_without(FIRST_TOKENS - 1)[:, :, FIRST_TOKENS:]),
        "for another key and value of a token",
        "attend to tokens.find_visible() only",
        "lets a token see another document",
    )


def _find_part_errors(row: Row, out: Tensor) -> Iterator[str]:
    """Yield what differs where a core gets some queries of a row, or a query of each of two rows."""
    query_tokens = DocumentTokens(*(x[:, QUERY_INDICES] for x in row.tokens))
    yield from _find_error(
        lambda: _differs(
            out[:, :, QUERY_INDICES], row.attend(row.q[:, :, QUERY_INDICES], row.k, row.v, query_tokens, row.tokens)
        ),
        "for some queries of a row",
        f"compare positions and not indices, or {WHOLE_ROWS_REMEDY}",
    )
    yield from _find_error(
        lambda: _differs(*_attend_to_cache(row)),
        "for rows of different lengths",
        f"use the positions of each row, or {WHOLE_ROWS_REMEDY}",
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


def _find_state_errors(row: Row, out: Tensor) -> Iterator[str]:
    """Yield what differs where a core gets a row in chunks, in documents and between them."""
    for cuts in CHUNK_STARTS:
        yield from _find_error(
            lambda cuts=cuts: _differs(out, _attend_in_chunks(row, cuts)),  # type: ignore[misc]
            "for a row in chunks",
            f"return the state of all earlier tokens, or {WHOLE_ROWS_REMEDY}",
        )


def _attend_in_chunks(row: Row, cuts: tuple[int, ...]) -> Tensor:
    """Return the attention of a row in chunks, as ranks compute them: the state is zero where a document begins."""
    parts, state = [], row.core.init_state(row.q, row.k, row.v)
    for start, end in pairwise((0, *cuts, ROW_TOKENS)):
        state = tuple(torch.zeros_like(x) for x in state) if start == FIRST_TOKENS else state
        tokens = DocumentTokens(*(x[:, start:end] for x in row.tokens))
        heads = (x[:, :, start:end] for x in (row.q, row.k, row.v))
        part, state = row.core.attend(*heads, CoreInputs(None, tokens, tokens), state)
        parts.append(part)
    return torch.cat(parts, 2)


def _attend_with_first_heads(row: Row, tensor: int) -> Any:
    q, k, v = (x[:, : x.shape[1] // tensor] for x in (row.q, row.k, row.v))
    return row.attend(q, k, v, row.tokens, row.tokens)


def _differs(left: Tensor, right: Any) -> bool:
    """Return whether two results differ by more than rounding."""
    if left.shape != right.shape:
        return True
    limit = TOLERANCE * float(left.nan_to_num(0, 0, 0).abs().max())
    return not torch.allclose(left.float(), right.float(), rtol=0, atol=limit, equal_nan=True)
