"""Collective operations of the ranks for checkpoints.

They use an `StoreExchange`, which works from any thread and doesn't need the GPU's process groups. An operation sends
at most one message from each rank to rank 0 and one back. If it fails on one rank it fails on all, so that all ranks
continue in the same way. A message is JSON: whoever reaches the store may have written it, and reading it runs no code.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titan.checkpoint.manifest import CorruptCheckpointError
from titan.config.frozen_json import read_json, write_json
from titan.debug.activity import Activity
from titan.errors import ConfigError, RunError
from titan.parallelism.exchange import StoreExchange
from titan.parallelism.mesh import RunContext

_UNREADABLE = "a message of another rank can't be read"
_WORDS = (
    b'{"mapping":[["__0_0.distcp",{"class":["titan.checkpoint.manifest","ManifestFile"],"fields":[["bytes",],["crc32",'
    b'{"tuple":[{"tuple":[{"class":["titan.checkpoint.save_planner","WriteSummary"],"fields":[["positions",null],["digest",'
)
"""What the messages of most saves have in common: zlib leaves it out."""
T = TypeVar("T")
R = TypeVar("R")


class CoordinationError(RunError):
    """A collective operation failed on one rank; every rank raises it with the same message.

    Attributes:
        is_corrupt: whether a checkpoint's content is corrupt, so that a retry is useless.
        is_config_error: whether the error was a ConfigError.
    """

    def __init__(self, message: str, is_corrupt: bool = False, is_config_error: bool = False) -> None:
        super().__init__(message)
        self.is_corrupt, self.is_config_error = is_corrupt, is_config_error


@contextmanager
def prefix_errors(prefix: str) -> Iterator[None]:
    """Prefix the message of a CoordinationError within the context with `prefix`."""
    try:
        yield
    except CoordinationError as error:
        raise CoordinationError(f"{prefix}: {error}", error.is_corrupt, error.is_config_error) from error


class _ErrorMessage(NamedTuple):
    """An error as it is sent to other ranks: its message, and the attributes of CoordinationError."""

    message: str
    is_corrupt: bool
    is_config_error: bool

    def to_exception(self, rank: int | None) -> CoordinationError:
        """Return the error that every rank raises; `rank` is where it happened."""
        return CoordinationError(
            self.message if rank is None else f"rank {rank}: {self.message}", self.is_corrupt, self.is_config_error
        )


class Coordinator:
    """Collective operations, seen from one rank; all ranks call the same ones in the same order."""

    def __init__(
        self, rank: int, world_size: int, exchange: StoreExchange | None = None, activity: Activity | None = None
    ) -> None:
        """Create the coordinator of `rank`.

        Args:
            exchange: sends its messages; None: over the default process group's store.
            activity: where to record progress with files and tensors.
        """
        self.rank, self.world_size = rank, world_size
        self.activity = activity or Activity()
        if exchange is None and world_size > 1:
            exchange = StoreExchange(dist.distributed_c10d._get_default_store(), rank, world_size)
        self.exchange = exchange

    @classmethod
    def from_world(cls, world: RunContext) -> Coordinator:
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
        return self._send_result(lambda: _call(work))  # type: ignore[no-any-return]

    def only_on_rank0(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0, without communication.

        Raises:
            CoordinationError: on rank 0, when it failed.
        """
        _, error = _call(work) if self.rank == 0 else (None, None)
        if error:
            raise error.to_exception(self._error_rank)

    def run_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; each returns its own result, which is not sent.

        Raises:
            CoordinationError: on every rank, when it failed on any.
        """
        result, error = _call(work)
        self._collect_results(None, error, _ignore)
        return result  # type: ignore[return-value]

    def gather(self, work: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Run `work` on every rank, then `combine` on rank 0 with all results by rank; return its result on all ranks.

        Raises:
            CoordinationError: on every rank, when `work` failed on any, or `combine` did.
        """
        result, error = _call(work)
        return self._collect_results(result, error, combine)  # type: ignore[no-any-return]

    def scatter(self, work: Callable[[], T], combine: Callable[[list[T]], Sequence[R]]) -> R:
        """As `gather`, but `combine` returns one result per rank, and each rank gets its own."""
        result, error = _call(work)
        return self._collect_results(result, error, combine, is_scattered=True)  # type: ignore[no-any-return]

    def drain(self) -> None:
        """Wait until all ranks have read rank 0's last message, before it may exit; all ranks call it together."""
        if self.exchange is not None:
            self.exchange.drain()

    def abort(self) -> None:
        """Leave: the other ranks' next operation fails instead of waiting for this rank."""
        if self.exchange is not None:
            self.exchange.abort()

    @property
    def _error_rank(self) -> int | None:
        """The rank in this rank's error messages; None if it is the only one."""
        return self.rank if self.world_size > 1 else None

    def _collect_results(
        self, result: Any, error: _ErrorMessage | None, combine: Callable[[list[Any]], Any], is_scattered: bool = False
    ) -> Any:
        if self.exchange is None:
            return self._send_result(lambda: (None, error) if error else _call(lambda: combine([result])), is_scattered)
        messages = self._gather_messages(pack_message((result, error)))
        return self._send_result(lambda: _combine_messages(messages, combine), is_scattered)

    def _gather_messages(self, message: bytes) -> list[bytes] | ConnectionError | None:
        """Return all ranks' messages on rank 0, or the error, which rank 0 must send to the others."""
        assert self.exchange is not None
        try:
            return self.exchange.gather(message)
        except ConnectionError as error:
            return error

    def _send_result(
        self, compute: Callable[[], tuple[Any, CoordinationError | _ErrorMessage | None]], is_scattered: bool = False
    ) -> Any:
        """Call `compute` on rank 0 and send its result (`is_scattered`: one for each rank) or its error to all."""
        result: Any = None
        error: CoordinationError | _ErrorMessage | None = None
        if self.rank == 0:
            result, error = compute()
        if isinstance(error, _ErrorMessage):
            error = error.to_exception(self._error_rank)
        failure = error and _ErrorMessage(str(error), error.is_corrupt, error.is_config_error)
        if is_scattered:
            outcomes = [(None if failure else result[rank], failure) for rank in self._list_ranks()]
        result, failure = _check_outcome(
            self._scatter_results(outcomes) if is_scattered else self.broadcast((result, failure))
        )
        if failure:
            raise failure.to_exception(None)
        return result

    def _scatter_results(self, results: list[Any]) -> Any:
        """Return this rank's own one of rank 0's answers."""
        if self.exchange is None:
            return results[0]
        messages = [pack_message(result) for result in results]
        return unpack_message(self.exchange.scatter(messages))

    def _list_ranks(self) -> range:
        """Return all ranks on rank 0, none on the others."""
        return range(self.world_size if self.rank == 0 else 0)


def _combine_messages(
    messages: list[bytes] | ConnectionError | None, combine: Callable[[list[Any]], R]
) -> tuple[R | None, CoordinationError | _ErrorMessage | None]:
    """Call `combine` with all ranks' results, or return the first rank's error."""
    if isinstance(messages, ConnectionError):
        return None, CoordinationError(str(messages))
    try:  # replicas' equal messages are unpacked once
        unpacked = {message: _check_outcome(unpack_message(message)) for message in messages or ()}
    except CoordinationError as unreadable:
        return None, unreadable
    outcomes = [unpacked[message] for message in messages or ()]
    for rank, (_, error) in enumerate(outcomes):
        if error:
            return None, error.to_exception(rank)
    return _call(lambda: combine([result for result, _ in outcomes]))


def _ignore(results: Sequence[object]) -> None:
    """Ignore the results."""


def _check_outcome(outcome: Any) -> tuple[Any, _ErrorMessage | None]:
    """Return what a rank sent as its result and its error, if it is that."""
    match outcome:
        case (result, None | _ErrorMessage() as error):
            return result, error
    raise CoordinationError(f"{_UNREADABLE}: it is no result of a rank")


def pack_message(value: Any) -> bytes:
    """Return a value as compressed JSON: plans of many tensors shrink to a tenth."""
    compressor = zlib.compressobj(1, zdict=_WORDS)
    return compressor.compress(write_json(value)) + compressor.flush()


def unpack_message(message: bytes) -> Any:
    """Return the value that `pack_message` was given.

    Raises:
        CoordinationError: for any other message.
    """
    try:
        return read_json(zlib.decompressobj(zdict=_WORDS).decompress(message))
    except (ValueError, zlib.error) as error:
        raise CoordinationError(f"{_UNREADABLE}: {error}") from error


def _call(work: Callable[[], T]) -> tuple[T | None, _ErrorMessage | None]:
    """Return the result, or the error."""
    try:
        return work(), None
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
        is_corrupt = isinstance(error, CorruptCheckpointError) or (
            isinstance(error, CoordinationError) and error.is_corrupt
        )
        return None, _ErrorMessage(find_reason(error), is_corrupt, isinstance(error, ConfigError))


def find_reason(error: BaseException) -> str:
    """Return an error as a short message; for an OSError the system's own."""
    if isinstance(error, CheckpointException):
        rank, (first_error, _) = next(iter(error.failures.items()))
        return (
            f"rank {rank}: {find_reason(first_error)}" if len(error.failures) > 1 or rank else find_reason(first_error)
        )
    if isinstance(error, (CorruptCheckpointError, ConfigError, CoordinationError)):
        return str(error)
    cause: BaseException | None = error
    while cause is not None:  # torch's file writer wraps the system's error
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror
        cause = cause.__cause__ or cause.__context__
    text = " ".join(str(error).split()).partition(". ")[0][:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
