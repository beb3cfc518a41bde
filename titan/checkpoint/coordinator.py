"""Collective operations of the ranks for checkpoints.

They use an `StoreExchange`, which works from any thread and doesn't need the GPU's process groups. An operation sends
at most one message from each rank to rank 0 and one back. If it fails on one rank it fails on all, so that all ranks
continue in the same way. A message is JSON: whoever reaches the store may have written it, and reading it runs no code.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

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


_Outcome = tuple[Any, tuple[str, bool, bool] | None]
"""What a rank sends: a result, or an error, as the arguments of CoordinationError."""


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
        return self._send_outcome(self._call(work) if self.rank == 0 else None)  # type: ignore[no-any-return]

    def only_on_rank0(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0, without communication.

        Raises:
            CoordinationError: on rank 0, when it failed.
        """
        _, error = self._call(work) if self.rank == 0 else (None, None)
        if error:
            raise CoordinationError(*error)

    def run_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; each returns its own result, which is not sent.

        Raises:
            CoordinationError: on every rank, when it failed on any.
        """
        result, error = self._call(work)
        self._collect_results((None, error), lambda results: None)
        return result  # type: ignore[no-any-return]

    def gather(self, work: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Run `work` on every rank, then `combine` on rank 0 with all results by rank; return its result on all ranks.

        Raises:
            CoordinationError: on every rank, when `work` failed on any, or `combine` did.
        """
        return self._collect_results(self._call(work), combine)  # type: ignore[no-any-return]

    def scatter(self, work: Callable[[], T], combine: Callable[[list[T]], Sequence[R]]) -> R:
        """As `gather`, but `combine` returns one result per rank, and each rank gets its own."""
        return self._collect_results(self._call(work), combine, is_scattered=True)  # type: ignore[no-any-return]

    def drain(self) -> None:
        """Wait until all ranks have read rank 0's last message, before it may exit; all ranks call it together."""
        if self.exchange is not None:
            self.exchange.drain()

    def abort(self) -> None:
        """Leave: the other ranks' next operation fails instead of waiting for this rank."""
        if self.exchange is not None:
            self.exchange.abort()

    def _call(self, work: Callable[[], Any]) -> _Outcome:
        """Return the result, or the error, which names this rank where it is not the only one."""
        try:
            return work(), None
        except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
            is_corrupt = isinstance(error, CorruptCheckpointError) or getattr(error, "is_corrupt", False)
            place = f"rank {self.rank}: " if self.world_size > 1 else ""
            return None, (place + find_reason(error), is_corrupt, isinstance(error, ConfigError))

    def _collect_results(
        self, outcome: _Outcome, combine: Callable[[list[Any]], Any], is_scattered: bool = False
    ) -> Any:
        """Call `combine` on rank 0 with all ranks' results; return its result, or raise the first error, on all."""
        combined: _Outcome | None = None
        try:
            outcomes = self._gather_outcomes(outcome)
            error = next((error for _, error in outcomes if error), None)
            if self.rank == 0:
                combined = (None, error) if error else self._call(lambda: combine([result for result, _ in outcomes]))
        except (ConnectionError, CoordinationError) as lost:  # rank 0 must send it to the others
            combined = None, (str(lost), False, False)
        return self._send_outcome(combined, is_scattered)

    def _gather_outcomes(self, outcome: _Outcome) -> list[_Outcome]:
        """Return the outcomes of all ranks on rank 0; none on the others."""
        if self.exchange is None:
            return [outcome]
        messages = self.exchange.gather(pack_message(outcome)) or []
        # replicas' equal messages are unpacked once
        unpacked = {message: _check_outcome(unpack_message(message)) for message in dict.fromkeys(messages)}
        return [unpacked[message] for message in messages]

    def _send_outcome(self, outcome: _Outcome | None, is_scattered: bool = False) -> Any:
        """Send rank 0's result (`is_scattered`: one for each rank) or its error to all; return it, or raise it."""
        if is_scattered:
            results, error = outcome or (None, None)
            ranks = range(self.world_size if self.rank == 0 else 0)
            outcomes = [(results and results[rank], error) for rank in ranks]
            if self.exchange is None:
                outcome = outcomes[0]
            else:
                outcome = unpack_message(self.exchange.scatter([pack_message(each) for each in outcomes]))
        else:
            outcome = self.broadcast(outcome)
        result, error = _check_outcome(outcome)
        if error:
            raise CoordinationError(*error)
        return result


def _check_outcome(outcome: Any) -> _Outcome:
    """Return what a rank sent as its result and its error, if it is that."""
    match outcome:
        case (result, None | (str(), bool(), bool()) as error):
            return result, error
    raise CoordinationError(f"{_UNREADABLE}: it is no result of a rank")


def pack_message(value: Any) -> bytes:
    """Return a value as compressed JSON: plans of many tensors shrink to a tenth."""
    compressor = zlib.compressobj(1, zdict=_WORDS)
    return compressor.compress(write_json(value)) + compressor.flush()


def unpack_message(message: bytes) -> Any:
    """Return the value that `pack_message` was given."""
    try:
        return read_json(zlib.decompressobj(zdict=_WORDS).decompress(message))
    except (ValueError, zlib.error) as error:
        raise CoordinationError(f"{_UNREADABLE}: {error}") from error


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
