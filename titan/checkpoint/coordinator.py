"""Collective operations of the ranks for checkpoints.

They use an `Exchange`, which works from any thread and doesn't need the GPU's process groups. An operation sends at
most one message from each rank to rank 0 and one back. If it fails on one rank it fails on all, so that all ranks
continue in the same way.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titan.checkpoint.manifest import Corrupt
from titan.debug.activity import Activity
from titan.errors import ConfigError
from titan.parallelism.exchange import Exchange
from titan.parallelism.mesh import World

T = TypeVar("T")
R = TypeVar("R")


class CoordinationError(Exception):
    """A collective operation failed on one rank; every rank raises it with the same message.

    Attributes:
        damaged: whether a checkpoint's content is corrupt, so that a retry is useless.
        refused: whether the error was a ConfigError.
    """

    def __init__(self, words: str, damaged: bool = False, refused: bool = False) -> None:
        super().__init__(words)
        self.damaged, self.refused = damaged, refused


@contextmanager
def describing(what: str) -> Iterator[None]:
    """Prefix the message of a CoordinationError within the context with `what`."""
    try:
        yield
    except CoordinationError as error:
        raise CoordinationError(f"{what}: {error}", error.damaged, error.refused) from error


class _Error(NamedTuple):
    """An error as it is sent to other ranks: its message, and the attributes of CoordinationError."""

    words: str
    damaged: bool
    refused: bool

    def named(self, rank: int | None) -> CoordinationError:
        """Return the error that every rank raises; `rank` is where it happened."""
        return CoordinationError(
            self.words if rank is None else f"rank {rank}: {self.words}", self.damaged, self.refused
        )


class Coordinator:
    """Collective operations, seen from one rank; all ranks call the same ones in the same order."""

    def __init__(
        self, rank: int, world_size: int, exchange: Exchange | None = None, activity: Activity | None = None
    ) -> None:
        """Create the coordinator of `rank`.

        Args:
            rank, world_size: this rank, and the number of ranks.
            exchange: sends its messages; None: over the default process group's store.
            activity: where to record progress with files and tensors.
        """
        self.rank, self.world_size = rank, world_size
        self.activity = activity or Activity()
        if exchange is None and world_size > 1:
            exchange = Exchange(dist.distributed_c10d._get_default_store(), rank, world_size)
        self.exchange = exchange

    @classmethod
    def of(cls, world: World) -> Coordinator:
        """Return the coordinator of a rank of a world."""
        info = world.rank_info
        return cls(info.rank, info.world_size, world.exchange, world.activity)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self.exchange is None:
            return value
        message = self.exchange.broadcast(pack_message(value) if self.rank == 0 else b"")
        return value if self.rank == 0 else unpack_message(message)

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank.

        Raises:
            CoordinationError: on every rank, when it failed.
        """
        return self._answer(lambda: _tried(work))  # type: ignore[no-any-return]

    def only_on_rank0(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0, without communication.

        Raises:
            CoordinationError: on rank 0, when it failed.
        """
        _, error = _tried(work) if self.rank == 0 else (None, None)
        if error:
            raise error.named(self._mine)

    def run_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; each returns its own result, which is not sent and need not be picklable.

        Raises:
            CoordinationError: on every rank, when it failed on any.
        """
        result, error = _tried(work)
        self._collected(None, error, _nothing)
        return result  # type: ignore[return-value]

    def gather(self, work: Callable[[], T], conclude: Callable[[list[T]], R]) -> R:
        """Run `work` on every rank, then `conclude` on rank 0 with all results by rank; return its result on all ranks.

        Raises:
            CoordinationError: on every rank, when `work` failed on any, or `conclude` did.
        """
        result, error = _tried(work)
        return self._collected(result, error, conclude)  # type: ignore[no-any-return]

    def scatter(self, work: Callable[[], T], conclude: Callable[[list[T]], Sequence[R]]) -> R:
        """As `gather`, but `conclude` returns one result per rank, and each rank gets its own."""
        result, error = _tried(work)
        return self._collected(result, error, conclude, dealt=True)  # type: ignore[no-any-return]

    def part(self) -> None:
        """Wait until all ranks have read rank 0's last message, before it may exit; all ranks call it together."""
        if self.exchange is not None:
            self.exchange.part()

    def leave(self) -> None:
        """Leave: the other ranks' next operation fails instead of waiting for this rank."""
        if self.exchange is not None:
            self.exchange.leave()

    @property
    def _mine(self) -> int | None:
        """The rank in this rank's error messages; None if it is the only one."""
        return self.rank if self.world_size > 1 else None

    def _collected(
        self, result: Any, error: _Error | None, conclude: Callable[[list[Any]], Any], dealt: bool = False
    ) -> Any:
        if self.exchange is None:
            return self._answer(lambda: (None, error) if error else _tried(lambda: conclude([result])), dealt)
        messages = self._gathered(pack_message((result, error)))
        return self._answer(lambda: _concluded(messages, conclude), dealt)

    def _gathered(self, message: bytes) -> list[bytes] | ConnectionError | None:
        """Return all ranks' messages on rank 0, or the error, which rank 0 must send to the others."""
        assert self.exchange is not None
        try:
            return self.exchange.gather(message)
        except ConnectionError as error:
            return error

    def _answer(
        self, conclude: Callable[[], tuple[Any, CoordinationError | _Error | None]], dealt: bool = False
    ) -> Any:
        """Call `conclude` on rank 0 and send its result (if `dealt`, each rank's own) or its error to all ranks."""
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
        """Return this rank's own one of rank 0's answers."""
        if self.exchange is None:
            return answers[0]
        messages = [pack_message(answer) for answer in answers]
        return unpack_message(self.exchange.scatter(messages))

    def _all(self) -> range:
        """Return all ranks on rank 0, none on the others."""
        return range(self.world_size if self.rank == 0 else 0)


def _concluded(
    messages: list[bytes] | ConnectionError | None, conclude: Callable[[list[Any]], R]
) -> tuple[R | None, CoordinationError | _Error | None]:
    """Call `conclude` with all ranks' results, or return the first rank's error."""
    if isinstance(messages, ConnectionError):
        return None, CoordinationError(str(messages))
    known = {
        message: unpack_message(message) for message in messages or ()
    }  # replicas' equal messages are unpacked once
    parts = [known[message] for message in messages or ()]
    for rank, (_, error) in enumerate(parts):
        if error:
            return None, error.named(rank)
    return _tried(lambda: conclude([result for result, _ in parts]))


def _nothing(results: Sequence[object]) -> None:
    """Ignore the results."""


def pack_message(value: Any) -> bytes:
    """Pickle and compress a value: plans of many tensors shrink to a tenth."""
    return zlib.compress(pickle.dumps(value), 1)


def unpack_message(message: bytes) -> Any:
    """Return the value that `pack_message` was given."""
    return pickle.loads(zlib.decompress(message))


def _tried(work: Callable[[], T]) -> tuple[T | None, _Error | None]:
    """Return the result, or the error."""
    try:
        return work(), None
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
        damaged = isinstance(error, Corrupt) or (isinstance(error, CoordinationError) and error.damaged)
        return None, _Error(reason(error), damaged, isinstance(error, ConfigError))


def reason(error: BaseException) -> str:
    """Return an error as a short message; for an OSError the system's own."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {reason(first)}" if len(error.failures) > 1 or rank else reason(first)
    if isinstance(error, (Corrupt, ConfigError, CoordinationError)):
        return str(error)
    cause: BaseException | None = error
    while cause is not None:  # torch's file writer wraps the system's error
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror
        cause = cause.__cause__ or cause.__context__
    words = " ".join(str(error).split()).partition(". ")[0][:300]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
