"""What the ranks tell each other about checkpoints.

It goes over a process group of its own, on the host: saves run in a background thread, and a GPU's group belongs to
training. Whatever fails on one rank has failed on all, so that all take the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titan.checkpoint.manifest import Damaged
from titan.settings import Refusal

T = TypeVar("T")


class Unsaved(Exception):
    """Something that all ranks do together failed on one of them; every rank raises it, with the same words.

    Attributes:
        damaged: whether what failed was a checkpoint's content, so that to try again is of no use.
    """

    def __init__(self, words: str, damaged: bool = False) -> None:
        super().__init__(words)
        self.damaged = damaged


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Within it, what fails is said to have failed while doing `what`."""
    try:
        yield
    except Unsaved as error:
        raise Unsaved(f"{what}: {error}", error.damaged) from error


class _Error(NamedTuple):
    """An error on its way to other ranks: its words, and whether it is a checkpoint's damage."""

    words: str
    damaged: bool


class Talk:
    """The ranks' group for checkpoints, from one rank."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        """Take this rank's number among `size`; `group` None is the default group."""
        self.rank, self.size, self.group = rank, size, group

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def tell(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]  # type: ignore[no-any-return]

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank, and give all results.

        Raises:
            Unsaved: on every rank, when it failed on any.
        """
        result, error = _tried(work)
        results = self.gather((result, error))
        self._agree([error for _, error in results])
        return [result for result, _ in results]  # type: ignore[misc]

    def each(self, work: Callable[[], T]) -> T:
        """As `together`, but a rank gets its own result only, which need not be fit to travel."""
        result, error = _tried(work)
        self._agree(self.gather(error))
        return result  # type: ignore[return-value]

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each place, whether any rank's flag is set there; all ranks give as many."""
        if self.size == 1:
            return list(flags)
        numbers = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return [bool(number) for number in numbers.tolist()]

    def _agree(self, errors: Sequence[_Error | None]) -> None:
        for rank, error in enumerate(errors):
            if error:
                raise Unsaved(f"rank {rank}: {error.words}" if self.size > 1 else error.words, error.damaged)

    def first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 alone, and give its result to all.

        Raises:
            Unsaved: on every rank, when it failed.
        """
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def _tried(work: Callable[[], T]) -> tuple[T | None, _Error | None]:
    """The result, or what went wrong."""
    try:
        return work(), None
    except Exception as error:
        return None, _Error(reason(error), isinstance(error, Damaged))


def reason(error: BaseException) -> str:
    """An error in a few words: the system's own where it is one of the system's."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {reason(first)}" if len(error.failures) > 1 or rank else reason(first)
    if isinstance(error, (Damaged, Refusal, Unsaved)):
        return str(error)
    cause: BaseException | None = error
    while cause is not None:  # torch's file writer raises an error of its own from the system's
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror
        cause = cause.__cause__ or cause.__context__
    words = " ".join(str(error).split()).partition(". ")[0][:300]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
