"""What the ranks tell each other about checkpoints.

It goes over an `Exchange`, which any thread may use while a GPU's groups belong to training. A step is at most one
message of each rank to rank 0 and one from it to all. Whatever fails on one rank has failed on all, so that all take
the same way.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titan.checkpoint.manifest import Damaged
from titan.errors import ConfigError
from titan.parallelism.exchange import Exchange

T = TypeVar("T")
R = TypeVar("R")


class CoordinationError(Exception):
    """Something that all ranks do together failed on one of them; every rank raises it, with the same words.

    Attributes:
        damaged: whether what failed was a checkpoint's content, so that to try again is of no use.
        refused: whether it was refused, in a sentence to the user.
    """

    def __init__(self, words: str, damaged: bool = False, refused: bool = False) -> None:
        super().__init__(words)
        self.damaged, self.refused = damaged, refused


@contextmanager
def describing(what: str) -> Iterator[None]:
    """Within it, what fails is said to have failed while doing `what`."""
    try:
        yield
    except CoordinationError as error:
        raise CoordinationError(f"{what}: {error}", error.damaged, error.refused) from error


class _Error(NamedTuple):
    """An error on its way to other ranks: its words, whether it is a checkpoint's damage, whether a refusal."""

    words: str
    damaged: bool
    refused: bool

    def named(self, rank: int | None) -> CoordinationError:
        """The error that every rank raises; `rank` is where it happened."""
        return CoordinationError(
            self.words if rank is None else f"rank {rank}: {self.words}", self.damaged, self.refused
        )


class Coordinator:
    """The ranks' words about checkpoints, from one rank."""

    def __init__(self, rank: int, world_size: int, exchange: Exchange | None = None) -> None:
        """Take this rank's number among `world_size`; `exchange` None makes one over the default group's store."""
        self.rank, self.world_size = rank, world_size
        if exchange is None and world_size > 1:
            exchange = Exchange(dist.distributed_c10d._get_default_store(), rank, world_size)
        self.exchange = exchange

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.exchange is None:
            return value
        message = self.exchange.broadcast(_packed(value) if self.rank == 0 else b"")
        return value if self.rank == 0 else _unpacked(message)

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 alone, and give its result to all.

        Raises:
            Unsaved: on every rank, when it failed.
        """
        return self._answer(lambda: _tried(work))  # type: ignore[no-any-return]

    def only_on_rank0(self, work: Callable[[], object]) -> None:
        """Do `work` on rank 0 alone, and give nothing to the others.

        Raises:
            Unsaved: on rank 0, when it failed.
        """
        _, error = _tried(work) if self.rank == 0 else (None, None)
        if error:
            raise error.named(self._mine)

    def run_all(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; each gets its own result, which need not be fit to travel.

        Raises:
            Unsaved: on every rank, when it failed on any.
        """
        result, error = _tried(work)
        self._collected(None, error, _nothing)
        return result  # type: ignore[return-value]

    def gather(self, work: Callable[[], T], conclude: Callable[[list[T]], R]) -> R:
        """Do `work` on every rank, `conclude` on rank 0 with all results, by rank, and give what it returns to all.

        Raises:
            Unsaved: on every rank, when `work` failed on any, or `conclude` did.
        """
        result, error = _tried(work)
        return self._collected(result, error, conclude)  # type: ignore[no-any-return]

    def scatter(self, work: Callable[[], T], conclude: Callable[[list[T]], Sequence[R]]) -> R:
        """As `gather`, but `conclude` gives a result for each rank, which gets its own only."""
        result, error = _tried(work)
        return self._collected(result, error, conclude, dealt=True)  # type: ignore[no-any-return]

    def part(self) -> None:
        """Let all ranks read rank 0's last message before it may end; all ranks call it together."""
        if self.exchange is not None:
            self.exchange.part()

    def leave(self) -> None:
        """Take part no more: the others' next step fails instead of waiting for this rank."""
        if self.exchange is not None:
            self.exchange.leave()

    @property
    def _mine(self) -> int | None:
        """What this rank's errors are named by: nothing where it is the only one."""
        return self.rank if self.world_size > 1 else None

    def _collected(
        self, result: Any, error: _Error | None, conclude: Callable[[list[Any]], Any], dealt: bool = False
    ) -> Any:
        if self.exchange is None:
            return self._answer(lambda: (None, error) if error else _tried(lambda: conclude([result])), dealt)
        messages = self._gathered(_packed((result, error)))
        return self._answer(lambda: _concluded(messages, conclude), dealt)

    def _gathered(self, message: bytes) -> list[bytes] | ConnectionError | None:
        """All ranks' messages on rank 0, or why there are none: the others have to hear of that too."""
        assert self.exchange is not None
        try:
            return self.exchange.gather(message)
        except ConnectionError as error:
            return error

    def _answer(
        self, conclude: Callable[[], tuple[Any, CoordinationError | _Error | None]], dealt: bool = False
    ) -> Any:
        """What `conclude` gives on rank 0, which alone calls it, to all, or `dealt` to each its own; or its error."""
        result: Any = None
        error: CoordinationError | _Error | None = None
        if self.rank == 0:
            result, error = conclude()
        if isinstance(error, _Error):
            error = error.named(self._mine)
        failure = error and (str(error), error.damaged, error.refused)
        if dealt:
            result, failure = self._dealt([(None if failure else result[rank], failure) for rank in self._all()])
        else:
            result, failure = self.broadcast((result, failure))
        if failure:
            raise CoordinationError(*failure)
        return result

    def _dealt(self, answers: list[Any]) -> Any:
        """This rank's own of rank 0's answers."""
        if self.exchange is None:
            return answers[0]
        messages = [_packed(answer) for answer in answers]
        return _unpacked(self.exchange.scatter(messages))

    def _all(self) -> range:
        """All ranks, on rank 0, which has something for each."""
        return range(self.world_size if self.rank == 0 else 0)


def _concluded(
    messages: list[bytes] | ConnectionError | None, conclude: Callable[[list[Any]], R]
) -> tuple[R | None, CoordinationError | _Error | None]:
    """What follows from all ranks' messages; the first rank's error, where there is any."""
    if isinstance(messages, ConnectionError):
        return None, CoordinationError(str(messages))
    known = {message: _unpacked(message) for message in messages or ()}  # what replicas hold is read and kept once
    parts = [known[message] for message in messages or ()]
    for rank, (_, error) in enumerate(parts):
        if error:
            return None, error.named(rank)
    return _tried(lambda: conclude([result for result, _ in parts]))


def _nothing(results: Sequence[object]) -> None:
    """Nothing follows."""


def _packed(value: Any) -> bytes:
    """A value on its way to other ranks: plans of many tensors shrink to a tenth."""
    return zlib.compress(pickle.dumps(value), 1)


def _unpacked(message: bytes) -> Any:
    return pickle.loads(zlib.decompress(message))


def _tried(work: Callable[[], T]) -> tuple[T | None, _Error | None]:
    """The result, or what went wrong."""
    try:
        return work(), None
    except (Exception, CheckpointException) as error:  # which is no Exception
        damaged = isinstance(error, Damaged) or (isinstance(error, CoordinationError) and error.damaged)
        return None, _Error(reason(error), damaged, isinstance(error, ConfigError))


def reason(error: BaseException) -> str:
    """An error in a few words: the system's own where it is one of the system's."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {reason(first)}" if len(error.failures) > 1 or rank else reason(first)
    if isinstance(error, (Damaged, ConfigError, CoordinationError)):
        return str(error)
    cause: BaseException | None = error
    while cause is not None:  # torch's file writer raises an error of its own from the system's
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror
        cause = cause.__cause__ or cause.__context__
    words = " ".join(str(error).split()).partition(". ")[0][:300]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
